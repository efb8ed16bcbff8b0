"""Runs tests in several processes that fork once all tests are collected: `pytest --forks N`.

Imports of the libraries and of all test modules take half a minute of a processor. The processes of pytest-xdist repeat
them; these share them, with the memory. The files of tests are the units that processes take, in their order, so that
fixtures of modules and sessions exist once in a process. A process that dies fails the test that it ran, and another
continues its file.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import util
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType
from typing import Any, TextIO

import pytest
from _pytest._io import TerminalWriter

#: the process that collects looks for dead ones after so many seconds without a report
LOOK_SECONDS = 1.0
#: processes have so many seconds for the fixtures of the session when the run is interrupted
END_SECONDS = 20.0
#: processes have so many seconds to notice Ctrl-C by themselves
OWN_END_SECONDS = 3.0
#: more deaths are no matter of single tests
MOST_DEATHS = 20
_UNIT = struct.Struct("=I")


def add_option(parser: pytest.Parser) -> None:
    """Add `--forks`."""
    parser.addoption("--forks", type=int, metavar="N", default=0, help="run tests in N forked processes")


def configure(config: pytest.Config) -> None:
    """Let forked processes run the tests where that is requested."""
    if config.option.forks:
        config.pluginmanager.register(ForkedTests(config.option.forks), "forked tests")


class ForkedTests:
    """Plugin of `--forks N`: runs the collected tests in N processes and reports them as if they had run here."""

    def __init__(self, processes: int) -> None:
        self.processes = processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run them, unless there is nothing to run or pytest has something to say about the collection."""
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None
        if (threads := threading.active_count()) > 1:
            names = sorted(each.name for each in threading.enumerate())
            raise pytest.UsageError(f"--forks: {threads} threads run after the collection, expected 1: {names}")
        _Run(session, self.processes).run()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True


@dataclasses.dataclass
class _Process:
    number: int
    pid: int
    reports: Connection
    #: indices of the tests that it took and that have not ended, in their order
    open: deque[int] = dataclasses.field(default_factory=deque)


class _Run:
    """One run in the process that has collected."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        self.session, self.config = session, session.config
        self.units = units_of([str(item.path) for item in session.items])
        self.count = min(processes, len(self.units))
        self.alive: dict[int, _Process] = {}
        self.numbers = self.deaths = self.done = 0
        self.stop = mmap.mmap(-1, 1)  # shared; processes look at it before each test
        self.ending = mmap.mmap(-1, self.count + MOST_DEATHS + 1)  # shared; by number, whether a process ends fixtures
        self.queue, feed = os.pipe()
        with os.fdopen(feed, "wb") as file:  # a unit is four bytes, and a pipe holds at least 4 KiB
            os.set_blocking(feed, False)
            file.write(b"".join(_UNIT.pack(index) for index in range(len(self.units))))

    def run(self) -> None:
        """Fork the processes and pass on what they report until all have ended."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        # the folder of all; and nothing of this process may be written by each of them
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        capture.stop_global_capturing()
        before = signal.signal(signal.SIGTERM, _on_term)
        try:
            for _ in range(self.count):
                self._start([])
            while self.alive:
                self._receive()
            if self.done != len(self.session.items) and not self.stop[0]:
                raise RuntimeError(f"{self.done} tests have ended, expected {len(self.session.items)}")
        except KeyboardInterrupt:
            self._wait_for_ends()
            raise
        finally:
            self._end()
            signal.signal(signal.SIGTERM, before)
            os.close(self.queue)
            capture.start_global_capturing()

    def _start(self, first: list[int]) -> None:
        """Fork a process that begins with these tests."""
        reader, writer = Pipe(duplex=False)
        number, self.numbers = self.numbers, self.numbers + 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _forget_exits()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                reader.close()
                code = _Worker(self, writer, number).run(first)
                atexit._run_exitfuncs()
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(BaseException):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        writer.close()
        self.alive[pid] = _Process(number, pid, reader, deque(first))

    def _receive(self) -> None:
        by_reader: dict[Any, _Process] = {each.reports: each for each in self.alive.values()}
        ready = wait(list(by_reader), LOOK_SECONDS)
        for reader in ready:
            self._pass_on(by_reader[reader])  # type: ignore[index]
        if not ready:
            for process in list(self.alive.values()):
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    while process.pid in self.alive and process.reports.poll():
                        self._pass_on(process, status)
                    if process.pid in self.alive:  # a process that it left behind holds its pipe
                        self._ended(process, status)
        if self.session.shouldfail or self.session.shouldstop:
            self.stop[0] = 1

    def _pass_on(self, process: _Process, status: int | None = None) -> None:
        """Pass on one report of a process, which has ended if it has a status."""
        try:
            name, values = process.reports.recv()
        except (EOFError, OSError):
            name = ""
        if not name:
            self._ended(process, os.waitpid(process.pid, 0)[1] if status is None else status)
            return
        hook = self.config.hook
        if name == "took":
            process.open.extend(self.units[values])
        elif name == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=self.config, data=values))
        elif name == "logstart":
            hook.pytest_runtest_logstart(**values)
        elif name == "logfinish":
            process.open.popleft()
            self.done += 1
            hook.pytest_runtest_logfinish(**values)
        else:
            hook.pytest_warning_recorded.call_historic(kwargs=values)

    def _ended(self, process: _Process, status: int) -> None:
        """Its test failed if one was open, and another process takes the others."""
        process.reports.close()
        del self.alive[process.pid]
        how = f"(exit code {os.waitstatus_to_exitcode(status)})"
        if self.stop[0]:
            return
        if not process.open:
            if status:
                self.session.shouldfail = f"a process of tests failed after its last test {how}"
            return
        item, hook = self.session.items[process.open.popleft()], self.config.hook
        text = f"The process that ran this test ended during the test {how}."
        hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", duration=0.0)
        )
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self.done += 1
        self.deaths += 1
        if self.deaths > MOST_DEATHS:
            self.session.shouldstop = f"{self.deaths} processes of tests have ended"
        else:
            self._start(list(process.open))

    def _wait_for_ends(self) -> None:
        """Wait for processes that end by themselves: a terminal sends Ctrl-C to all, and a second one would end the
        ends of their fixtures."""
        self.stop[0] = 1
        until = time.monotonic() + OWN_END_SECONDS
        while time.monotonic() < until and not all(self.ending[each.number] for each in self.alive.values()):
            time.sleep(0.02)

    def _end(self) -> None:
        """End processes that still run, as Ctrl-C does, then forcibly."""
        self.stop[0] = 1
        for process in self.alive.values():
            if self.ending[process.number]:
                continue
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGINT)
        until = time.monotonic() + END_SECONDS
        for process in self.alive.values():
            process.reports.close()
            with contextlib.suppress(OSError):
                while not os.waitpid(process.pid, os.WNOHANG)[0]:
                    if time.monotonic() > until:
                        os.kill(process.pid, signal.SIGKILL)
                    time.sleep(0.05)


