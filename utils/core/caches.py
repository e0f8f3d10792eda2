"""Files that later runs may use again: the folder they are in, what tells them apart."""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from utils.core.errors import UserError


def may_be_made(folder: Path) -> bool:
    """Whether this user may write to a folder, or to the nearest one above it if it is not there."""
    there = next((path for path in (folder, *folder.parents) if os.path.exists(path)), None)
    return there is not None and os.access(there, os.W_OK | os.X_OK)


def home_cache() -> Path | None:
    """Return the folder in ``$XDG_CACHE_HOME``, else in ``~/.cache``; None where it can't be."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lockstep")
    return wanted if wanted.is_absolute() and may_be_made(wanted) else None


def cache_folder() -> Path:
    """Return the folder for what this user's runs keep for the next ones where nothing can be written beside the data.

    That of `home_cache`, else (containers with a user of their own, services) a private one in the temporary folder,
    which is made: others may write there too.

    Raises:
        UserError: that one is somebody else's.
    """
    if wanted := home_cache():
        return wanted
    user = os.getuid() if hasattr(os, "getuid") else None
    private = Path(tempfile.gettempdir(), f"lockstep-{user}")
    with contextlib.suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        found = private.lstat()
        if stat.S_ISDIR(found.st_mode) and (user is None or (found.st_uid == user and not found.st_mode & 0o022)):
            return private
    raise UserError(
        f"{private}, for caches, is not this user's own folder; set XDG_CACHE_HOME to a folder you can write to"
    )


def content_digest(*parts: bytes) -> str:
    """SHA-256 over the parts and their lengths, as hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
