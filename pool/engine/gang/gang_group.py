"""`GangGroup`: the process group of a gang. Members meet, agree after each step, exchange tensors and leave.

Every failure of another member is a `GangBroken` with the members that are suspected: members that have left, or with
a process that has ended or is stopped; else those that said nothing at the store of the leader within `SEEN_SECONDS`. A
member that ends for a reason of its own says so first.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from modelpool.pool.devices.copy_streams import StreamMaker, cuda_streams
from modelpool.pool.devices.torch_api.process_groups import (
    PrefixStore,
    abandon_group,
    backend_for,
    finished_within,
    set_timeout,
)
from modelpool.pool.devices.torch_modules import gpu_place
from modelpool.pool.engine.gang.gang_layout import GangLayout
from modelpool.pool.engine.gang.meeting_store import announce, announced, reach_store
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.gang_errors import GangBroken
from modelpool.pool.values.core.process_identity import has_ended, is_stopped, process_start
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId

#: limit of the wait for other members that have not said that they come: they may still end their last run
MEET_SECONDS = 120.0
#: limit of the wait for those that have: they load weights, perhaps from a slow disk or over a network
LOADING_SECONDS = 1800.0
#: limit of forming the group when all have come, which takes 0.03 to 0.8 s: nothing looks for members that stop then
FORMING_SECONDS = 20.0
#: limit of an operation before the first step was measured: weights may stream from a disk
FIRST_SECONDS = 120.0
#: least limit of an operation afterwards
LEAST_SECONDS = 2.0
#: an operation may take this many times as long as the longest step so far
STEP_FACTOR = 2.0
#: after a failure, members say within this time that they are there
SEEN_SECONDS = 0.6
#: an operation that takes longer looks for members that are stopped, so often
LOOK_SECONDS = 0.05
#: a member that was stopped in all looks of so long takes no part any more
STOPPED_SECONDS = 0.1
_POLL_SECONDS = 0.01
#: between two looks at a device that computes, and at members that may have left meanwhile
_DEVICE_POLL_SECONDS, _DEVICE_LOOK_SECONDS = 0.0005, 0.25
#: between two questions to the store, in an operation, whether members have left
_STORE_LOOK_SECONDS = 0.25

#: before the cause in an error of NCCL
_LAST_ERROR = "Last error:"
_SHORT_LENGTH = 200

#: what has become of the process of a member
_ENDED, _STOPPED = "its process has ended", "its process is stopped"
_HERE, _LEFT, _SEEN, _BROKEN = "here", "left", "seen", "broken"
#: what torch raises when a member or a store does not answer
FAILURES = (RuntimeError, dist.DistError)
_T = TypeVar("_T")


class _Facts(NamedTuple):
    """What a member says when it comes: its process, the token of a group that it would lead, and of what it has kept;
    "" for nothing."""

    pid: int
    start: str
    token: str
    kept: str


@dataclass(frozen=True, slots=True, eq=False)
class FormedGroup:
    """The process groups of torch among the members of a gang, which outlive the run that formed them.

    token  differs between all groups that were formed; equal on all members
    """

    token: str
    members: tuple[WorkerId, ...]
    rank: int
    layout: GangLayout
    hosts: dist.ProcessGroup | None
    branch: dist.ProcessGroup | None
    part: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None

    def is_for(self, gang: Gang, layout: GangLayout) -> bool:
        """Whether the members of `gang` could use it, in these places."""
        return (self.members, self.rank, self.layout) == (gang.members, gang.rank, layout)


class GangGroup:
    """One member's end of the group of a gang, for one run. Used in the thread of the run."""

    def __init__(
        self, gang: Gang, layout: GangLayout, device: torch.device, streams: StreamMaker | None = None
    ) -> None:
        """`streams`: of the device; None: CUDA's, if it is one."""
        self.gang, self.layout, self.device = gang, layout, device
        self._streams = cuda_streams(device) if streams is None and device.type == "cuda" else streams
        #: limit of an operation that begins now
        self._limit_seconds = FIRST_SECONDS
        self._store: PrefixStore | None = None
        #: all members, on their hosts: what they agree about never waits for a device
        self._hosts: dist.ProcessGroup | None = None
        self._branch: dist.ProcessGroup | None = None
        self._part: dist.ProcessGroup | None = None
        #: process of each other member that is found by it, and its start
        self._processes: dict[int, tuple[int, str]] = {}
        #: all members, on their devices
        self._everyone: dist.ProcessGroup | None = None
        #: of the group, once it is formed
        self._token = ""
        #: whether torch's default group is of this run, or kept for it
        self._owns = False
        #: operations among hosts that were begun and have not ended
        self._pending: list[dist.Work] = []
        #: copied to the device because tensors go over the host
        self.staged_bytes = 0
        #: whether tensors go over the host: gloo computes there only
        self._stages = device.type not in ("cpu", "cuda")

    def meet(
        self, should_stop: Callable[[], bool], seconds: float = MEET_SECONDS, kept: FormedGroup | None = None
    ) -> bool:
        """Meet the other members and form the group, or use the one that all of them have kept: `kept` is this one's,
        which is left otherwise. Returns False if `should_stop` says so before; raises GangBroken if some do not come
        within `seconds`, or LOADING_SECONDS if they said that they come (`announced`), UnusableField if two have parts
        of one GPU."""
        gang = self.gang
        ranks = range(gang.degree)
        self._owns = kept is not None
        with self._failing_as_broken():
            own = "" if kept is None or not kept.is_for(gang, self.layout) else kept.token
            facts = _Facts(os.getpid(), process_start(os.getpid()), f"{os.getpid()} {time.time_ns()}", own)
            self._store = reach_store(gang)
            self._store.set(f"{_HERE}/{gang.rank}", json.dumps(facts))
            began, coming = time.monotonic(), set[int]()
            while missing := [rank for rank in ranks if not self._store.check([f"{_HERE}/{rank}"])]:
                if should_stop():
                    return False
                self._raise_if_left()
                self._note_coming(self._store, coming)
                waited_seconds = time.monotonic() - began
                if late := [r for r in missing if waited_seconds > (LOADING_SECONDS if r in coming else seconds)]:
                    names = ", ".join(gang.members[rank] for rank in late)
                    raise GangBroken(f"{names} did not come within {waited_seconds:.0f} s", tuple(late))
                time.sleep(_POLL_SECONDS)
            each = [_Facts(*json.loads(self._store.get(f"{_HERE}/{rank}"))) for rank in ranks]
            for rank, other in enumerate(each):
                if rank != gang.rank and process_start(other.pid) == other.start:  # else ids of its container, perhaps
                    self._processes[rank] = other.pid, other.start
            is_kept = kept is not None and own != "" and all(other.kept == own for other in each)
            if kept is not None and is_kept:
                self._hosts, self._branch, self._part = kept.hosts, kept.branch, kept.part
                self._everyone, self._token = kept.everyone, kept.token
            else:
                if kept is not None:
                    abandon_group()
                self._form()
                self._token = each[0].token
            self._limit(FIRST_SECONDS)
        if not is_kept:
            self._expect_own_gpus()
        self._connect()
        return True

    def _note_coming(self, store: PrefixStore, coming: set[int]) -> None:
        """Add the members that have said that they come; raise GangBroken if the process of one has ended."""
        for rank in range(self.gang.degree):
            if rank not in coming and rank != self.gang.rank and (notice := announced(store, rank)):
                coming.add(rank)
                pid, start = json.loads(notice)
                if process_start(pid) == start:  # of this machine
                    self._processes[rank] = pid, start
        if ended := tuple(rank for rank, why in self._absent().items() if why is _ENDED):
            names = ", ".join(f"{self.gang.members[rank]} (rank {rank})" for rank in ended)
            raise self._told(GangBroken(f"{names} does not take part: {_ENDED}", ended))

    def _form(self) -> None:
        """Form the group; all members have come."""
        gang, limit = self.gang, datetime.timedelta(seconds=FORMING_SECONDS)
        self._owns = True
        dist.init_process_group(
            backend_for(self.device), store=self._store, rank=gang.rank, world_size=gang.degree, timeout=limit
        )
        self._hosts = dist.new_group(backend="gloo", timeout=limit)
        for members in self.layout.branch_ranks():  # every member makes every group
            group = dist.new_group(members, timeout=limit) if len(members) > 1 else None
            self._branch = group if gang.rank in members else self._branch
        for members in self.layout.part_ranks():
            group = dist.new_group(members, timeout=limit) if len(members) > 1 else None
            self._part = group if gang.rank in members else self._part
        alike = self._branch if self.layout.branches == 1 else self._part if self.layout.parts == 1 else None
        self._everyone = alike or dist.group.WORLD

    def give(self) -> FormedGroup | None:
        """Return the process groups to keep, after a run that has ended well on all members; this group has left then.
        None if something is still exchanged: leave it."""
        if self._pending or not self._token:
            return None
        formed = FormedGroup(
            self._token, self.gang.members, self.gang.rank, self.layout,
            self._hosts, self._branch, self._part, self._everyone,
        )  # fmt: skip
        self._forget()
        return formed

    def _expect_own_gpus(self) -> None:
        """Raise UnusableField if two members have parts of one GPU: NCCL does not connect these, and says so only with
        a number."""
        if self.device.type != "cuda":
            return
        known: dict[str, WorkerId] = {}
        for name, place in zip(self.gang.members, self.tell(gpu_place(self.device)), strict=True):
            if place and place in known:
                obstacle = f"{known[place]} and {name} are parts of one GPU, which exchange no tensors"
                raise unusable_field("gpus", self.gang.degree, f"fewer: {obstacle}")
            known[place] = name

    def _connect(self) -> None:
        """Exchange a number, so that the connections between the GPUs, and their memory, are there before the first
        step. All members are here now. A member that ends before its first exchange would leave the others in a call of
        NCCL that nothing ends."""
        number = torch.zeros(1, device=self.device)
        self.among_parts(number)
        self.among_branches(number)
        self.await_device()

    def connect_everyone(self) -> None:
        """Exchange a number among all members, so that the GPUs of those which exchange nothing else are connected
        before the first step. All members call it. Raises GangBroken."""
        own = torch.zeros(1, dtype=torch.uint8, device=self.device) if self.gang.leads else None
        self.begin_send(own, 1, 0)()
        self.await_device()

    @staticmethod
    def announce(gang: Gang) -> None:
        """Tell the other members that this one comes to the next run of the gang, when it has loaded its weights. Never
        raises."""
        facts = json.dumps([os.getpid(), process_start(os.getpid())])
        _within(lambda: announce(gang, facts, SEEN_SECONDS), SEEN_SECONDS)

    @staticmethod
    def decline(gang: Gang, reason: str) -> None:
        """Tell the other members that this one does not come to the next run of the gang. Never raises."""
        _within(lambda: reach_store(gang, SEEN_SECONDS).set(f"{_LEFT}/{gang.rank}", reason), 2 * SEEN_SECONDS)

    def leave(self, reason: str = "") -> None:
        """Leave the group, whatever the others do; `reason` is why it ends for this member, empty if it is over.
        Idempotent, never raises."""
        if reason and self._store is not None:
            store = self._store
            _within(lambda: store.set(f"{_LEFT}/{self.gang.rank}", reason), SEEN_SECONDS)
        pending, self._pending = self._pending, []
        if self._owns:
            with suppress(*FAILURES):
                abandon_group(pending)
        self._forget()

    def _forget(self) -> None:
        self._store = self._hosts = self._branch = self._part = self._everyone = None
        self._token, self._owns = "", False

    def await_device(self) -> None:
        """Wait until the device has computed all that this thread has begun, at most as long as an operation may take.

        Before members agree, leave, or read a latent: exchanges between GPUs are part of the device's work, and never
        end if another member does not take part. A thread that waited in the driver could not be woken, and one that
        left would take away memory from which slower members still read. Raises GangBroken.
        """
        if self._streams is None:
            return
        mark = self._streams.new_event()
        mark.record(self._streams.current())
        began = looked_at = time.monotonic()
        stopped: dict[int, float] = {}
        while not mark.query():
            now = time.monotonic()
            if now - looked_at >= _DEVICE_LOOK_SECONDS:
                looked_at = now
                stopped = self._still_stopped(stopped)
                self._raise_if_left()
            if now - began > self._limit_seconds:
                raise self._broken(RuntimeError(f"no end of an exchange within {self._limit_seconds:.1f} s"))
            time.sleep(_DEVICE_POLL_SECONDS)

    def agree(self, numbers: Sequence[float]) -> Tensor:
        """Return the numbers of all members, float64 [members, numbers]. Raises GangBroken."""
        own = torch.tensor(list(numbers), dtype=torch.float64)
        return torch.stack(self._gathered(own, self.gang.degree, self._hosts))

    def tell(self, value: _T) -> list[_T]:
        """Return the values of all members, by rank. Raises GangBroken."""
        found: list[Any] = [None] * self.gang.degree
        with self._failing_as_broken():
            dist.all_gather_object(found, value, group=self._hosts)
        return found

    def allow(self, step_seconds: float) -> None:
        """Limit operations from now on by the longest step so far, of any member."""
        self._limit(max(LEAST_SECONDS, STEP_FACTOR * step_seconds))

    def _limit(self, seconds: float) -> None:
        self._limit_seconds = seconds
        for group in (self._hosts, self._branch, self._part, self._everyone):
            if group is not None:
                set_timeout(group, seconds)

    def among_branches(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of the members at this place of each group of texts, all of one shape. Raises
        GangBroken."""
        if self._part is None:
            return [own]
        return [self._received(each) for each in self._gathered(self._sent(own), self.layout.branches, self._part)]

    def among_parts(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of the members of this group of texts, all of one shape. Raises GangBroken."""
        if self._branch is None:
            return [own]
        return [self._received(each) for each in self._gathered(self._sent(own), self.layout.parts, self._branch)]

    def sum_of_parts(self, own: Tensor) -> Tensor:
        """Return the sum of the tensors of the members of this group of texts, equal on each of them, when the device
        has computed it: the host reads it, which would wait without end for a member that is gone. Raises GangBroken.
        """
        found = torch.stack(self.among_parts(own)).sum(0)
        self.await_device()
        return found

    def exchange(self, sent: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Send a tensor to each member of this group of texts; return what each sent here, flat, of `numbers` values.
        Raises GangBroken."""
        assert self._branch is not None, "tokens are exchanged among several"
        flat = self._sent(torch.cat([each.reshape(-1) for each in sent]))
        found = flat.new_empty(sum(numbers))
        lengths = [each.numel() for each in sent]
        with self._failing_as_broken():
            self._end(
                dist.all_to_all_single(found, flat, list(numbers), lengths, self._branch, flat.device.type == "cpu")
            )
        return list(self._received(found).split(list(numbers)))

    def _gathered(self, own: Tensor, count: int, group: dist.ProcessGroup | None) -> list[Tensor]:
        """The tensors of the `count` members of `group`."""
        found = [torch.empty_like(own) for _ in range(count)]
        with self._failing_as_broken():
            self._end(dist.all_gather(found, own, group, own.device.type == "cpu"))
        return found

    def _end(self, operation: dist.Work | None) -> None:
        """Wait for an operation among hosts; None is one that needs no wait. Raises GangBroken as soon as another
        member is found stopped, has ended or has left: it would not answer, and connections may stay."""
        if operation is None:
            return
        if operation not in self._pending:
            self._pending.append(operation)
        stopped: dict[int, float] = {}
        asked_at = time.monotonic()
        while not finished_within(operation, LOOK_SECONDS):
            stopped = self._still_stopped(stopped)
            if time.monotonic() - asked_at >= _STORE_LOOK_SECONDS:
                asked_at = time.monotonic()
                self._raise_if_left()
        self._pending.remove(operation)

    def _still_stopped(self, before: Mapping[int, float]) -> dict[int, float]:
        """Return the members that are stopped, and since which look; `before` is the result of the last one. Raises
        GangBroken if the process of one has ended, or was stopped for so long that it takes no part any more."""
        now, absent = time.monotonic(), self._absent()
        seen = {rank: before.get(rank, now) for rank, why in absent.items() if why is _STOPPED}
        if gone := tuple(rank for rank, why in absent.items() if why is _ENDED or now - seen[rank] >= STOPPED_SECONDS):
            named = "; ".join(
                f"{self.gang.members[rank]} (rank {rank}) does not take part any more: {absent[rank]}" for rank in gone
            )
            raise self._told(GangBroken(named, gone))
        return seen

    def begin_send(self, own: Tensor | None, size_bytes: int, owner: int) -> Callable[[], Tensor]:
        """Begin to send bytes of the member `owner`, which has them in `own`, to all members. The returned function
        waits for them and returns them, uint8 on the device: `own` on the owner. All members begin in the same order.
        Raises GangBroken."""
        if own is None:
            at = torch.device("cpu") if self._stages else self.device
            bytes_ = torch.empty(size_bytes, dtype=torch.uint8, device=at)
        else:
            bytes_ = self._sent(own)
        with self._failing_as_broken():
            work = dist.broadcast(bytes_, owner, group=self._everyone, async_op=True)
            if work is not None and bytes_.device.type == "cpu":
                self._pending.append(work)

        def end() -> Tensor:
            with self._failing_as_broken():
                if bytes_.device.type == "cpu":
                    self._end(work)
                else:
                    work.wait()
            return self._received(bytes_) if own is None else own

        return end

    def _sent(self, tensor: Tensor) -> Tensor:
        return (tensor.to("cpu") if self._stages else tensor).contiguous()

    def _received(self, tensor: Tensor) -> Tensor:
        if not self._stages:
            return tensor
        self.staged_bytes += tensor.nbytes
        return tensor.to(self.device)

    @contextmanager
    def _failing_as_broken(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as failed:
            raise self._broken(failed) from failed

    def _broken(self, failed: BaseException) -> GangBroken:
        """Return the error for a failed operation: who is suspected, and why."""
        absent = self._absent()
        if 0 in absent:  # nobody answers at its store
            found: dict[int, str] | None = absent
        else:
            found = _within(self._missing, 2 * SEEN_SECONDS)
        missing = {0: ""} if found is None else found
        if not missing:
            return self._told(GangBroken(f"a gang has ended: {_short(failed)}"))
        names = ", ".join(f"{self.gang.members[rank]} (rank {rank})" for rank in missing)
        why = "; ".join(filter(None, missing.values())) or _short(failed)
        return self._told(GangBroken(f"{names} does not take part any more: {why}", tuple(missing)))

    def _told(self, broken: GangBroken) -> GangBroken:
        """Tell the others, some of which may wait for members that leave now, or were stopped, that the run has ended;
        return the error."""
        store = self._store
        if store is not None and 0 not in broken.suspects:  # a store of an absent leader does not answer
            told = json.dumps([str(broken), broken.suspects])

            def tell() -> None:
                self._say_seen()
                store.set(_BROKEN, told)

            _within(tell, SEEN_SECONDS)
        return broken

    def _absent(self) -> dict[int, str]:
        """The other members with an ended or stopped process, as far as this machine tells."""
        found: dict[int, str] = {}
        for rank, known in self._processes.items():
            if has_ended(*known):
                found[rank] = _ENDED
            elif is_stopped(*known):
                found[rank] = _STOPPED
        return found

    def _missing(self) -> dict[int, str]:
        """Say that this member is there; return the members that are not, or have left, with their reasons, if known.
        Waits for members to say that they are there only while nothing else explains the failure."""
        if self._store is None:
            return {0: ""}
        store, ranks = self._store, range(self.gang.degree)
        self._say_seen()
        deadline = time.monotonic() + SEEN_SECONDS
        while True:
            left = [rank for rank in ranks if store.check([f"{_LEFT}/{rank}"])]
            reasons = {rank: store.get(f"{_LEFT}/{rank}").decode() for rank in left}
            known = self._absent() | reasons
            if not known and store.check([_BROKEN]):
                _, suspects = json.loads(store.get(_BROKEN))
                known = dict.fromkeys(suspects, "")
            unseen = {rank: "" for rank in ranks if rank not in known and not store.check([f"{_SEEN}/{rank}"])}
            if known or not unseen or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        found = known or unseen
        return {rank: found[rank] for rank in sorted(found) if rank != self.gang.rank}

    def _say_seen(self) -> None:
        if self._store is not None:
            self._store.set(f"{_SEEN}/{self.gang.rank}", "1")

    def _raise_if_left(self) -> None:
        """Raise GangBroken if a member has left already, or has told that the run has ended."""
        known = _within(self._left, 2 * SEEN_SECONDS)  # no answer: the store has ended, which operations notice
        left, told = known or ({}, "")
        if left:
            named = self.gang.members[next(iter(left))]
            raise GangBroken(
                f"{named} (rank {next(iter(left))}) does not take part: {'; '.join(left.values())}", tuple(left)
            )
        if told:
            message, suspects = json.loads(told)
            raise GangBroken(message, tuple(rank for rank in suspects if rank != self.gang.rank))

    def _left(self) -> tuple[dict[int, str], str]:
        """The members that have left, with their reasons, and what was told of the end of the run."""
        store = self._store
        assert store is not None, "members have met at the store"
        left = [rank for rank in range(self.gang.degree) if store.check([f"{_LEFT}/{rank}"])]
        told = store.get(_BROKEN).decode() if store.check([_BROKEN]) else ""
        return {rank: store.get(f"{_LEFT}/{rank}").decode() for rank in left}, told


def _short(failed: BaseException) -> str:
    """The first line of an error; of one of NCCL, the last thing that failed there, which is the cause."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    if not lines:
        return type(failed).__name__
    if _LAST_ERROR in lines[:-1]:
        return f"NCCL: {lines[lines.index(_LAST_ERROR) + 1]}"[:_SHORT_LENGTH]
    return lines[0][:_SHORT_LENGTH]


def _within(ask: Callable[[], _T], seconds: float) -> _T | None:
    """Return `ask()`, or None if it fails or takes longer: a store in a stopped process does not answer, and torch
    waits for it. Its thread ends with the connection then."""
    answer: list[_T] = []

    def answer_it() -> None:
        with suppress(*FAILURES):
            answer.append(ask())

    thread = threading.Thread(target=answer_it, name="gang store", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None
