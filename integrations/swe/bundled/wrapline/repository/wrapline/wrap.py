"""Greedy line filling."""


def wrap(text, width):
    """Break text at spaces into lines of at most ``width`` characters; a longer word stands alone."""
    if width < 1:
        raise ValueError("width must be positive")
    lines = []
    line = ""
    for word in text.split():
        if len(line) + len(word) <= width:
            line = f"{line} {word}".strip()
        else:
            lines.append(line)
            line = word
    lines.append(line)
    return lines
