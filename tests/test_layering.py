"""Imports point one way, and what belongs to distributed runs stays in its room."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common import PROJECT

# Each row imports from rows above it only. A new module gets its name here, as high as its imports allow.
ROWS = (
    (
        "own_packages",
        "utils.core.errors",
        "utils.core.heartbeat",
        "utils.checkpoints.inert_pickle",
        "utils.core.short_names",
    ),
    (
        "utils.data.archives",
        "utils.data.batch_slots",
        "utils.metrics.boxes",
        "utils.plots.style",
        "utils.metrics.coco",
        "utils.data.conversion",
        "utils.data.report",
        "utils.core.devices",
        "utils.plots.drawing",
        "utils.config.command_line",
        "utils.data.forks",
        "utils.core.image_files",
        "utils.core.signals",
        "utils.dist.job_files",
        "utils.data.leisure",
        "utils.data.loader_notes",
        "utils.core.logging",
        "utils.dist.interfaces",
        "utils.data.polygons",
        "utils.run.preflight",
        "utils.config.published",
        "utils.core.seeds",
        "utils.training.skips",
        "utils.dist.slurm",
        "utils.training.spikes",
        "utils.training.steps",
        "utils.checkpoints.torch_files",
        "utils.dist.watchdog",
    ),
    (
        "utils.plots.charts",
        "utils.data.class_names",
        "utils.checkpoints.files",
        "utils.data.downloads",
        "utils.data.index_arrays",
        "utils.data.labels",
        "utils.plots.pages",
    ),
    ("utils.data.image_lists", "utils.plots.worker"),
    ("utils.config.flags", "utils.torch_utils"),
    ("utils.config.data_yaml",),
    (
        "utils.data.augmentations",
        "utils.run.callbacks",
        "utils.checkpoints.writer",
        "utils.run.progress",
        "utils.data.fetch",
        "utils.metrics.average_precision",
        "utils.training.optim",
        "utils.training.profiler",
        "utils.run.folder",
        "utils.data.shapes",
        "utils.inference.sources",
        "utils.training.sync_bn",
    ),
    (
        "utils.training.autoanchor",
        "utils.training.compilation",
        "utils.training.cuda_graph",
        "utils.training.data_parallel",
        "utils.data.index",
        "utils.inference.detection_files",
        "utils.run.loggers",
        "utils.training.loss",
        "utils.run.resume",
        "utils.run.restarts",
        "utils.dist.stalls",
    ),
    ("utils.data.image_cache", "utils.data.sampler", "utils.inference.val_files"),
    ("utils.data.dataset",),
    ("utils.data.loaders",),
    ("models.common", "utils.run.plots"),
    ("models.head",),
    ("models.parser",),
    ("models.yolo",),
    ("models.costs", "models.tta", "models.foreign_weights"),
    ("models.families",),
    ("models.memory", "models.build"),
    ("models.detector", "utils.run.inputs", "utils.dist.launch"),
    ("detect", "utils.run.autobatch", "utils.inference.predictions", "utils.run.state", "val"),
    ("utils.run.settings", "utils.run.header", "utils.run.events"),
    ("train",),
    ("lockstep",),
)
BENCHMARKS = "benchmarks."  # scripts that may import everything; nothing else imports them
PACKAGES = ("utils", "models")
# utils.core.errors reads one variable: an error is said once on a machine, also before torch is imported.
DISTRIBUTED_ROOMS = ("utils.torch_utils", "utils.dist.launch", "utils.core.errors")
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
        ("utils.metrics.boxes", "from utils.config.flags import ROOT"),  # a lower row
        ("utils.metrics.boxes", "from utils import logging"),  # the same row
        ("utils.training.loss", "def f():\n    import models.yolo"),  # hidden in a function
        ("utils.training.loss", "import importlib\nimportlib.import_module('val')"),
        ("models.yolo", "from models.families import FAMILIES"),
        ("train", "import benchmarks.train_step"),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    "source", ["from models.common import Conv", "import logging", "from utils.core.errors import X"]
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
