"""Part "tests": `tests/gpu` without the configuration and plugins of the other tests, one process per file.

A test that loses the CUDA context fails the tests behind it in its process only. On other devices the tests are
collected, which imports them.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu.measurements import OutOfTime, Record
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
#: a line of `pytest -v`
_OUTCOME = re.compile(r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL)")
#: seconds after which a test is ended, where pytest-timeout is installed
TEST_SECONDS = 60


def run(record: Record, setting: Setting) -> None:
    """Run all files of `tests/gpu`, and record each test."""
    place = "memory" if setting.models.is_relative_to("/dev/shm") else "a disk: they may be read more slowly"
    record.add("environment", note=f"{environment(setting.device)}; models in {place}")
    is_cuda = setting.device == "cuda"
    if not is_cuda:
        record.skip("the tests", f"they need CUDA, and the device is {setting.device}; they are collected only")
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        with record.attempting(file.name):
            run_file(record, file, collect_only=not is_cuda)


def environment(device: str) -> str:
    """Return the versions and the device, in words."""
    import diffusers
    import transformers

    said = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"diffusers {diffusers.__version__}"]
    said += [f"transformers {transformers.__version__}", f"cuda {torch.version.cuda}"]
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        said += [facts.name, f"{facts.total_memory / 2**30:.0f} GiB", f"capability {facts.major}.{facts.minor}"]
        said.append(f"cudnn {torch.backends.cudnn.version()}")
    return ", ".join(said)


def run_file(record: Record, file: Path, collect_only: bool) -> None:
    """Run the tests of one file in a child; those that it does not reach in time are not in the table."""
    name = str(file.relative_to(ROOT))
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "--noconftest"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "-rfE", name]
    if collect_only:
        command += ["--collect-only", "-q"]
    else:
        has_timeout = importlib.util.find_spec("pytest_timeout") is not None
        command += ["-v", *([f"--timeout={TEST_SECONDS}"] if has_timeout else [])]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, record.seconds_left), check=False
        )
        said, is_over = ended.stdout + ended.stderr, False
    except subprocess.TimeoutExpired as error:
        said, is_over = _text(error.stdout) + _text(error.stderr), True
    print(said)
    if collect_only:
        count = sum(line.startswith(name) for line in said.splitlines())
        record.add(f"{name}, collected", count, "tests", goal="at least 1", is_met=count > 0)
        return
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (\S+) - (.*)$", said, re.MULTILINE))
    found = 0
    for line in said.splitlines():
        if (match := _OUTCOME.match(line)) is not None:
            test, outcome = match[1], match[2]
            found += 1
            note = f"skipped: {outcome}" if outcome == "SKIPPED" else reasons.get(test, "")
            is_met = None if outcome == "SKIPPED" else outcome in ("PASSED", "XFAIL")
            record.add(test, goal="passes", is_met=is_met, note=note)
    if is_over:
        record.add(f"{name}, the rest", is_met=False, note="out of time")
        raise OutOfTime(name)
    if not found:
        record.add(name, is_met=False, note=f"no test ran: {said.strip()[-200:]}")


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
