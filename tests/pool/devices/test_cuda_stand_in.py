"""The tests for GPUs pass on the stand-in for `torch.cuda`, and its streams are used without a finding. Parts of the
visit to a GPU measure what they should on it: their code for CUDA runs nowhere else.

Without captures, compilation, and what compares times of copies with times of products.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.measurements import read_measurements
from tests.pool.devices.stand_in_tree import make_tree

LEFT_OUT = "not graphs and not compiled and not while_the_device_computes"
CODE = f"""
import sys, pytest
from tests.pool.devices.stand_in_cuda import checker
ended = pytest.main(['-c', '/dev/null', '--rootdir', '.', '--noconftest', '--import-mode=importlib', '-q',
    '-p', 'no:cacheprovider', '-W', 'ignore', '-k', {LEFT_OUT!r}, 'tests/gpu'])
print('findings:', dict(checker.findings), 'after', checker.operations > 1000)
sys.exit(ended)
"""


def test_the_copy_of_the_tree_can_be_made(tmp_path: Path) -> None:
    """Each replacement is found: code that moves is noticed before the next nightly run."""
    tree = make_tree(tmp_path / "tree")
    text = (tree / "pool" / "devices" / "copy_streams.py").read_text(encoding="utf-8")
    assert "torch.cuda" not in text
    assert "stand_in_cuda.checker.lend" in text


@pytest.mark.nightly(usually="tests/pool/devices/test_cuda_stand_in.py")
@pytest.mark.timeout(1800)
def test_tests_for_gpus_pass_on_the_stand_in(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "findings: {} after True" in done.stdout, done.stdout[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


#: of the visit, and the seconds that each may take
VISITED = ("device", "transfers", "switch", "more sdxl", "overlap sdxl", "soak", "gangs")
PART_SECONDS = 150.0
#: diffusers asks torch itself for streams of the device
DIFFUSERS_STREAMS = "group offloading of diffusers"


@pytest.mark.nightly(usually="tests/benchmarks/test_gpu.py")
@pytest.mark.timeout(1800)
def test_parts_of_the_visit_run_on_the_stand_in(tmp_path: Path) -> None:
    """Found by it: engines with the budgets of half resident weights, of the soak and of switches did not open, as
    workspaces take some of them on a Hopper."""
    tree, rows_path = make_tree(tmp_path / "tree"), tmp_path / "rows.jsonl"
    (tmp_path / "models").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    for part in VISITED:
        command = [sys.executable, "-m", "benchmarks.gpu.part", part, "--device", "cuda", "--size", "small"]
        command += ["--rows", str(rows_path), "--models", str(tmp_path / "models")]
        command += ["--ends-at", str(time.monotonic() + PART_SECONDS)]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = read_measurements(rows_path)
    failed = [(row.name, row.note) for row in rows if row.value is None and row.is_met is False]
    assert [each for each in failed if each[0] != DIFFUSERS_STREAMS] == []
    late = [row.name for row in rows if "out of time" in row.note]
    assert late == []
    measured = {row.name for row in rows if row.value is not None}
    assert {
        "asking for free memory",
        "context of a process",
        "workspaces of one stream",
        "link with 8 fill threads",
        "memory of a killed process",
        "sampling with half of the weights resident",
        "images per second, decodes overlapping sampling",
        "peak reserved memory, overlapping",
        "jobs",
    } <= measured
