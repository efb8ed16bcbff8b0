"""Our packages have plain names that others could have too: they are ours wherever a driver starts.

That they are ours inside an actor is shown in tests/actors/test_ray_pool.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import modelpool
from tests.architecture.source_tree import PACKAGES, ROOT

WHERE = """
import importlib, json, sys
print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))
"""
FACE = """
import json, sys
import modelpool
light = sorted({"ray", "torch", "diffusers", "pydantic", "numpy"} & set(sys.modules))
from modelpool import GenerateRequest, LoraChoice, PoolConfig, UserError, JobFailed
still = sorted({"ray", "torch", "diffusers"} & set(sys.modules))
from modelpool import ModelPool, Jobs, ImageResult
print(json.dumps([light, still, sorted({"ray", "torch", "diffusers"} & set(sys.modules))]))
"""


def run(code: str, *arguments: str, cwd: Path) -> object:
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_the_names_are_ours_in_a_driver(tmp_path) -> None:
    expected = [str(ROOT / name / "__init__.py") for name in PACKAGES] + [str(ROOT / "modelpool.py")]
    assert run(WHERE, *PACKAGES, "modelpool", cwd=tmp_path) == expected


def test_nothing_that_is_installed_has_the_same_names() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in (*PACKAGES, "modelpool"):
        assert set(owners.get(name, ())) <= {"modelpool"}, f"{name} is also of {owners[name]}"


def test_importing_the_face_imports_nothing_heavy(tmp_path) -> None:
    assert run(FACE, cwd=tmp_path) == [[], [], []]


def test_the_face_has_what_it_says_and_nothing_else() -> None:
    for name in modelpool.__all__:
        assert getattr(modelpool, name).__name__ == name
        assert name in dir(modelpool)
    assert not hasattr(modelpool, "Jbos")
    assert sorted(modelpool.__all__) == modelpool.__all__
