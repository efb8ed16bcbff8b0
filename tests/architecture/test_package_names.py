"""modelpool is the only top-level package, wherever a driver starts, and no module exists twice.

That the same holds inside a Ray actor is tested in tests/actors/test_ray_pool.py, and that a wheel has the same
layout in tests/architecture/test_wheel.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import modelpool
from tests.architecture.source_tree import PACKAGES, ROOT

FOREIGN_NAMES = """
import json, sys
import actors, pool, scheduler
from modelpool import GenerateRequest
from modelpool.pool import load_checkpoint
from modelpool.scheduler.core import state
ours = [sys.modules[f"modelpool.{name}"].__name__ for name in ("pool", "actors", "scheduler")]
print(json.dumps([actors.WHOSE, pool.WHOSE, scheduler.WHOSE, ours]))
"""
LAZY_IMPORTS = """
import json, sys
import modelpool
light = sorted({"ray", "torch", "diffusers", "pydantic", "numpy"} & set(sys.modules))
from modelpool import GenerateRequest, LoraChoice, PoolConfig, UserError, JobFailed
still = sorted({"ray", "torch", "diffusers"} & set(sys.modules))
from modelpool import ModelPool, Jobs, ImageResult
print(json.dumps([light, still, sorted({"ray", "torch", "diffusers"} & set(sys.modules))]))
"""
TOP_LEVEL = "import {name}"
SECOND_COPY = """
import sys
sys.path.insert(0, sys.argv[1])
import modelpool.pool
import pool
"""


def run(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


def test_modules_of_a_user_called_pool_actors_and_scheduler_do_not_conflict(tmp_path: Path) -> None:
    for name in ("scheduler", "pool"):
        (tmp_path / f"{name}.py").write_text("WHOSE = 'the user'\n")
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("WHOSE = 'the user'\n")
    done = run(FOREIGN_NAMES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        *["the user"] * 3,
        [f"modelpool.{name}" for name in ("pool", "actors", "scheduler")],
    ]


def test_a_second_copy_of_a_module_is_refused(tmp_path: Path) -> None:
    for name in PACKAGES:
        done = run(TOP_LEVEL.format(name=name), cwd=tmp_path)
        assert done.returncode != 0, name
        assert f"import modelpool.{name}, not {name}" in done.stderr
    assert "import modelpool.pool, not pool" in run(SECOND_COPY, str(ROOT), cwd=tmp_path).stderr


def test_a_checkout_without_links_finds_its_packages(tmp_path: Path) -> None:
    """Some systems and archives drop symbolic links."""
    (tmp_path / "modelpool").mkdir()
    for path in (ROOT / "modelpool").glob("*.py"):
        (tmp_path / "modelpool" / path.name).write_text(path.read_text())
    for name in PACKAGES:
        (tmp_path / name).symlink_to(ROOT / name)
    code = "import modelpool.scheduler.core.state, sys; print(modelpool.__file__)"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


def test_only_modelpool_is_installed() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        assert "modelpool" not in owners.get(name, ()), f"{name} is a top-level package of modelpool"
    assert set(owners.get("modelpool", ())) <= {"modelpool"}


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("modelpool") == modelpool.__version__
    assert (ROOT / "modelpool" / "py.typed").is_file()


def test_importing_modelpool_imports_nothing_heavy(tmp_path: Path) -> None:
    done = run(LAZY_IMPORTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], [], []]


def test_public_names_exist_and_no_others() -> None:
    for name in modelpool.__all__:
        assert getattr(modelpool, name).__name__ == name
        assert name in dir(modelpool)
    assert not hasattr(modelpool, "Jbos")
    assert sorted(modelpool.__all__) == modelpool.__all__
