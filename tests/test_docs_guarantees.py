"""docs/guarantees.md: each line names its tests or says that it has none, and what can be counted there is so."""

import ast
import re
import sys
from functools import cache

import pytest

from models.costs import count_flops
from tests.common import PROJECT, golden
from tests.models.test_costs import NETWORKS, network
from tests.test_layering import imported_names, project_modules
from utils import torch_utils
from utils.config.command_line import given_flags
from utils.config.flags import TrainConfig
from utils.core.errors import UserError

PAGE = (PROJECT / "docs/guarantees.md").read_text()
README = (PROJECT / "README.md").read_text()
IDS = re.findall(r"^\| ([A-Z]\d+) \|", PAGE, re.MULTILINE)
IMPORTED_AS = {"pyyaml": "yaml", "opencv-python": "cv2"}  # by the name of the package
ONLY_IF_THERE = {"safetensors"}  # for files that only those have who have installed it


def row(name: str) -> str:
    """What the page says under an id, up to the next one."""
    found = re.search(rf"^\| {name} \|(.*?)(?=^\| [A-Z]\d+ \||^$)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


@cache
def docstrings() -> str:
    """All docstrings of tests."""
    texts = []
    for path in (PROJECT / "tests").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts += [ast.get_docstring(n) for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n".join(filter(None, texts))


@pytest.mark.parametrize("name", IDS)
def test_each_line_has_a_test_or_says_that_it_has_none(name: str) -> None:
    tested = re.search(rf"\b{name}\b", docstrings()) is not None
    assert tested != ("no test" in row(name)), "name it in the docstring of a test, or write *no test* into its line"


def test_every_line_is_looked_at() -> None:
    assert len(IDS) == len(set(IDS)) >= 38


def test_shape_of_the_project() -> None:
    """C1: files and folders. C3: what is in utils/torch_utils.py."""
    for name in re.findall(r"`([^`]+)`", row("C1")):
        assert (PROJECT / name).exists(), name
    for name in ("process_group", "split_global_batch", "save_checkpoint", "ModelEMA"):
        assert hasattr(torch_utils, name), name


def test_packages() -> None:
    """C4, A2: requirements.txt has what the program imports, no more and no less; the page says the same."""
    required = [re.split("[>=]", line)[0] for line in (PROJECT / "requirements.txt").read_text().split()]
    listed = re.split(", | and ", row("C4").split("with ")[1].split(", nothing")[0])
    assert sorted(listed) == sorted(required)
    imported = set()
    for module, path in project_modules().items():
        if not module.startswith("benchmarks."):
            imported |= {name.split(".")[0] for name in imported_names(ast.parse(path.read_text()))}
    own = {module.split(".")[0] for module in project_modules()}
    foreign = imported - own - sys.stdlib_module_names - ONLY_IF_THERE
    assert foreign == {IMPORTED_AS.get(name, name) for name in required}


def test_versions() -> None:
    """A2: of Python and torch, wherever they are written."""
    python, pytorch = re.findall(r"Python (\S+) and newer, torch (\S+) and newer", row("A2"))[0]
    project = (PROJECT / "pyproject.toml").read_text()
    assert f'requires-python = ">={python}"\n' in project
    assert f'target-version = "py{python.replace(".", "")}"\n' in project
    assert f"torch>={pytorch}" in (PROJECT / "requirements.txt").read_text().split()
    assert f"Python {python} or newer, PyTorch {pytorch} or newer" in README


def test_flags() -> None:
    """A3: those that are there are flags, those that are planned are errors that say so."""
    there, planned = row("A3").splitlines()[:2]
    flags = re.findall(r"`(--[\w-]+)`", there)
    spellings = " ".join((PROJECT / "docs/flags.md").read_text().split())
    assert len(flags) > 20
    for flag in flags:
        assert f"`{flag}`" in spellings, flag
    for flag in re.findall(r"`(--[\w-]+)`", planned):
        with pytest.raises(UserError, match=f"^{flag} is not available yet"):
            given_flags(TrainConfig, [flag])


@pytest.mark.slow
@pytest.mark.gate
def test_table_of_networks() -> None:
    """A6: names, parameters and GFLOPs in the README; the parameters are recorded ones of YOLOv5."""
    rows = re.findall(r"^\| `(yolo\w+(?:-\w+)?)` \| \d+ \| ([\d.]+) \| ([\d.]+) \|", README, re.MULTILINE)
    recorded = golden("architectures.json.gz")
    assert sorted(f"{name}.yaml" for name, *_ in rows) == NETWORKS
    for name, parameters, flops in rows:
        assert parameters == f"{recorded[name]['parameters'] / 1e6:.1f}", name
        assert flops == f"{count_flops(network(f'{name}.yaml'), 640) / 1e9:.1f}", name
