import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import PROJECT
from utils.core.errors import UserError
from utils.run.preflight import check_disk, check_run_folder


def test_nothing_heavy_is_imported() -> None:
    """What is missing on a machine is said before it is needed."""
    code = "import sys, utils.run.preflight; print({'torch', 'cv2', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=PROJECT, text=True) == "set()\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ImportError('libGL.so.1: cannot open shared object file')", ["libGL.so.1", "--force-reinstall"]),
        ("import no_such_module_", ["no_such_module_", "--force-reinstall"]),
        ("raise ModuleNotFoundError(\"No module named 'cv2'\", name='cv2')", ["is not installed; run: pip install"]),
    ],
)
def test_opencv(body: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "cv2.py").write_text(body)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    code += "from utils.run.preflight import check_opencv; check_opencv()"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(word in done.stderr for word in (*words, "opencv-python-headless"))
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_what_is_no_disk_cannot_be_written_to() -> None:
    """As root: "0 MB are free", which sends the reader to look for large files."""
    with pytest.raises(
        UserError, match=r"^--project /proc/x: the run folder /proc/x/exp can't be made, for /proc can't"
    ):
        check_run_folder(Path("/proc/x/exp"), exist_ok=False)
    check_disk(Path("/proc/x/exp"), 1000)


def test_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "a/b/exp"
    check_run_folder(run_dir, exist_ok=False)
    check_run_folder(run_dir, exist_ok=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("")
    for exist_ok in (False, True):
        with pytest.raises(
            UserError, match=rf"^--project {tmp_path}/a/b: .* can't be made, for {tmp_path}/a is a file"
        ):
            check_run_folder(run_dir, exist_ok)


def test_run_folder_that_is_a_file(tmp_path: Path) -> None:
    """Without --exist-ok another name is taken."""
    (tmp_path / "exp").write_text("")
    check_run_folder(tmp_path / "exp", exist_ok=False)
    with pytest.raises(UserError, match=rf"{tmp_path}/exp is a file, not a folder; choose another name"):
        check_run_folder(tmp_path / "exp", exist_ok=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to this user")
def test_run_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0o555)
    with pytest.raises(UserError, match="can't be written to; choose a folder you can write to"):
        check_run_folder(tmp_path / "closed/runs/exp", exist_ok=False)


def test_disk(tmp_path: Path) -> None:
    check_disk(tmp_path / "not/there/yet", 1000)
    with pytest.raises(
        UserError, match=rf"^--project {tmp_path}/runs: the checkpoints .* need about 1,000,000,000 MB, "
    ):
        check_disk(tmp_path / "runs/exp", 10**15)
