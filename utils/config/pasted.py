"""Command lines pasted from word processors, chats and PDFs, which change dashes, spaces and quotes."""

import re
from collections.abc import Container, Iterable, Sequence

# What word processors, chats and PDFs make of dashes, spaces and quotes, for whoever pastes a command from there.
DASH = "[-\u00ad\u2010-\u2015\u2212\ufe58\ufe63\uff0d]"
SPACE = "[\u00a0\u2000-\u200a\u202f\u205f\u3000]"
UNSEEN = "[\u200b-\u200f\u2060\ufeff]"
QUOTE = "[\u2018-\u201f\u00ab\u00bb\u2032\u2033]"


def as_meant(argv: Sequence[str], spellings: Iterable[str]) -> list[str]:
    """Return a command line as it was meant: flags with two plain dashes, values without quotes around them.

    A single dash, one of a word processor or a space that does not break lines is told from a part of a value by the
    flag that it belongs to.

    Args:
        argv: as it was pasted.
        spellings: of all flags that there are.
    """
    cores = {spelling.lstrip("-") for spelling in spellings}
    words: list[str] = []
    for word in argv:
        parts = re.split(SPACE, word)
        words += [part for part in parts if part] if any(_core(part) in cores for part in parts) else [word]
    return [_pasted_word(word, cores) for word in words]


def _core(word: str) -> str | None:
    """Return the flag that a word names, without dashes; None for a word that does not begin with one, of any kind."""
    spelling = re.sub(UNSEEN, "", word.partition("=")[0])
    return re.sub(DASH, "-", spelling).lstrip("-") if re.match(DASH, spelling) else None


def _pasted_word(word: str, cores: Container[str]) -> str:
    core, (_, equals, value) = _core(word), word.partition("=")
    if core is not None and (core in cores or (not word.startswith("-") and re.fullmatch("[A-Za-z][A-Za-z_-]*", core))):
        return f"--{core}{equals}{_unquoted(value)}"
    if core is not None and re.fullmatch(r"[\d.]+", core):
        return f"-{core}"
    return _unquoted(word)


def _unquoted(value: str) -> str:
    """Return a value without quotes around it that no shell has taken away: typographic ones, on Windows also ' '."""
    return value[1:-1] if re.fullmatch(f"{QUOTE}.*{QUOTE}|'.*'", value) else value
