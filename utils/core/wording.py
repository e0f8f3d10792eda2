"""How names, values, times and tables are written for people."""

from collections.abc import Iterable, Sequence


def one_line(name: str) -> str:
    """Return a name without line breaks, control characters and needless spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())


def escaped(path: str) -> str:
    """Return a file's name as it is shown: its line breaks and other control characters, if any, as escapes."""
    return "".join(repr(letter)[1:-1] if ord(letter) < 32 or ord(letter) == 127 else letter for letter in path)


def shorten(text: str, limit: int) -> str:
    """Cut the middle out of a text that is longer than ``limit`` characters: what differs is often at the end."""
    if len(text) <= limit:
        return text
    end = (limit - 2) // 2
    return f"{text[: limit - 2 - end]}..{text[len(text) - end :]}"


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first of some names, and dots if there are more."""
    return between.join([*names[:most], *["..."] * (len(names) > most)])


def shown(value: object, limit: int = 200) -> str:
    """Return a value as Python writes it, cut off where it gets long: it may be anything that stands in a file."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def format_lines(lines: Iterable[tuple[str, str]]) -> str:
    """Return rows of a word and what there is to say of it, in two columns."""
    return "\n".join(f"{word:<11} {text}" for word, text in lines)


def duration(seconds: float) -> str:
    """Return a time as people write it: 0:42, 12:03, 3:07:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
