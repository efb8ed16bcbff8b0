"""Locates the modelpool package, and makes it importable in other processes and on other nodes.

A Ray job has one runtime environment: our package is added to what the user's job brings, and nothing of it is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modelpool
from modelpool.pool.values.core.errors import UserError

#: the folder of the modelpool package; its parent must be on the import path
PACKAGE_FOLDER = Path(modelpool.__file__).absolute().parent
#: the key of a runtime environment for packages
PY_MODULES = "py_modules"
#: set by Ray for drivers that were submitted as jobs: the runtime environment of the job, as JSON
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: lets the environment that a driver passes replace fields of its job's; otherwise Ray refuses the same field twice
OVERRIDE_VARIABLE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"


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
    return {PY_MODULES: [str(PACKAGE_FOLDER)]}


def job_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the runtime environment of the job that this driver was submitted as; empty if it was started directly.

    Raises UserError if the variable that Ray sets was changed to something else.
    """
    text = variables.get(JOB_VARIABLE)
    if not text:
        return {}
    try:
        environment = json.loads(text).get("runtime_env") or {}
        return dict(environment)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{JOB_VARIABLE} does not hold a Ray job's configuration ({error})") from None


def with_user_modules(code: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return `code` with the packages of the user's runtime `environment` before ours, so that ours hide none.

    Ray merges two environments field by field and takes one of two lists of packages: the result is for the list that
    wins. All other fields of `environment` are left to that merge.
    """
    theirs = [str(module) for module in environment.get(PY_MODULES) or ()]
    ours = [module for module in code[PY_MODULES] if module not in theirs]
    return {**code, PY_MODULES: [*theirs, *ours]}
