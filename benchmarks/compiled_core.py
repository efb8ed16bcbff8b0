"""Builds the compiled core into a separate folder, for a measurement or a test. The sources do not change."""

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
    """The compiler failed. The message is the end of its output."""


def why_not() -> str | None:
    """Return the reason why this machine cannot compile; None if it can."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"no C compiler: {compiler}"
    if find_spec("mypyc") is None:
        return "no mypyc: it is part of mypy, which the extra `dev` installs"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python headers"
    return None


def build(folder: Path, opt_level: int) -> Path:
    """Build all packages into `folder`, which must exist; returns the folder to import them from.

    opt_level  optimisation level of the C compiler, 0 to 3

    Raises NotBuilt if the compiler fails.
    """
    library = folder / "lib"
    built = ["build", "--build-base", str(folder), "--build-lib", str(library)]
    compiled = ["build_ext", "--opt-level", str(opt_level)]
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), *built, *compiled]
    # warnings about generated C code take a third of the compiler's time
    environment = {**os.environ, "MODELPOOL_COMPILE": "1", "CFLAGS": "-w"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt((done.stdout + done.stderr)[-4000:])
    return library
