"""Proves that the example of explicit control does what it says, from a script's own process and place: the free memory
is back to the first figure exactly, three residencies make one image, a cancel stops one run and not the next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.architecture.source_tree import ROOT


def test_the_example_prints_the_three_lines_and_ends_where_it_began(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "explicit_control.py")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = {
        name: int(free.replace(",", ""))
        for name, free in re.findall(r"^(on host|on GPU|back on host) +([\d,]+) bytes free$", done.stdout, re.MULTILINE)
    }
    assert list(figures) == ["on host", "on GPU", "back on host"]
    assert figures["back on host"] == figures["on host"] > figures["on GPU"]
    assert re.findall(r"^(all|half|none) +[\d,]+ of", done.stdout, re.MULTILINE) == ["all", "half", "none"]
    assert "all images are equal: True" in done.stdout
    assert "stopped after 2 steps; the next run completes: (64, 64, 3) pixels" in done.stdout
