"""Imports point one way, from folder to folder, and what belongs to distributed runs stays in its room."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.common import PROJECT

# Each row imports from rows above it only, also inside functions; rooms of one row not from each other. A file belongs
# to the first room whose name it has or begins with.
ROWS = (
    ("own_packages", "utils.core"),
    ("utils.config",),
    ("utils.checkpoints", "utils.metrics", "utils.plots"),
    ("utils.torch_utils", "utils.dist"),
    ("utils.data", "utils.training"),
    ("models",),
    ("utils.inference", "utils.run"),
    ("val", "detect"),
    ("train",),
    ("lockstep",),
    ("benchmarks",),
)
ONE_ROOM = ("utils.torch_utils", "utils.dist")  # ranks: one story and what is beyond it, which need each other
PACKAGES = ("utils", "models")
# utils.core.errors reads one variable: an error is said once on a machine, also before torch is imported.
DISTRIBUTED_ROOMS = ("utils.torch_utils", "utils.dist", "utils.core.errors")
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
NOT_OURS = {"tests", "runs", "datasets", "build", "venv"}


def in_room(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def room_of(module: str) -> tuple[int, str] | None:
    """Row and room of a module, None if it is not ours or has none."""
    rooms = [(row, room) for row, rooms in enumerate(ROWS) for room in rooms]
    return next(((row, room) for row, room in rooms if in_room(module, room)), None)


def project_modules() -> dict[str, Path]:
    """Every module of the project by its import name, tests and packages' own files left out."""
    modules = {}
    for path in sorted(PROJECT.rglob("*.py")):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        if parts[0] in NOT_OURS or any(part.startswith(".") for part in parts) or parts[-1] == "__init__":
            continue
        modules[".".join(parts)] = path
    return modules


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every name an import statement mentions, also those inside functions; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def wrong_imports(module: str, source: str) -> list[str]:
    """Imports of a module that point neither into its own room nor to a row above."""
    own = room_of(module)
    if own is None:
        return []  # the test of the table says so
    wrong = []
    for name in sorted(set(imported_names(ast.parse(source)))):
        other = room_of(name)
        same = other is not None and (other[1] == own[1] or {other[1], own[1]} <= set(ONE_ROOM))
        if other is not None and not same and other[0] >= own[0]:
            wrong.append(f"{module} imports {name}")
    return wrong


def distributed_words(source: str) -> list[str]:
    """Places where a module speaks of process groups or reads what a launcher set."""
    tree = ast.parse(source)
    found = [name for name in imported_names(tree) if f"{name}.".startswith("torch.distributed.")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.append(f"torch.distributed in line {node.lineno}")
        if isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES:
            found.append(f"{node.value} in line {node.lineno}")
    return found


def test_every_module_has_a_room() -> None:
    unknown = [module for module in project_modules() if room_of(module) is None]
    assert not unknown, f"put {unknown} into a folder of ROWS in tests/test_layering.py"
    rooms = [room for rooms in ROWS for room in rooms]
    empty = [room for room in rooms if not any(in_room(module, room) for module in project_modules())]
    assert not empty, f"ROWS in tests/test_layering.py names {empty}, where nothing is"


def test_contributing_describes_every_folder() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    folders = [path.parent.relative_to(PROJECT).as_posix() for path in (PROJECT / "utils").glob("*/__init__.py")]
    missing = [folder for folder in [*folders, "models", "data", "benchmarks", "docs"] if f"`{folder}/`" not in text]
    assert not missing, f"CONTRIBUTING.md, section Rooms, does not say what lives in {missing}"


def test_contributing_names_what_is_there() -> None:
    """Files, and what is said to be in them: whoever starts there finds it."""
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    sources = {path: path.read_text() for path in [*project_modules().values(), *PROJECT.glob("tests/*.py")]}
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert any(path.as_posix().endswith(f"/{name}") for path in sources), name
    for name in re.findall(r"`([A-Z][A-Za-z_]{2,})`", text):
        assert any(re.search(rf"\b{name}\b", source) for source in sources.values()), name


def test_imports_point_up() -> None:
    wrong = [line for module, path in project_modules().items() for line in wrong_imports(module, path.read_text())]
    assert not wrong, "each folder imports from rows above it only (ROWS in tests/test_layering.py)"


def test_imports_run_in_no_circle() -> None:
    """Not within a room either: what imports what it is imported by works in one order only."""
    modules = project_modules()
    imports = {}
    for module, path in modules.items():
        names = set(imported_names(ast.parse(path.read_text())))
        imports[module] = {name for name in names | {name.rpartition(".")[0] for name in names} if name in modules}
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_packages_are_empty() -> None:
    """An import in a package's own file would make every module of it import that."""
    for package in PACKAGES:
        for path in (PROJECT / package).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            assert all(isinstance(node, ast.Expr) for node in body), f"{path} holds a docstring only"


def test_distributed_stays_in_its_rooms() -> None:
    for module, path in project_modules().items():
        if not any(in_room(module, room) for room in DISTRIBUTED_ROOMS):
            assert not distributed_words(path.read_text()), f"{module}: this belongs into {DISTRIBUTED_ROOMS}"


def test_tests_mirror_the_folders() -> None:
    """Who changes a folder finds its tests in the folder of the same name."""
    folders = {path.parent.name for path in (PROJECT / "utils").glob("*/__init__.py")} | {"models"}
    missing = sorted(name for name in folders if not list((PROJECT / "tests" / name).glob("test_*.py")))
    assert not missing, f"tests/ has no tests in {missing}"


def test_no_room_for_everything() -> None:
    names = {module.split(".")[-1] for module in project_modules()}
    assert not names & {"general", "misc", "helpers", "common_utils"}, "say what lives there"


def test_sources_are_ascii() -> None:
    for path in [*project_modules().values(), *(PROJECT / "tests").rglob("*.py")]:
        assert path.read_bytes().isascii(), f"{path.name} has characters other than ASCII"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("utils.metrics.boxes", "from utils.data.index import LabelIndex"),  # a lower row
        ("utils.metrics.boxes", "from utils.plots import charts"),  # the same row
        ("utils.training.loss", "def f():\n    import models.yolo"),  # hidden in a function
        ("utils.training.loss", "import importlib\nimportlib.import_module('val')"),
        ("utils.core.errors", "from utils.config.flags import ROOT"),
        ("models.yolo", "from utils.run.state import Run"),
        ("train", "import benchmarks.train_step"),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from models.common import Conv",
        "import logging",
        "from utils.core.errors import X",
        "from utils.data import index",
    ],
)
def test_right_imports_are_not(source: str) -> None:
    assert not wrong_imports("models.yolo", source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.run import main",
        "import torch\ntorch.distributed.barrier()",
        "import os\nrank = os.environ['RANK']",
        "import os\nsize = os.getenv('WORLD_SIZE', '1')",
    ],
)
def test_distributed_words_are_seen(source: str) -> None:
    assert distributed_words(source)
