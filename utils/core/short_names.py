"""Names made fit for pictures: in one line, and not longer than there is room."""


def one_line(name: str) -> str:
    """Return a name without line breaks, control characters and needless spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())


def shorten(text: str, limit: int) -> str:
    """Cut the middle out of a text that is longer than ``limit`` characters: what differs is often at the end."""
    if len(text) <= limit:
        return text
    end = (limit - 2) // 2
    return f"{text[: limit - 2 - end]}..{text[len(text) - end :]}"
