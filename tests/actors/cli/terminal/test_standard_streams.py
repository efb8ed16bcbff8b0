"""A command on a full disk: it goes on without its messages to the user, and not without what programs read."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.cli.terminal.screen import say, user_console
from modelpool.actors.cli.terminal.standard_streams import StdoutFailed, for_programs, guard_streams

COMMAND = (sys.executable, "-c", "from modelpool.actors.cli.main import main; main()", "inspect", "--help")
FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no disk that is always full")


class Disk(io.StringIO):
    """A stream that fails while it is full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def guarded_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """stdout and stderr of this process, as a command has them. Call it in the test: pytest sets its own before."""
    found = Disk()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(sys, "stdout", found)
    guard_streams()
    return found


def test_messages_that_a_full_disk_does_not_take_end_no_command_and_are_told_of_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found with stderr on a full disk: a batch ended before its first image."""
    disk = guarded_disk(monkeypatch)
    disk.is_full = True
    say(user_console(), "one")
    say(user_console(), "two")
    disk.is_full = False
    say(user_console(), "three")
    say(user_console(), "four")
    note = "modelpool: messages before this one are missing here: No space left on device"
    assert disk.getvalue().splitlines() == [note, "three", "four"]


class RawDisk(io.RawIOBase):
    """A file that takes nothing while it is full, and whole writes before and after."""

    is_full = False
    content = b""

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.content += bytes(content)
        return len(content)


def test_missing_messages_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the buffer of stderr kept a notice for each write to the full disk, and gave all of them to the user."""
    disk = RawDisk()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=True))
    guard_streams()
    disk.is_full = True
    for number in range(200):
        print(number, file=sys.stderr)
    disk.is_full = False
    print("later", file=sys.stderr)
    note = "modelpool: messages before this one are missing here: No space left on device"
    assert disk.content.decode().splitlines() == ["0", note, "later"], "the first one was in the buffer"


def test_the_output_for_programs_fails_by_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = guarded_disk(monkeypatch)
    disk.is_full = True
    with pytest.raises(StdoutFailed, match=r"^stdout: cannot be written \(No space left on device\)$"):
        print("{}")
    disk.is_full = False
    print("{}")
    sys.stdout.flush()
    assert disk.getvalue() == "", "lines after a gap are no output of the command"


def test_a_closed_pipe_ends_a_command_as_ever() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = for_programs(os.fdopen(writing, "w"))
    stream.write("{}")
    with pytest.raises(BrokenPipeError):
        stream.flush()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_command_with_a_full_stdout_says_so_in_one_line_and_fails() -> None:
    """It showed a traceback."""
    with FULL.open("w") as full:
        ended = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "modelpool: stdout: cannot be written (No space left on device)\n")
