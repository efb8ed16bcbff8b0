"""The command that installs an extra: one that works, since modelpool is not on PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelpool.pool.values.core.install_hint import ROOT, install_command, packages_of
from tests.architecture.source_tree import ROOT as CLONE

REQUIREMENTS = (
    "torch>=2",
    's3fs>=2026.2; extra == "s3"',
    "fastapi>=0.165; extra == 'serve'",
    "uvloop>=0.23; sys_platform != 'win32' and extra == 'serve'",
    'modelpool[serve]; extra == "ray-serve"',
    'ray[serve]<2.61,>=2.60; extra == "ray-serve"',
)


def clone(root: Path) -> Path:
    """A folder with the scripts of a clone, and a Python that notes how pip is called in place of calling it."""
    (root / "scripts").mkdir()
    for name in ("setup", "ensure_venv.sh"):
        shutil.copy2(CLONE / "scripts" / name, root / "scripts" / name)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy2(CLONE / name, root / name)
    (root / ".venv" / "bin").mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" >> {root}/calls; else exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o755)
    return root


def installed(root: Path, *extras: str) -> list[str]:
    """Run the script; return what it installed."""
    (root / "calls").write_text("")
    subprocess.run([root / "scripts" / "setup", *extras], check=True, capture_output=True, timeout=100, env=os.environ)
    return re.findall(r"--editable (\S+)", (root / "calls").read_text())


def test_the_command_is_the_script_of_the_clone_or_names_the_packages(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup").touch()
    inside = install_command("s3", tmp_path, str(tmp_path / ".venv"), REQUIREMENTS)
    assert inside == f"{tmp_path}/scripts/setup s3"
    elsewhere = install_command("s3", tmp_path, "/usr", REQUIREMENTS)
    assert elsewhere == f"{sys.executable} -m pip install 's3fs>=2026.2'"
    assert "docs/guides/install.md" in install_command("s3", tmp_path, "/usr", ())
    assert ROOT == CLONE
    assert packages_of("serve", REQUIREMENTS) == ("fastapi>=0.165", "uvloop>=0.23")
    assert packages_of("ray-serve", REQUIREMENTS) == ("fastapi>=0.165", "uvloop>=0.23", "ray[serve]<2.61,>=2.60")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_setup_adds_extras_to_those_that_are_installed(tmp_path: Path) -> None:
    root = clone(tmp_path)
    assert [installed(root, *extras) for extras in ((), (), ("serve",), ("s3", "serve"), ("s3",), ())] == [
        ["."],
        [],
        [".[serve]"],
        [".[s3,serve]"],
        [],
        [],
    ]
    with pytest.raises(subprocess.CalledProcessError) as raised:
        installed(root, "srve")
    assert b"unknown extra 'srve'. Known: s3, gs, hf, " in raised.value.stderr


def test_nothing_tells_a_user_to_install_modelpool_from_pypi() -> None:
    """The name does not exist there."""
    told = {}
    places = ("README.md", "CONTRIBUTING.md", "docs", "actors", "pool", "scheduler", "scripts", "configs", "examples")
    for place in places:
        files = [CLONE / place] if (CLONE / place).is_file() else sorted((CLONE / place).rglob("*"))
        for file in files:
            if file.suffix in (".py", ".md", ".toml", ".yaml", ".sh", "") and file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")
                if found := re.findall(r"""pip install ['"]?modelpool\b.*""", text):
                    told[str(file.relative_to(CLONE))] = found
    del told["docs/guides/install.md"]  # it says that this does not work
    assert not told
