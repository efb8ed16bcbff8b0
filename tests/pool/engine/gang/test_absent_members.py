"""Members of a gang whose processes end or stop, as the others find it: real processes, without a model.

Proves: what is known of a process is not waited for, neither at the store nor when the group is left, whatever other
members do meanwhile; and the next gang meets.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from modelpool.actors.worker.gang_store import LOOPBACK, GangStore
from modelpool.pool.engine.gang import gang_group
from modelpool.pool.engine.gang.gang_group import FIRST_SECONDS, GangGroup
from modelpool.pool.engine.gang.gang_layout import layout_of
from modelpool.pool.values.core.gang_errors import GangBroken
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId

ANSWER_SECONDS = 60.0
#: members would wait for each other at the store for so long
SEEN_SECONDS = 100.0
_NUMBERS = itertools.count(1)


class Processes:
    """Members that do what they are told."""

    def __init__(self, count: int) -> None:
        self.store = GangStore()
        context: Any = multiprocessing.get_context("fork")
        self.ends: list[Connection] = []
        self.each: list[Any] = []
        for _ in range(count):
            end, other = context.Pipe()
            process = context.Process(target=_serve, args=(other,), daemon=True)
            process.start()
            other.close()
            self.ends.append(end)
            self.each.append(process)

    def meet(self, places: list[int]) -> None:
        """Form a group of these."""
        names = tuple(WorkerId(f"gpu-{place}") for place in places)
        name, address = f"absent {next(_NUMBERS)}", self.store.address(LOOPBACK)
        for rank, place in enumerate(places):
            self.ends[place].send(Gang(name, names, rank, address))
        for place in places:
            assert self.answer(place) == "met"

    def answer(self, place: int) -> Any:
        assert self.ends[place].poll(ANSWER_SECONDS), f"no answer of {place}"
        return self.ends[place].recv()

    def close(self) -> None:
        for process, end in zip(self.each, self.ends, strict=True):
            process.kill()
            process.join()
            end.close()
        self.store.close()


@contextmanager
def processes(count: int) -> Iterator[Processes]:
    found = Processes(count)
    try:
        yield found
    finally:
        found.close()


def _serve(pipe: Connection) -> None:
    """Meet, agree and leave, as told."""
    gang_group.SEEN_SECONDS = SEEN_SECONDS
    group: GangGroup | None = None
    while True:
        try:
            told = pipe.recv()
        except EOFError:
            os._exit(0)
        if isinstance(told, Gang):
            group = GangGroup(told, layout_of(told.degree, 1), torch.device("cpu"))
            group.meet(lambda: False)
            pipe.send("met")
            continue
        assert group is not None
        began = time.monotonic()
        error, suspects = "", ()
        try:
            if told == "receive":
                group.begin_send(None, 8, 0)()
            else:
                group.agree([1.0])
        except GangBroken as broken:
            error, suspects = str(broken), broken.suspects
        group.leave()
        pipe.send((error, suspects, time.monotonic() - began, dist.is_initialized()))


def test_a_member_that_is_stopped_or_killed_is_waited_for_by_nobody() -> None:
    """In the first step, with a third member that computes for long: the others suspected it, too, after they had
    waited for it. One that left a group waited for the timeout of an operation that a stopped member did not end, up to
    120 s, and the rest waited for that one. One that received weights of a third member did not notice a kill, and one
    that was stopped for a while waited for the others that had left."""
    with processes(3) as pool:
        for number, word in ((signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "has ended")):
            pool.meet([0, 1, 2])
            os.kill(pool.each[1].pid, number)
            for place, wish in ((2, "receive"), (0, "agree")):
                pool.ends[place].send(wish)
                error, suspects, seconds, is_grouped = pool.answer(place)
                expected = f"gpu-1 (rank 1) does not take part any more: its process {word}"
                assert error.startswith(expected), error
                assert suspects == (1,)
                assert seconds < FIRST_SECONDS / 4, "as after the timeout"
                assert not is_grouped
            pool.meet([2, 0])
            for place in (0, 2):
                pool.ends[place].send("agree")
            assert [pool.answer(place)[0] for place in (0, 2)] == ["", ""]
            if number == signal.SIGSTOP:
                os.kill(pool.each[1].pid, signal.SIGCONT)
                pool.ends[1].send("agree")
                error, suspects, seconds, _ = pool.answer(1)
                assert error.startswith("gpu-1 (rank 1) does not take part any more"), "it is told that it was stopped"
                assert suspects == ()
                assert seconds < FIRST_SECONDS / 4
