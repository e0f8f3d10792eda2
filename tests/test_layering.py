"""Imports point one way, and what belongs to distributed runs stays in its room."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common import PROJECT

# Each row imports from rows above it only. A new module gets its name here, as high as its imports allow.
ROWS = (
    ("own_packages", "utils.errors", "utils.heartbeat", "utils.inert_pickle", "utils.short_names"),
    (
        "utils.archives",
        "utils.batch_slots",
        "utils.boxes",
        "utils.chart_style",
        "utils.coco_metrics",
        "utils.conversion",
        "utils.data_report",
        "utils.devices",
        "utils.drawing",
        "utils.flags",
        "utils.forks",
        "utils.images",
        "utils.interrupts",
        "utils.jobs",
        "utils.leisure",
        "utils.loader_notes",
        "utils.logging",
        "utils.network",
        "utils.polygons",
        "utils.preflight",
        "utils.published",
        "utils.seeds",
        "utils.skips",
        "utils.slurm",
        "utils.spikes",
        "utils.steps",
        "utils.torch_files",
        "utils.watchdog",
    ),
    (
        "utils.charts",
        "utils.class_names",
        "utils.checkpoint_files",
        "utils.downloads",
        "utils.index_arrays",
        "utils.labels",
        "utils.pictures",
    ),
    ("utils.image_lists", "utils.plot_worker"),
    ("utils.config", "utils.torch_utils"),
    ("utils.data_config",),
    (
        "utils.augmentations",
        "utils.callbacks",
        "utils.checkpoint_writer",
        "utils.console",
        "utils.data_sets",
        "utils.metrics",
        "utils.optim",
        "utils.profiler",
        "utils.run_folder",
        "utils.shapes",
        "utils.sources",
        "utils.sync_bn",
    ),
    (
        "utils.autoanchor",
        "utils.compilation",
        "utils.cuda_graph",
        "utils.data_parallel",
        "utils.dataset",
        "utils.detection_files",
        "utils.loggers",
        "utils.loss",
        "utils.resume",
        "utils.restarts",
        "utils.stalls",
    ),
    ("utils.image_cache", "utils.order", "utils.val_files"),
    ("utils.samples",),
    ("utils.dataloaders",),
    ("models.common", "utils.plots"),
    ("models.head",),
    ("models.parser",),
    ("models.yolo",),
    ("models.costs", "models.looks", "utils.weights"),
    ("models.families",),
    ("models.memory", "models.start"),
    ("models.detector", "utils.inputs", "utils.launch"),
    ("detect", "utils.autobatch", "utils.predictions", "utils.run_state", "val"),
    ("utils.command", "utils.header", "utils.run_events"),
    ("train",),
    ("lockstep",),
)
BENCHMARKS = "benchmarks."  # scripts that may import everything; nothing else imports them
PACKAGES = ("utils", "models")
# utils.errors reads one variable: an error is said once on a machine, also before torch is imported.
DISTRIBUTED_ROOMS = ("utils.torch_utils", "utils.launch", "utils.errors")
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
NOT_OURS = {"tests", "runs", "datasets", "build", "venv"}


def row_of(module: str) -> int | None:
    """The row of a module, None if it is not ours or not in the table."""
    if module.startswith(BENCHMARKS):
        return len(ROWS)
    return next((row for row, modules in enumerate(ROWS) if module in modules), None)


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
    """Every name an import statement mentions, also those inside functions; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def wrong_imports(module: str, source: str) -> list[str]:
    """Imports of a module that do not point to a row above its own."""
    row = row_of(module)
    if row is None:
        return []  # the test of the table says so
    own = BENCHMARKS if module.startswith(BENCHMARKS) else None  # they may share among themselves
    rows = {name: row_of(name) for name in imported_names(ast.parse(source)) if not (own and name.startswith(own))}
    return [f"{module} imports {name}" for name, other in sorted(rows.items()) if other is not None and other >= row]


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


def test_every_module_has_a_row() -> None:
    unknown = [module for module in project_modules() if row_of(module) is None]
    assert not unknown, f"put {unknown} into a row of ROWS in tests/test_layering.py and into CONTRIBUTING.md"
    gone = [module for row in ROWS for module in row if module not in project_modules()]
    assert not gone, f"ROWS in tests/test_layering.py names {gone}, which are not there"


def test_contributing_lists_every_room() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    missing = [module for row in ROWS for module in row if f"`{module.split('.')[-1]}.py`" not in text]
    assert not missing, f"CONTRIBUTING.md, section Rooms, does not say what lives in {missing}"


def test_imports_point_up() -> None:
    wrong = [line for module, path in project_modules().items() for line in wrong_imports(module, path.read_text())]
    assert not wrong, "each module imports from rows above it only (ROWS in tests/test_layering.py)"


def test_packages_are_empty() -> None:
    """An import in a package's own file would make every module of it import that."""
    for package in PACKAGES:
        body = ast.parse((PROJECT / package / "__init__.py").read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{package}/__init__.py holds a docstring only"


def test_distributed_stays_in_its_rooms() -> None:
    for module, path in project_modules().items():
        if module not in DISTRIBUTED_ROOMS:
            assert not distributed_words(path.read_text()), f"{module}: this belongs into {DISTRIBUTED_ROOMS}"


def test_no_room_for_everything() -> None:
    names = {module.split(".")[-1] for module in project_modules()}
    assert not names & {"general", "misc", "helpers", "common_utils"}, "say what lives there"


def test_sources_are_ascii() -> None:
    for path in [*project_modules().values(), *(PROJECT / "tests").rglob("*.py")]:
        assert path.read_bytes().isascii(), f"{path.name} has characters other than ASCII"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("utils.boxes", "from utils.config import ROOT"),  # a lower row
        ("utils.boxes", "from utils import logging"),  # the same row
        ("utils.loss", "def f():\n    import models.yolo"),  # hidden in a function
        ("utils.loss", "import importlib\nimportlib.import_module('val')"),
        ("models.yolo", "from models.families import FAMILIES"),
        ("train", "import benchmarks.train_step"),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize("source", ["from models.common import Conv", "import logging", "from utils.errors import X"])
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
