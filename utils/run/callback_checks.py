"""Whether callbacks can do their work: they are some, and can travel to worker processes."""

import io
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from utils.config.flags import LOGGERS
from utils.core.errors import Problems, UserError
from utils.run.callbacks import HOOKS, Callback

BUILT_IN = f"the built-in loggers by name, loggers={list(LOGGERS)}"


def check_callbacks(callbacks: object, argument: str = "callbacks") -> None:
    """Check that these are objects of subclasses of `Callback` whose methods will be called.

    Args:
        callbacks: what a user gave.
        argument: its name, for messages.

    Raises:
        UserError: lists all that are not.
    """
    problems = Problems()
    for position, callback in enumerate(_listed(callbacks, argument)):
        where = f"{argument}[{position}]"
        if isinstance(callback, type):
            problems.add(f"{where} is the class {callback.__name__} itself; give an object: {callback.__name__}()")
        elif not isinstance(callback, Callback):
            problems.add(
                f"{where} is {_described(callback)}, not a callback; write a subclass of lockstep.Callback at "
                f"the top level of a module, or use {BUILT_IN}"
            )
        else:
            for name in dir(type(callback)):
                if name.startswith("on_") and name not in HOOKS:
                    problems.add(
                        f"{where}, {_described(callback)}, has a method {name} that nothing calls; methods that are "
                        f"called are {', '.join(HOOKS)}"
                    )
    problems.raise_if_any()


def check_picklable(callbacks: object, argument: str = "callbacks") -> None:
    """Check that these are callbacks which can travel to processes that a run starts.

    Args:
        callbacks: what a user gave.
        argument: its name, for messages.

    Raises:
        UserError: lists all that can't, and why, or that are none (`check_callbacks`); no process has been started.
    """
    problems = Problems()
    for position, callback in enumerate(_listed(callbacks, argument)):
        if (why := _obstacle(callback)) is not None:
            problems.add(
                f"{argument}[{position}] is {_described(callback)} and can't travel to the processes of a run on "
                f"several devices: {why}. Define a class at the top level of a module and keep only plain values in "
                f"its objects, or use {BUILT_IN}"
            )
    problems.raise_if_any()
    check_callbacks(callbacks, argument)


def _listed(callbacks: object, argument: str) -> Sequence[object]:
    if not isinstance(callbacks, list | tuple):
        raise UserError(f"{argument} takes a list of callbacks, not {_described(callbacks)}")
    return callbacks


def _described(value: object) -> str:
    """Return what kind of thing a value is, in words that tell it from others."""
    if isinstance(value, FunctionType):
        return "a lambda (function)" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
    kind = type(value)
    return f"of type {kind.__qualname__}" + (f" ({kind.__module__})" if kind.__module__ != "builtins" else "")


def _obstacle(callback: object) -> str | None:
    """Return why a value can't be pickled, naming the attribute that is to blame; None if it can be."""
    why = _why_not(callback)
    if why is None:
        return None
    for name, value in getattr(callback, "__dict__", {}).items():
        if (reason := _why_not(value)) is not None:
            return f"its attribute {name} holds {reason}"
    return why


def _why_not(value: object) -> str | None:
    try:
        _Probe(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    except _NotPicklableError as error:
        return str(error)
    except Exception as error:  # pickling runs methods of the user's own classes
        return f"what Python refuses to pickle ({type(error).__name__}: {error})"
    return None


class _NotPicklableError(Exception):
    """Says what another process could not load, and why."""


class _Probe(pickle.Pickler):
    """Finds what another process could not load, also what pickle itself would let pass or explain badly."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what has a better reason than pickle's own; everything else goes its ordinary way."""
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            raise _NotPicklableError("an open file, which belongs to this process")
        if isinstance(obj, type | FunctionType):
            kind = "class" if isinstance(obj, type) else "function"
            if obj.__name__ == "<lambda>":
                raise _NotPicklableError("a lambda, which has no name to import it by")
            if "<locals>" in obj.__qualname__:
                raise _NotPicklableError(
                    f"the {kind} {obj.__qualname__}, defined inside a function, where no import can reach it"
                )
            if obj.__module__ == "__main__" and not _main_is_a_file():
                raise _NotPicklableError(
                    f"the {kind} {obj.__qualname__}, defined in a session (REPL, notebook) and not in a file"
                )
        return NotImplemented


def _main_is_a_file() -> bool:
    """Whether another process could run the file that this one was started with; not so in a REPL or a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).is_file()
