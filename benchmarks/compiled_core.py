"""The compiled core, built into a folder of its own for a measurement or a test. The sources stay as they are."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class NotBuilt(Exception):
    """The compiler failed. Says what it said."""


def why_not() -> str | None:
    """What is missing here to compile; None when nothing is."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"no C compiler: {compiler}"
    if find_spec("mypyc") is None:
        return "no mypyc: it comes with mypy, which the extra `dev` has"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no headers of Python"
    return None


def build(folder: Path, opt_level: int) -> Path:
    """Build all packages into `folder`, which must exist; returns the folder to import them from.

    opt_level  how far the C compiler optimises, 0 to 3
    Raises NotBuilt.
    """
    library = folder / "lib"
    built = ["build", "--build-base", str(folder), "--build-lib", str(library)]
    compiled = ["build_ext", "--opt-level", str(opt_level)]
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), *built, *compiled]
    environment = {**os.environ, "MODELPOOL_COMPILE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt((done.stdout + done.stderr)[-4000:])
    return library