def units_of(files: list[str]) -> list[range]:
    """Return the indices of the tests of each file, by the file of each test; tests of a file are neighbours."""
    units, begin = [], 0
    for _, tests in groupby(files):
        count = len(list(tests))
        units.append(range(begin, begin + count))
        begin += count
    return units


class _Worker:
    """One run in a forked process: also a plugin that reports to the process that has collected."""

    def __init__(self, run: _Run, reports: Connection, number: int) -> None:
        self.session, self.config = run.session, run.config
        self.run_, self.reports, self.number = run, reports, number
        plugins = self.config.pluginmanager
        plugins.unregister(plugins.get_plugin("terminalreporter"))
        plugins.register(_Errors(sys.stderr), "terminalreporter")
        self.capture = plugins.get_plugin("capturemanager")
        self.capture.start_global_capturing()
        factory = self.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"process{number}"
        factory._basetemp.mkdir(mode=0o700)
        self.has_begun = False
        plugins.register(self, "forked worker")
        self.has_begun = True

    def run(self, first: list[int]) -> int:
        """Run these tests and then those of the queue; return the exit code of the process."""
        try:
            tests = self._tests(first)
            index = next(tests, None)
            while index is not None and not (self.run_.stop[0] or self.session.shouldfail or self.session.shouldstop):
                after = next(tests, None)
                item = self.session.items[index]
                following = None if after is None else self.session.items[after]
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                index = after
        except (BrokenPipeError, KeyboardInterrupt):  # the process that has collected is gone, or told this one to end
            return 1
        finally:
            self.run_.ending[self.number] = 1
            signal.signal(signal.SIGINT, _ignore)
            self.session._setupstate.teardown_exact(None)
            self.capture.stop_global_capturing()
        return 0

    def _tests(self, first: list[int]) -> Iterator[int]:
        yield from first
        while data := os.read(self.run_.queue, _UNIT.size):
            (unit,) = _UNIT.unpack(data)
            self.reports.send(("took", unit))
            yield from self.run_.units[unit]

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.reports.send(("logstart", {"nodeid": nodeid, "location": location}))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.send(("report", data))

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.reports.send(("logfinish", {"nodeid": nodeid, "location": location}))

    @pytest.hookimpl
    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if not self.has_begun:  # pytest tells a new plugin of all former warnings
            return
        text, category = str(warning_message.message), warning_message.category
        if category.__module__ != "builtins":  # the module of a test cannot be imported by its name
            text, category = f"{category.__name__}: {text}", UserWarning
        shown = warnings.WarningMessage(category(text), category, warning_message.filename, warning_message.lineno)
        values = {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
        self.reports.send(("warning_recorded", values))


class _Errors:
    """Stands for pytest's reporter in a forked process: what pytest-timeout tells of other threads goes to `file`."""

    def __init__(self, file: TextIO) -> None:
        self._tw = TerminalWriter(file)


def _forget_exits() -> None:
    """Leave what the process that has collected does at its exit to it, and do the same here for what is made here:
    `multiprocessing` and `weakref` register theirs once in a process, and have done so before the fork."""
    atexit._clear()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, this is not what processes start with that a fixture still starts."""


def _on_term(signum: int, frame: FrameType | None) -> None:
    pytest.exit("terminated", returncode=128 + signum)
