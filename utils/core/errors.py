"""Mistakes that a user can mend, and how a script ends when it meets one."""

import contextlib
import difflib
import errno
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

T = TypeVar("T")

# Exit statuses beside 0, all is done, 1, an error, and 128 + N, signal N.
USER_ERROR = 2  # a mistake of the user
NO_PROGRESS = 93  # it would fail again: schedulers should not start it anew
RESUMABLE = 143  # stopped on request, and saved: --resume goes on. It is 128 + SIGTERM, as schedulers expect
SHORT_WORD, SHORT_ALIKE = 6, 0.65  # letters below which a word must be more alike to be meant
OTHER_START_ALIKE = 0.75  # how alike words are to be that begin with other letters: rect is not meant to be project
MOST_TRIED = 5  # words that are alike
LONGEST_SUFFIX = len(".jpeg")
MOST_BESIDE = 1000  # files that are looked at for one that was meant
TURN = 5.0  # seconds that the other processes of a machine leave to its first one to say what is wrong


class UserError(ValueError):
    """A mistake in a flag, a file or the data.

    The message is one clear sentence that names the flag, file or key and the fix. Scripts print it without a traceback
    and exit with status 2.

    Args:
        message: what is printed.
        messages: one sentence per mistake, where several were found together.
    """

    def __init__(self, message: str, messages: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.messages = list(messages) or [message]


class Stopped(KeyboardInterrupt):
    """This process was asked to stop, by a signal or by the time limit of the run.

    Args:
        by: who asked, for the message.
        status: that the process is to end with.
        lines: how to go on.
    """

    def __init__(self, by: str, status: int, lines: Sequence[str] = ()) -> None:
        super().__init__(*lines)
        self.by, self.status = by, status


class NotWrittenError(RuntimeError):
    """A run is over, but the disk did not take all that it leaves; the message says what is missing."""


class DivergedError(RuntimeError):
    """A run came to nothing and would again; the message says what to change."""


class LostDataError(RuntimeError):
    """A run can't load its data any more: too much of it is gone, or a process that loads it died."""


class LostPeerError(RuntimeError):
    """Another rank can't be reached any more; the message says which, and what was met with."""


class Problems:
    """Collects mistakes, so that a user sees all of them at once instead of one per try."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.messages)

    def add(self, message: str) -> None:
        """Remember one problem; the same message is kept once."""
        if message not in self.messages:
            self.messages.append(message)

    def attempt(self, action: Callable[[], T], way_out: str = "") -> T | None:
        """Return what an action gives, or remember its UserError and return None.

        Args:
            action: what may be mistaken.
            way_out: stands behind each of its messages.
        """
        try:
            return action()
        except UserError as error:
            for message in error.messages:
                self.add(message + way_out)
            return None

    def raise_if_any(self, where: str = "") -> None:
        """Raise everything that was found.

        Args:
            where: stands before each message, for example the file that they are about.

        Raises:
            UserError: the message itself if there is one problem, a list with one line each if there are several.
        """
        messages = [f"{where}: {text}" if where else text for text in self.messages]
        if len(messages) == 1:
            raise UserError(messages[0])
        if messages:
            raise UserError("\n".join([f"{len(messages)} problems", *(f"- {text}" for text in messages)]), messages)


def nearest(word: object, known: Iterable[str], alike: float = 0.6) -> str:
    """Return ``; did you mean X?`` for the known word that is most alike, '' if none is.

    Upper and lower case count as the same; dashes before a flag and the suffix of a file tell nothing.

    Args:
        word: what was typed.
        known: what it may have meant.
        alike: least likeness, 0 to 1, as difflib measures it; of short words more, for they are alike by chance.
    """
    match = _closest(str(word), known, alike)
    return f"; did you mean {match}?" if match else ""


def nearest_file(path: Path, suffixes: Sequence[str], known: Iterable[str] = ()) -> str:
    """Return ``; did you mean X?`` for a file that is not there, '' if nothing is like it.

    Args:
        path: what was typed; also folders in it may be mistyped.
        suffixes: of such files, in small letters.
        known: names that are understood without a file.
    """
    missing = path
    while not os.path.isdir(missing.parent) and missing != missing.parent:
        missing = missing.parent
    with contextlib.suppress(OSError), os.scandir(missing.parent) as entries:
        beside = itertools.islice(entries, MOST_BESIDE)
        if missing == path:
            found = {entry.name: entry.path for entry in beside if entry.name.lower().endswith(tuple(suffixes))}
            found |= {name: name for name in known}
        else:
            found = {entry.name: entry.path for entry in beside if entry.is_dir()}
        match = _closest(missing.name, found, 0.6)
        if not match:
            return ""
        meant = Path(os.path.normpath(found[match]))
        behind = meant / path.relative_to(missing)
        whole = "" if meant == behind or os.path.exists(behind) else nearest_file(behind, suffixes)
        return whole or f"; did you mean {behind if os.path.exists(behind) else meant}?"
    return ""


def _closest(word: str, known: Iterable[str], alike: float) -> str:
    wanted = _core(word)
    by_core = {_core(text): text for text in known}
    least = max(alike, SHORT_ALIKE) if len(wanted) < SHORT_WORD else alike
    for match in difflib.get_close_matches(wanted, by_core, n=MOST_TRIED, cutoff=least):
        likeness = difflib.SequenceMatcher(None, match, wanted).ratio()  # in this order, as get_close_matches has it
        if match[:1] == wanted[:1] or wanted in match or match in wanted or likeness >= OTHER_START_ALIKE:
            return by_core[match]
    return ""


def _core(text: str) -> str:
    """Return the part of a flag, a key or a file name that tells it from others."""
    stem, suffix = os.path.splitext(text.lower().lstrip("-"))
    return stem if len(suffix) <= LONGEST_SUFFIX else stem + suffix


def first_of_machine() -> bool:
    """Whether this process is the first that a launcher started on this machine, or was started without one."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def await_turn() -> None:
    """Let the first process of a machine say what is wrong.

    Most mistakes are met by all processes that a launcher started. The first one speaks at once, and as it leaves the
    launcher ends the others; one that is still there after that speaks as well.
    """
    if not first_of_machine():
        time.sleep(TURN)


def report(error: UserError) -> int:
    """Print a mistake on stderr, without a traceback, and return the exit status for it.

    Where a launcher started several processes on this machine, its first one speaks; see `await_turn`.
    """
    await_turn()
    say_on_stderr(f"error: {error}")
    return USER_ERROR


LATE_ERRORS = (NotWrittenError, DivergedError, LostDataError)
ENDS = (UserError, *LATE_ERRORS, KeyboardInterrupt)  # a process ends with them without a traceback


def ended_by(stop: BaseException) -> int:
    """Say on stderr, once per machine, why a process ends without traceback, and return the exit status for it.

    Args:
        stop: UserError (2), `NotWrittenError` (1), `LostDataError` (1, said by each process, for it may be the only
            one to meet it), `DivergedError` (93), `Stopped` (its own status), or KeyboardInterrupt (130, that is 128 +
            SIGINT, as shells have it) with lines to print; any other exception is raised again.
    """
    if isinstance(stop, UserError):
        return report(stop)
    if isinstance(stop, LATE_ERRORS):
        if first_of_machine() or isinstance(stop, LostDataError):
            say_on_stderr(f"error: {stop}")
        return NO_PROGRESS if isinstance(stop, DivergedError) else 1
    if not isinstance(stop, KeyboardInterrupt):
        raise stop
    by, status = (stop.by, stop.status) if isinstance(stop, Stopped) else ("Ctrl-C", 130)
    if first_of_machine():
        behind = "\n" if sys.stderr.isatty() else ""  # ^C, or a progress bar that was left open
        say_on_stderr(f"{behind}stopped by {by}", *stop.args)
    return status


def end_quietly_by_ctrl_c() -> None:
    """Let Ctrl-C end this script without a traceback of what was being imported, for the seconds up to `run_cli`."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, traceback)

    sys.excepthook = hook


def run_cli(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main function and leave the process with its status; see `ended_by`."""
    try:
        status = main()
        check_output()
    except ENDS as stop:
        status = ended_by(stop)
    except LostPeerError as error:  # of a task of srun
        say_on_stderr(f"error: {error}")
        status = 1
    flush_output()
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """End the process without taking the interpreter down; what was printed is out."""
    flush_output()
    os._exit(status)


# Output that nobody takes ---------------------------------------------------------------------------------------------


class _Output:
    """Tells whether all that was said could be.

    Attributes:
        trouble: why stdout did not take something; "" if it did, or if its reader has gone and wants no more.
    """

    trouble = ""


def say_on_stderr(*lines: str) -> None:
    """Print lines for people, or do without where nobody reads them any more or no disk takes them."""
    with contextlib.suppress(OSError, ValueError):
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def note_output(error: OSError | ValueError) -> bool:
    """Note that stdout did not take something, and return whether this is new; see `check_output`."""
    known = _Output.trouble
    # The reader is gone, the caller closed it (ValueError), or its terminal is no more (EIO).
    if not known and not isinstance(error, BrokenPipeError | ValueError) and error.errno != errno.EIO:
        _Output.trouble = error.strerror or str(error)
    return _Output.trouble != known


def flush_output() -> None:
    """Write out what is still to be written; what can't be is forgotten, for Python would try again as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if stream is sys.stdout:
                note_output(error)
            with contextlib.suppress(OSError, ValueError):  # as Python's documentation has it for SIGPIPE
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except AttributeError:  # None: closed by whoever started this process
            continue


def check_output() -> None:
    """Check that all that was said could be.

    Raises:
        NotWrittenError: stdout did not take all of it.
    """
    flush_output()
    if _Output.trouble:
        raise NotWrittenError(f"stdout did not take all that was said ({_Output.trouble}); all files are written")
