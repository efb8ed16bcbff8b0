"""Rules for every text file: ASCII, nothing of one machine, no places to download from, no leftovers of a merge."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.architecture.source_tree import ROOT, text_files

# written in pieces, so that this file keeps to its own rule
OF_ONE_MACHINE = re.compile("|".join(("/" + r"(?:work|root|home|Users)/\w", r"[A-Z]:\\\\" + "Users")))
PLACES_TO_DOWNLOAD_FROM = re.compile("|".join(("index" + "-url", "find" + "-links", "files" + r"\.pythonhosted")))
LEFT_BY_A_MERGE = re.compile(r"^(?:<{7} |>{7} |={7}$)", re.MULTILINE)
ADDRESS = re.compile(r"https?://([A-Za-z0-9.\-]+)")
#: hosts that people read; nothing is downloaded from them by a script of ours
READ_BY_PEOPLE = (
    "github.com",
    "arxiv.org",
    "docs.ray.io",
    "www.apache.org",
    "docs.python.org",
    "pytorch.org",
    "www.w3.org",  # a namespace of XML
    "127.0.0.1",
    "example.org",  # reserved for examples (RFC 2606)
)


def problems_of(path: Path) -> list[str]:
    """What of the file at `path` a text file must not contain."""
    try:
        text = path.read_bytes().decode("ascii")
    except UnicodeDecodeError as error:
        return [f"byte {error.start} is not ASCII"]
    hosts = {host for host in ADDRESS.findall(text) if not host.endswith(READ_BY_PEOPLE)} - {"git-lfs"}
    checks = {
        "has a carriage return": "\r" in text,
        "has a tab": "\t" in text and path.suffix not in ("", ".txt", ".csv"),
        "names a folder of one machine": OF_ONE_MACHINE.search(text) is not None,
        "names a place to download from": PLACES_TO_DOWNLOAD_FROM.search(text) is not None,
        f"names hosts {sorted(hosts)}": bool(hosts),
        "has a conflict that a merge left": LEFT_BY_A_MERGE.search(text) is not None,
    }
    return [problem for problem, found in checks.items() if found]


def test_text_is_ascii_and_names_no_machine() -> None:
    files = list(text_files())
    assert len(files) > 1000
    found = {path.relative_to(ROOT).as_posix(): problems for path in files if (problems := problems_of(path))}
    assert found == {}


def test_a_bad_text_file_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_bytes(("a\tb\r\nhttps://" + "example.com/x").encode())
    assert problems_of(bad) == ["has a carriage return", "has a tab", "names hosts ['example.com']"]
    bad.write_bytes((7 * "<" + " HEAD\nours\n" + 7 * "=" + "\ntheirs\n").encode())
    assert problems_of(bad) == ["has a conflict that a merge left"]
    bad.write_bytes("\u00e9".encode())
    assert problems_of(bad) == ["byte 0 is not ASCII"]


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


def test_the_page_of_request_fields_is_that_of_the_table() -> None:
    """Out of date? Run scripts/write_requests.py."""
    script = ROOT / "scripts" / "write_requests.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_the_lists_of_families_are_those_of_recognition_and_of_the_tests() -> None:
    """Out of date? Run scripts/write_families.py."""
    script = ROOT / "scripts" / "write_families.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0
    listed = (ROOT / "docs" / "reference" / "families.md").read_text()
    assert ", FluxPipeline |" in listed
    assert "WanImageToVideoPipeline" in listed
    assert "not compared" in listed
