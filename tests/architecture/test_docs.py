"""The documentation builds without warnings, its generated and mentioned parts match the code, and prose is wrapped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.layers import LAYERS, ROOMS
from tests.architecture.source_tree import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: paths of files and folders of the repository, as pages mention them
_PATH = re.compile(r"`((?:pool|scheduler|actors|tests|benchmarks|scripts|examples|configs|docs)/[\w./-]*)`")
#: constants of the code
_TABLE = re.compile(r"`([A-Z][A-Z_]+)`")
_CODE = re.compile(r"`[\w./-]+`")
_CONCURRENT = re.compile(r"threading\.(?:Thread|R?Lock|Condition|Event)\(|asyncio\.Event\(|PoolExecutor\(|to_thread\(")
_WIDTH = 120


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference" / "command_line.html").read_text(encoding="utf-8")
    assert "--hires" in page
    assert re.search(r"https?://[^\" ]+\.(?:js|css|woff2?)\b", page) is None, "the page loads something from elsewhere"


def test_the_list_of_modules_is_current() -> None:
    """Run scripts/write_modules.py to update it."""
    script = ROOT / "scripts" / "write_modules.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_mentioned_paths_exist() -> None:
    mentioned = {(page, path) for page in PAGES for path in _PATH.findall(page.read_text(encoding="ascii"))}
    missing = sorted(f"{page.relative_to(ROOT)}: {path}" for page, path in mentioned if not (ROOT / path).exists())
    assert missing == []
    assert len(mentioned) > 100


def test_tables_that_the_how_tos_name_exist() -> None:
    """Every constant in a how-to occurs in a file that the same page mentions."""
    missing: list[str] = []
    for page in (ROOT / "docs" / "how-to").glob("*.md"):
        text = page.read_text(encoding="ascii")
        files = [ROOT / path for path in _PATH.findall(text) if path.endswith(".py")]
        code = "\n".join(path.read_text(encoding="utf-8") for path in files)
        missing += [f"{page.name}: {name}" for name in _TABLE.findall(text) if not re.search(rf"\b{name}\b", code)]
    assert missing == []


def test_the_architecture_page_lists_every_room_with_its_folders() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="ascii")
    rows = re.findall(r"^\| `(\w+/\w+)` \| ([^|]*)\|", page.partition("## Rooms")[2], re.MULTILINE)
    rooms = {
        f"{package}/{room}": {folder.split("/")[0] for folder in order if folder != "."}
        for package in ROOMS
        for room, order in ROOMS[package].items()
    }
    assert {room: set(folders.replace(",", " ").split()) for room, folders in rows} == rooms
    assert [room for room, _ in rows] == list(rooms)
    assert len(page.splitlines()) <= 120, "one page"


def test_the_page_on_concurrency_lists_every_thread_and_lock() -> None:
    page = (ROOT / "docs" / "explanation" / "concurrency.md").read_text(encoding="ascii")
    modules = [path for package in LAYERS for path in (ROOT / package).rglob("*.py")]
    found = [path.relative_to(ROOT) for path in modules if _CONCURRENT.search(path.read_text(encoding="utf-8"))]
    listed = [
        path for path in found if {f"`{each.as_posix()}`" for each in (path, *path.parents)} & set(_CODE.findall(page))
    ]
    assert listed == found
    assert len(found) > 15


def test_prose_is_wrapped() -> None:
    """Tables, code blocks, images and words longer than a line are exempt."""
    long: list[str] = []
    for page in PAGES:
        in_code = False
        for number, line in enumerate(page.read_text(encoding="ascii").splitlines(), start=1):
            in_code ^= line.lstrip().startswith("```")
            exempt = in_code or line.lstrip().startswith(("|", "```", "![", "<!--"))
            if not exempt and len(line) > _WIDTH and " " in line.strip():
                long.append(f"{page.relative_to(ROOT)}:{number}")
    assert long == []
