"""Parts "tests", "sanitizer" and "captures": `tests/gpu` without the configuration and plugins of the other tests.

Starting a process and its context takes longer than most tests, so all quick ones share one, those of stream order
first. What captures or compiles comes in a later command.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.measurements import OutOfTime, Record, is_context_lost
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
#: files in order of value
FILES = ("test_streaming.py", "test_upload_ahead.py", "test_engine_memory.py", "test_fast_path.py", "test_devices.py")
#: in the names of tests that capture or compile
SLOW = ("graphs", "compiled")
#: a line of `pytest -v`
_OUTCOME = re.compile(r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL)")
#: seconds after which a test is ended, where pytest-timeout is installed
TEST_SECONDS = 60


def run(record: Record, setting: Setting) -> None:
    """Run what does not compile, in one process, and record each test; what a lost context failed runs again, alone."""
    place = "memory" if setting.models.is_relative_to("/dev/shm") else "a disk: they may be read more slowly"
    record.add("environment", note=f"{environment(setting.device)}; models in {place}")
    run_tests(record, setting, FILES, f"not {' and not '.join(SLOW)}")


def run_sanitizer(record: Record, setting: Setting) -> None:
    """Run the tests of stream order once under torch's own checker, which reports accesses that no wait orders."""
    run_tests(record, setting, FILES[:2], "not while_the_device_computes", {"TORCH_CUDA_SANITIZER": "1"})


def run_captures(record: Record, setting: Setting) -> None:
    """Run the tests that capture or compile, in a process of their own."""
    run_tests(record, setting, FILES, " or ".join(SLOW))
    if setting.device != "cuda":
        record.skip("captures", "only on CUDA")


def run_tests(
    record: Record, setting: Setting, files: Sequence[str], chosen: str, variables: Mapping[str, str] | None = None
) -> None:
    """Run the chosen tests of some files of `tests/gpu` in one process; on other devices than CUDA they are collected,
    which imports them."""
    names = [f"tests/gpu/{file}" for file in files]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "--noconftest"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "-rfE"]
    environment = {**os.environ, **(variables or {})}
    if setting.device != "cuda":
        record.skip("the tests", f"they need CUDA, and the device is {setting.device}; they are collected only")
        with record.attempting("collection"):
            said = "\n".join(_lines([*command, "--collect-only", "-q", "-k", chosen, *names], environment, record))
            count = len(re.findall(r"^tests/gpu/\S+::", said, re.MULTILINE))
            record.add("tests collected", count, "tests", goal="at least 1", is_met=count > 0)
        return
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={TEST_SECONDS}")
    with record.attempting("the tests"):
        ended, lost = _record_outcomes(record, [*command, "-v", "-k", chosen, *names], environment)
        if not ended:
            record.add("the tests", is_met=False, note="no test ran; see log.txt")
        for test in lost:
            with record.attempting(test):
                _record_outcomes(record, [*command, "-v", test], environment, " (alone)")


def _record_outcomes(
    record: Record, command: Sequence[str], environment: Mapping[str, str], suffix: str = ""
) -> tuple[int, list[str]]:
    """Record each test when it has ended. Returns how many have, and those that failed after the context was lost."""
    failed: list[str] = []
    ended, is_lost = 0, False
    for line in _lines(command, environment, record):
        is_lost = is_lost or is_context_lost(RuntimeError(line))
        if (match := _OUTCOME.match(line)) is None:
            continue
        test, outcome = match[1], match[2]
        ended += 1
        is_met = None if outcome == "SKIPPED" else outcome in ("PASSED", "XFAIL")
        record.add(
            test + suffix, goal="passes", is_met=is_met, note="" if is_met else f"{outcome.lower()}; see log.txt"
        )
        failed += [] if is_met is not False else [test]
    return ended, failed[1:] if is_lost else []


def _lines(command: Sequence[str], environment: Mapping[str, str], record: Record) -> Iterator[str]:
    """The lines of a child while it prints them, which the log has as well. Raises OutOfTime at the end of the part."""
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ending = threading.Timer(max(0.1, record.seconds_left), child.kill)
    ending.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            yield line.rstrip("\n")
        child.wait()
    finally:
        ending.cancel()
        child.kill()
        child.wait()
    if record.seconds_left <= 0:
        record.add("the rest of the tests", is_met=False, note="out of time")
        raise OutOfTime("tests")


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
