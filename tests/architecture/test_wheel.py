"""A wheel holds modelpool and its example model, and works where no checkout is.

Proves: the only top-level folder is modelpool; the packages, the vocabulary, the web page and py.typed are in it, tests
and benchmarks are not; the example is outside of the package, and small; the public API and the command run from it; a
policy that only a checkout has is refused with a way to get it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import modelpool
from tests.architecture.source_tree import PACKAGES, ROOT, product_modules

#: a wheel is small enough to be copied anywhere
MOST_WHEEL_BYTES = 20 << 20

pytestmark = [pytest.mark.slow, pytest.mark.nightly(usually="tests/architecture/test_package_names.py")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    build += [
        "build",
        "--build-base",
        str(folder / "build"),
        "bdist_wheel",
        "--bdist-dir",
        str(folder / "bdist"),
        "--dist-dir",
        str(folder / "dist"),
    ]
    environment = {**os.environ, "MODELPOOL_COMPILE": "0"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("modelpool-*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


#: runs code or a module as if there were no editable install, with a finder that would supply what the wheel lacks
PRELUDE = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
"""
COMMAND = PRELUDE + "sys.argv[0] = 'modelpool'; runpy.run_module('modelpool', run_name='__main__')"


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(site.parent)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=site.parent, env=environment, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_the_wheel_holds_modelpool_alone(site: Path) -> None:
    tops = {path.name for path in site.iterdir() if not path.name.endswith((".dist-info", ".data"))}
    assert tops == {"modelpool"}
    inside = {path.relative_to(site / "modelpool").as_posix() for path in (site / "modelpool").rglob("*.py")}
    expected = {module.place for module in product_modules(*PACKAGES)}
    assert inside == expected | {path.name for path in (ROOT / "modelpool").glob("*.py")}
    assert (site / "modelpool" / "py.typed").is_file()
    assert list((site / "modelpool" / "pool" / "models" / "text").glob("*.gz"))
    page = Path("actors", "http", "page", "static")
    assert sorted(path.name for path in (site / "modelpool" / page).iterdir()) == sorted(
        path.name for path in (ROOT / page).iterdir()
    )


def test_the_public_api_comes_from_the_wheel(site: Path) -> None:
    code = (
        "import modelpool, modelpool.pool.models.text.clip_tokenizer as t\n"
        "from modelpool import ModelPool, GenerateRequest\n"
        "from modelpool.pool import load_checkpoint\n"
        "t.ClipTokenizer.load()\n"
        "print(modelpool.__file__, modelpool.__version__)"
    )
    done = run(site, "-c", PRELUDE + code)
    assert done.returncode == 0, done.stderr
    place, version = done.stdout.split()
    assert Path(place).is_relative_to(site)
    assert version == modelpool.__version__


def test_the_command_runs_from_the_wheel(site: Path) -> None:
    done = run(site, "-c", COMMAND, "--version")
    assert done.returncode == 0, done.stderr
    assert modelpool.__version__ in done.stdout
    done = run(site, "-c", COMMAND, "simulate", "zipf:jobs=20", "--gpus", "2xL4")
    assert done.returncode == 0, done.stderr


def test_the_example_model_comes_with_the_wheel(site: Path) -> None:
    """So an installation draws before anything is fetched or configured."""
    done = run(site, "-c", COMMAND, "models", "--json")
    assert done.returncode == 0, done.stderr
    listed = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert listed.keys() == {"shapes", "light", "outline"}
    assert Path(listed["shapes"]["path"]).is_relative_to(site)
    done = run(site, "-c", COMMAND, "models", "get", "shapes", "--folder", "copied/models")
    assert done.returncode == 0, done.stderr
    copied = site.parent / "copied" / "models" / "shapes.safetensors"
    assert copied.read_bytes() == (ROOT / "examples" / "shapes" / "models" / "shapes.safetensors").read_bytes()
    (wheel,) = (site.parent / "dist").glob("*.whl")
    assert wheel.stat().st_size < MOST_WHEEL_BYTES


def test_what_only_a_checkout_has_is_refused_with_a_way_to_get_it(site: Path) -> None:
    for arguments in (["zipf:jobs=20", "--policy", "all"], ["zipf:jobs=20", "--policy", "sticky"], ["katz:jobs=20"]):
        done = run(site, "-c", COMMAND, "simulate", *arguments, "--gpus", "2xL4")
        assert done.returncode == 2, done.stdout + done.stderr
        said = " ".join(done.stderr.split())
        assert "benchmarks, which are not installed" in said
        assert "Clone the modelpool repository" in said
