"""docs/faults.md says what the program says, and lists what may change on resume."""

import re

from tests.common import PROJECT
from utils.run.resume import RESUMABLE_FLAGS, SILENT

PAGE = (PROJECT / "docs/faults.md").read_text()


def test_messages_are_those_of_the_program() -> None:
    """Each quoted message, up to what varies in it, stands in the code."""
    code = " ".join(path.read_text() for path in [*PROJECT.glob("*.py"), *PROJECT.glob("utils/**/*.py")])
    code = re.sub(r'"\s+f?"', "", code)  # texts over several lines
    rows = re.search(r"## What it says.*?\n\n(.*?)\n\n", PAGE, re.DOTALL)
    assert rows is not None
    quoted = re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in rows.group(1).splitlines()[2:]))
    assert len(quoted) > 10
    for text in quoted:
        for part in re.split(r"\.\.\.|\d+|\brank\b|\(.*?\)|SIGKILL|loading|No space left on device|[/:;,]| MB", text):
            words = part.strip(" .")
            assert words in code, f"{words!r} of {text!r}"


def test_flags_that_may_change() -> None:
    sentence = re.search(r"These may be given anew(.*?)Anything else", " ".join(PAGE.split()))
    assert sentence is not None
    listed = {name.replace("-", "_") for name in re.findall(r"`--([\w-]+)`", sentence.group(1))}
    assert listed == RESUMABLE_FLAGS - SILENT
