import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.common import PROJECT
from utils.core.whole_files import FORGOTTEN, copy_whole, replacing, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "one \u00e9\n")
    assert path.read_bytes() == b"one \xc3\xa9\n"
    with replacing(path) as file:
        file.write(b"two")
        file.flush()
        assert path.read_bytes() == b"one \xc3\xa9\n"
    assert path.read_bytes() == b"two"
    copy_whole(path, tmp_path / "b.txt")
    assert (tmp_path / "b.txt").read_bytes() == b"two"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # others may read it, as any new file
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("durable", [True, False])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException], durable: bool) -> None:
    (tmp_path / "a.txt").write_text("one")

    def fail() -> None:
        with replacing(tmp_path / "a.txt", durable) as file:
            file.write(b"two")
            raise error

    with pytest.raises(error):
        fail()
    with pytest.raises(FileNotFoundError):
        copy_whole(tmp_path / "gone", tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "gone/a.txt", "")
    assert os.listdir(tmp_path) == ["a.txt"] and (tmp_path / "a.txt").read_text() == "one"


MANY = """
import sys
from pathlib import Path
from utils.core.whole_files import replacing
path = Path(sys.argv[1])
for _ in range(60):
    with replacing(path, durable=False) as file:
        for _ in range(4):
            file.write(sys.argv[2].encode() * 50_000)
    assert len(set(path.read_bytes())) == 1
"""


def test_several_write_one_file(tmp_path: Path) -> None:
    """A file is one writer's as a whole, and none fails (ultralytics#8627)."""
    line = [sys.executable, "-c", MANY, str(tmp_path / "x")]
    writers = [subprocess.Popen([*line, str(value)], cwd=PROJECT) for value in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    with replacing(tmp_path / "x") as first, replacing(tmp_path / "x") as second:
        first.write(b"first")
        second.write(b"second")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"first"


KILLED = """
import os, signal, sys
from pathlib import Path
from utils.core.whole_files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_what_a_killed_process_left_is_removed_later(tmp_path: Path) -> None:
    path = tmp_path / "a [1].txt"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=PROJECT, check=False)
    assert done.returncode == -signal.SIGTERM
    (left,) = tmp_path.iterdir()
    write_whole(path, "")
    assert left.exists()  # it may be another machine's, which still writes
    before = time.time() - FORGOTTEN - 60
    os.utime(left, (before, before))
    write_whole(path, "")
    assert list(tmp_path.iterdir()) == [path]
