"""What the system says of a process by its id and start."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from modelpool.pool.values.core.process_identity import is_stopped, process_start


def test_a_stopped_process_is_told_from_a_running_one_and_from_another_with_its_id() -> None:
    process = subprocess.Popen(["sleep", "60"])
    start, found = process_start(process.pid), []
    if not start:
        process.kill()
        pytest.skip("the system does not say when a process started")
    try:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            wanted = number == signal.SIGSTOP
            deadline = time.monotonic() + 10
            while is_stopped(process.pid, start) != wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append(is_stopped(process.pid, start))
            assert not is_stopped(process.pid, f"{start}1"), "an earlier process had its id"
    finally:
        process.kill()
        process.wait()
    assert found == [True, False]
    assert not is_stopped(process.pid, start), "it has ended"
