"""Locates the modelpool package, and makes it importable in other processes and on other nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import modelpool
from modelpool.pool.core.errors import UserError

#: the folder of the modelpool package; its parent must be on the import path
PACKAGE_FOLDER = Path(modelpool.__file__).absolute().parent


def code_path() -> str:
    """Return a PYTHONPATH for processes of this machine. Existing entries come first, so that modelpool's folder
    hides nothing of the user's.
    """
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(PACKAGE_FOLDER.parent))))


def code_for_other_machines() -> dict[str, Any]:
    """Return a Ray runtime environment that ships modelpool to the nodes. Its dependencies must be installed there.

    Raises UserError in a checkout that lost its symbolic links, since the shipped folder would lack the packages.
    """
    if not (PACKAGE_FOLDER / "pool" / "__init__.py").is_file():
        raise UserError(
            f"{PACKAGE_FOLDER}: the links to pool, actors and scheduler are missing, so modelpool cannot be sent to "
            "other nodes; restore them with `git checkout modelpool`, or install modelpool with pip"
        )
    return {"py_modules": [str(PACKAGE_FOLDER)]}
