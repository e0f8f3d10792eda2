"""Whether Python finds the packages of this folder rather than others of the same names.

``utils`` and ``models`` are common names: where a folder with packages of its own comes first on the path, `import
train` would load those. Scripts started by their file are safe, for Python looks beside them first.
"""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PACKAGES = ("utils", "models")


def check_packages() -> None:
    """Check where the packages would come from, or came from if they are loaded.

    Raises:
        ImportError: names both files and what can be done.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found, own = _place(spec), FOLDER / name / "__init__.py"
        if found is None:
            raise ImportError(f"Lockstep's package '{name}' is not found; put {FOLDER} on sys.path", name=name)
        if found != own:
            raise ImportError(
                f"{found} stands in the way of Lockstep's own package '{name}', {own}; put {FOLDER} before the other's "
                "folder on sys.path or PYTHONPATH, or rename the other",
                name=name,
            )


def _place(spec: ModuleSpec | None) -> Path | None:
    """Return the file of a module, or the folder of a package without one."""
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).resolve()
    return next((Path(folder).resolve() for folder in spec.submodule_search_locations or ()), None)
