"""Signals that stop a command, each in a process of its own: what the process does, and its exit code."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from modelpool.actors.cli.terminal.interrupts import STOP_SIGNALS

IMPORTS = (
    "import os, signal, sys, time\nfrom modelpool.actors.cli.terminal.interrupts import StopRequest, StoppableCommand\n"
)
#: stops as a command does: it finishes, prints, and returns the code of the signal
PATIENT = (
    IMPORTS + "with StopRequest() as stop:\n"
    "    print('ready', flush=True)\n"
    "    while not stop.requested:\n"
    "        time.sleep(0.01)\n"
    "    for number in eval(sys.argv[1]):\n"
    "        os.kill(os.getpid(), number)\n"
    "print('how to resume', flush=True)\n"
    "print('how to resume', file=sys.stderr, flush=True)\n"
    "sys.exit(stop.exit_code)\n"
)


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_stop_signal_lets_the_command_finish_and_repeated_ones_from_outside_change_nothing(number) -> None:
    process = started(PATIENT, "(15, 1, 15)")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "how to resume\n", "how to resume\n")


def test_ctrl_c_after_another_signal_ends_the_process_at_once() -> None:
    process = started(PATIENT, "(2,)")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "modelpool: terminated\n")


def test_a_closed_terminal_stops_the_command_and_later_output_does_no_harm() -> None:
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", PATIENT, "(1,)"])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP


def test_a_signal_before_anything_runs_closes_what_was_opened_and_is_the_exit_code() -> None:
    """The pool is being opened. A second SIGTERM, and SIGHUP, do not disturb the closing."""
    code = (
        IMPORTS + "from modelpool.actors.cli.main import run\n"
        "from modelpool.actors.cli.terminal.session import Session\n"
        "def open_pool(options):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        # in pieces: a signal that comes just before a sleep does not shorten it
        "        [time.sleep(0.1) for _ in range(600)]\n"
        "    finally:\n"
        "        os.kill(os.getpid(), 15)\n"
        "        os.kill(os.getpid(), 1)\n"
        "        print('closed', flush=True)\n"
        "sys.exit(run(['status', 'mine'], Session((), open_pool)))\n"
    )
    process = started(code)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, "closed\n", "")


def test_an_ignored_hangup_stays_ignored() -> None:
    """As under nohup."""
    code = (
        IMPORTS + "signal.signal(1, signal.SIG_IGN)\n"
        "with StoppableCommand() as command, StopRequest() as stop:\n"
        "    os.kill(os.getpid(), 1)\n"
        "    print(command.number, stop.requested)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0 False\n", done.stderr
