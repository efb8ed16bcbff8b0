"""Where our own packages are, and how other processes and machines come to import them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

#: this repository, or the folder that it is installed in
CODE_FOLDER = Path(__file__).resolve().parent.parent
PACKAGES = ("pool", "scheduler", "actors", "modelpool.py")


def code_path() -> str:
    """A PYTHONPATH for processes of this machine: ours before what is there already."""
    return os.pathsep.join(filter(None, (str(CODE_FOLDER), os.environ.get("PYTHONPATH"))))


def code_for_other_machines() -> dict[str, Any]:
    """A Ray runtime environment that brings our packages to the nodes. What they require must be installed there."""
    return {"py_modules": [str(CODE_FOLDER / package) for package in PACKAGES]}
