"""The hours on a clock's face."""

import roman


def face():
    return [roman.numeral(hour) for hour in range(1, 13)]


if __name__ == "__main__":
    print(*face())
