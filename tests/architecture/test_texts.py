"""What every text file keeps to: ASCII, nothing of one machine, no places to download from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, product_modules, text_files

FILES = pytest.mark.parametrize("path", list(text_files()), ids=lambda path: path.relative_to(ROOT).as_posix())

# written in pieces, so that this file keeps to its own rule
OF_ONE_MACHINE = re.compile("|".join(("/" + r"(?:work|root|home|Users)/\w", r"[A-Z]:\\\\" + "Users")))
PLACES_TO_DOWNLOAD_FROM = re.compile("|".join(("index" + "-url", "find" + "-links", "files" + r"\.pythonhosted")))
ADDRESS = re.compile(r"https?://([A-Za-z0-9.\-]+)")
#: hosts that people read; nothing is downloaded from them by a script of ours
READ_BY_PEOPLE = (
    "github.com",
    "arxiv.org",
    "docs.ray.io",
    "www.apache.org",
    "docs.python.org",
    "pytorch.org",
    "127.0.0.1",
)


@FILES
def test_text_is_ascii_and_of_no_machine(path: Path) -> None:
    text = path.read_bytes().decode("ascii")
    assert "\r" not in text
    assert "\t" not in text or path.suffix in ("", ".txt", ".csv")
    assert OF_ONE_MACHINE.search(text) is None
    assert PLACES_TO_DOWNLOAD_FROM.search(text) is None
    hosts = {host for host in ADDRESS.findall(text) if not host.endswith(READ_BY_PEOPLE)} - {"git-lfs"}
    assert not hosts, f"names {hosts}"


def test_dependencies_are_exact_and_from_nowhere_in_particular() -> None:
    """constraints.txt: name==version lines only, no URLs, paths or local builds."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    for line in pins:
        assert re.fullmatch(r"[A-Za-z0-9_.\-]+==[A-Za-z0-9.]+", line), line
    names = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins}
    assert len(names) == len(pins)
    assert {"torch", "ray", "diffusers", "transformers", "pydantic", "typer", "rich", "pytest", "ruff", "mypy"} <= names
    assert "modelpool" not in names


def test_the_structure_page_tells_of_every_module() -> None:
    """One line a module, in its own words. Out of date? Run scripts/write_structure.py."""
    script = ROOT / "scripts" / "write_structure.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0
    page = (ROOT / "STRUCTURE.md").read_text()
    told = re.findall(r"^- `([\w/]+\.py)`: \S.+$", page, flags=re.MULTILINE)
    modules = [m.place for m in product_modules("pool", "scheduler", "actors") if m.path.name != "__init__.py"]
    assert sorted(told) == sorted(["modelpool.py", *modules])


def test_the_lists_of_families_are_those_of_recognition_and_of_the_tests() -> None:
    """Out of date? Run scripts/write_families.py."""
    script = ROOT / "scripts" / "write_families.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0
    listed = (ROOT / "docs" / "families.md").read_text()
    assert ", FluxPipeline |" in listed
    assert "WanImageToVideoPipeline" in listed
    assert "not compared" in listed
