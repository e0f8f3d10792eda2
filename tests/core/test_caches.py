"""Where files for later runs go when there is no home to put them."""

import os
from pathlib import Path

import pytest

from tests.common import as_nobody, needs_root
from utils.core.caches import cache_folder
from utils.core.errors import UserError
from utils.data.index import cache_folders


def test_caches_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called ~ appeared in the current one (NVIDIA-TAO/tao-skill-bank PR 150)."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what ~ is for a user whom no file knows
    (tmp_path / "images").mkdir()
    assert cache_folders(f"{tmp_path}/images/1.jpg") == [tmp_path / ".lockstep"]
    assert os.listdir(tmp_path) == ["images"]  # nothing is made that is not needed
    private = cache_folder()
    assert private.parent == tmp_path and private.name == f"lockstep-{os.getuid()}"
    assert private.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == private
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home/.cache/lockstep"
    assert not (tmp_path / "home").exists()
    monkeypatch.setenv("HOME", "~")
    private.chmod(0o777)
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to a folder you can write to"):
        cache_folder()


@needs_root
def test_caches_with_a_home_that_is_not_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user of its own: HOME is root's, or the root of all."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").mkdir(mode=0o700)
    tmp_path.chmod(0o1777)
    with as_nobody(tmp_path):
        for home in ("/", str(tmp_path / "home")):
            monkeypatch.setenv("HOME", home)
            assert cache_folder() == tmp_path / f"lockstep-{os.getuid()}"
