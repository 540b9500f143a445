"""Numbers as the Romans wrote them."""

_PARTS = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def numeral(number):
    text = ""
    for value, letters in _PARTS:
        while number >= value:
            text += letters
            number -= value
    return text
