"""Pickles read as inert data: whatever a file says, nothing is imported and nothing is called but a few plain makers.

A small machine runs the operations that pickle protocols 2 to 5 write. A class or function of the file becomes a
`Global`, which is no more than its name, and an object a `Record`. Memory and time are bounded by the number of
operations; values may still be cyclic or nested to any depth, so who walks through them needs a limit of its own.
"""

import pickletools
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

LONGEST_PATH = 4096  # letters
LONGEST_NAME = 200  # letters of a module and a class
MOST_COPIED = 2000  # entries of a set or dict that is made by a call; torch writes them one by one
MOST_BYTES = 64 << 20
MOST_STEPS = 1_000_000  # operations; an unstripped checkpoint of the largest YOLOv5 has some 300,000
KEY_LIMIT = 1 << 31  # whole numbers as keys: others can be chosen so that all have one hash, which takes ages
KEY_LENGTH = 8  # of a tuple as a key
MOST_BITS = 4096  # of a whole number
LONGEST_REASON = 600  # letters

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NEW: dict[str, type] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
RENAMED = {"__builtin__": "builtins", "numpy._core.multiarray": "numpy.core.multiarray", "pathlib._local": "pathlib"}
NUMBERS = {
    **{"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q"},
    **{"u1": "B", "u2": "H", "u4": "I", "u8": "Q"},
}
"""NumPy's names of number types -> those of struct."""


class RefusedError(Exception):
    """What is wrong with a file, in words that can follow "... is damaged or not a checkpoint: ".

    Args:
        reason: these words; what a terminal would act upon is taken out of names that come from the file.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in reason[:LONGEST_REASON]))


@dataclass(eq=False, slots=True)
class Global:
    """The name of a class or function; the thing itself is never looked up."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """Module and name, cut where they are overlong."""
        return f"{self.module}.{self.name}"[:200]


@dataclass(eq=False, slots=True)
class Record:
    """An object whose class is only known by name.

    Attributes:
        kind: its class.
        args: what it was made with.
        state: what it was given afterwards, mostly the dict of its attributes.
        items: entries of a list, (key, value) pairs of a dict, where it is one of these.
    """

    kind: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)


Maker = Callable[..., Any]


def read_pickle(data: bytes, makers: Mapping[str, Maker], load_persistent: Callable[[Any], Any]) -> Any:
    """Read a pickle without running code from it.

    Args:
        data: the pickle.
        makers: what may be called besides `MAKERS`, by the path of the callable that it stands in for. They are given
            whatever the file holds, and must check it.
        load_persistent: gives the object for a persistent id; must check that too.

    Returns:
        The object, made of plain values, `Global`, `Record` and what the makers return. Lists, dicts and records may
        contain themselves.

    Raises:
        RefusedError: the data are damaged, too large, or ask for a call that is not among the makers.
    """
    if len(data) > MOST_BYTES:
        raise RefusedError(f"its description of objects is larger than {MOST_BYTES >> 20} MB")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, about texts in damaged pickles
            return _Machine({**MAKERS, **makers}, load_persistent).run(data)
    except RefusedError:
        raise
    except Exception as error:  # damaged bytes raise nearly anything: value, type, index, unicode and memory errors
        raise RefusedError("its description of objects is damaged") from error


class _Machine:
    """The stack, marks and memo of a pickle that is being read."""

    def __init__(self, makers: Mapping[str, Maker], load_persistent: Callable[[Any], Any]) -> None:
        self.makers, self.load_persistent = makers, load_persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks that marks have put aside
        self.memo: dict[int, Any] = {}
        self.copied = 0  # parts of what calls made

    def run(self, data: bytes) -> Any:
        for steps, (code, argument, _) in enumerate(pickletools.genops(data)):
            if steps + self.copied >= MOST_STEPS:
                raise RefusedError(f"its description of objects takes more than {MOST_STEPS} steps")
            name = code.name
            if name in VALUES:
                if isinstance(argument, int) and argument.bit_length() > MOST_BITS:
                    raise RefusedError("it has an absurdly large number")
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in NEW:
                self.stack.append(NEW[name]())
            elif name in TUPLES:
                self.stack.append(tuple(reversed([self.stack.pop() for _ in range(TUPLES[name])])))
            elif name in OPERATIONS:
                OPERATIONS[name](self, argument)
            elif name == "STOP":
                break
            elif name not in ("PROTO", "FRAME"):
                raise RefusedError(f"its description of objects has an operation {name}, which torch.save never writes")
        return self.stack.pop()

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        above, self.stack = self.stack, self.below.pop()
        return above

    def pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:  # the mark itself
            self.since_mark()

    def pop_mark(self, _: Any) -> None:
        self.since_mark()

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def tuple_(self, _: Any) -> None:
        content = tuple(self.since_mark())
        self.stack.append(content)

    def append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self.since_mark())

    def _extend(self, entries: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (list, Record)):
            raise RefusedError("it adds entries to something that is no list")
        (target if isinstance(target, list) else target.items).extend(entries)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def set_items(self, _: Any) -> None:
        self._update(self.since_mark())

    def _update(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (dict, Record)) or len(flat) % 2:
            raise RefusedError("it adds entries to something that is no dict")
        pairs = [(checked_key(key), value) for key, value in zip(flat[::2], flat[1::2], strict=True)]
        if isinstance(target, dict):
            target.update(pairs)
        else:
            target.items.extend(pairs)

    def add_items(self, _: Any) -> None:
        entries = self.since_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise RefusedError("it adds entries to something that is no set")
        target.update(map(checked_key, entries))

    def frozen_set(self, _: Any) -> None:
        self.stack.append(frozenset(map(checked_key, self.since_mark())))

    def global_(self, names: str) -> None:
        module, name = names.split(" ", 1)
        self.stack.append(_named(module, name))

    def stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise RefusedError("it names a class by something that is no text")
        self.stack.append(_named(module, name))

    def call(self, _: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or function.path not in self.makers:
            what = function.path if isinstance(function, Global) else "something that it made itself"
            raise RefusedError(f"it wants {what} to be called, which no weights need; nothing of it was run")
        if not isinstance(args, tuple):
            raise RefusedError(f"it wants {function.path} to be called with something that is no list of arguments")
        self.stack.append(self.charged(self.makers[function.path](*args)))

    def charged(self, made: Any) -> Any:
        """Count the parts of what a call made as steps: a call may copy what it is given again and again."""
        if isinstance(made, (dict, set, tuple, str, bytes)):
            self.copied += len(made)
        return made

    def new(self, _: Any) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        self._new(kind, args)

    def new_with_keywords(self, _: Any) -> None:
        keywords, args, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._new(kind, (args, keywords))

    def _new(self, kind: Any, args: Any) -> None:
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise RefusedError("it makes an object of something that is no class")
        made = self.makers[kind.path](*args) if kind.path in self.makers else Record(kind, args)
        self.stack.append(made)

    def build(self, _: Any) -> None:
        """Give a record its state; plain values have none that matters, such as the metadata of a state dict."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Global):
            raise RefusedError(f"it wants to change {target.path} itself; nothing of it was run")
        if isinstance(target, Record):
            target.state = state

    def persistent(self, _: Any) -> None:
        self.stack.append(self.load_persistent(self.stack.pop()))


OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "TUPLE": _Machine.tuple_,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items,
    "FROZENSET": _Machine.frozen_set,
    "GLOBAL": _Machine.global_,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.new,
    "NEWOBJ_EX": _Machine.new_with_keywords,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def _named(module: str, name: str) -> Global:
    if len(module) + len(name) > LONGEST_NAME:
        raise RefusedError("it names a class with an overlong name")
    return Global(RENAMED.get(module, module), name)


def checked_key(key: Any) -> Any:
    """Return a key of a dict or entry of a set if hashing it is quick and safe: not deeply nested, not chosen to clash.

    Raises:
        RefusedError: it is not.
    """
    if isinstance(key, tuple) and len(key) <= KEY_LENGTH:
        return tuple(None if part is None else _simple_key(part) for part in key)
    return _simple_key(key)


def _simple_key(key: Any) -> Any:
    if isinstance(key, int) and abs(key) < KEY_LIMIT:  # True and False as well
        return key
    if key is None or isinstance(key, (str, bytes, Global, Record)):
        return key
    raise RefusedError(f"it has a {type(key).__name__} as a key of a dict, which no weights need")


# makers ---------------------------------------------------------------------------------------------------------------


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in _few(pairs)}


def _set(entries: Any = ()) -> set[Any]:
    return set(map(checked_key, _few(entries)))


def _few(entries: Any) -> Any:
    """Refuse to copy many entries at once: a short file could ask for it again and again."""
    if len(entries) > MOST_COPIED:
        raise RefusedError(f"it has {len(entries)} entries to be copied")
    return entries


def _bytes() -> bytes:
    return b""


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes as protocol 2 writes them."""
    if encoding != "latin1":
        raise RefusedError("it has bytes in an unusual coding")
    return text.encode("latin-1")


def _posix_path(*parts: str) -> str:
    return str(PurePosixPath(*_short(parts)))


def _windows_path(*parts: str) -> str:
    return str(PureWindowsPath(*_short(parts)))


def _short(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a path longer than any system has: made of itself again and again it would double each time."""
    if sum(map(len, parts)) > LONGEST_PATH:
        raise RefusedError("it has an overlong path")
    return parts


def _dtype(*args: Any) -> Record:
    return Record(Global("numpy", "dtype"), args)


def _array(*args: Any) -> Record:
    return Record(Global("numpy", "ndarray"), args)


def _scalar(dtype: Record, data: bytes) -> Any:
    """Return the Python number of a NumPy scalar, a record for scalars of other kinds."""
    code = dtype.args[0]
    if code not in NUMBERS:
        return Record(Global("numpy", "generic"), (dtype, data))
    order = ">" if isinstance(dtype.state, tuple) and dtype.state[1:2] == (">",) else "<"
    return struct.unpack(order + NUMBERS[code], data)[0]


MAKERS: dict[str, Maker] = {
    "collections.OrderedDict": _ordered_dict,
    "builtins.set": _set,
    "builtins.bytes": _bytes,
    "_codecs.encode": _encode,
    "pathlib.PosixPath": _posix_path,
    "pathlib.WindowsPath": _windows_path,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _array,
}
"""What may be called, by the path of the callable that is stood in for."""
