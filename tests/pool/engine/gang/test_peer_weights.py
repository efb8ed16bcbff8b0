"""A model that is larger than the memory of each of its workers, which hold parts of it for each other.

Proves: nothing is read from the host in a step where both hold half, with the bytes of a gang that streams from the
host, with guidance, with divided tokens, and with a LoRA; memory after the run is as without a share; a member that
ends in the middle of an exchange ends the run of the other one in time, and nothing stays allocated.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.engine.gang import peer_weights as peer_weights_module
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.gang_layout import GangLayout
from modelpool.pool.engine.gang.peer_weights import PeerWeights, _link_among, _Module, _placed, _Told, peer_weights
from modelpool.pool.values.core.gang_errors import GangsDiffer
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.plan.peer_shares import ALIGNED_BYTES, PeerLink, ShareOffer
from modelpool.pool.weights.vram.gang_share import MOST_LINKS, GangShare, MeasuredLink
from tests.pool.engine.gang.gang_threads import WAIT_SECONDS
from tests.pool.engine.gang.members import Members, Wish, members
from tests.pool.engine.gang.test_gang_runs import STEP_SECONDS, assert_shared
from tests.pool.families.tiny_relatives import ALL_FAMILIES

#: of the diffusion model, for the room that each worker has for weights
TIMES_TOO_LARGE = 1.6
#: faster than any host, so that the operator's word decides, and slower
FAST, SLOW = 1e15, 1.0


def test_members_hold_parts_of_a_model_for_each_other(tmp_path: Path) -> None:
    """With guidance and with divided tokens, and with a LoRA that each member computes for what it receives."""
    wishes = [Wish(None, texts=2), Wish(None, texts=1), Wish(None, texts=1, lora=True)]
    with large(tmp_path, SLOW) as pool:
        alone = [pool.alone(wish) for wish in wishes]
        streaming = [pool.sample(wish) for wish in wishes]
    with large(tmp_path, FAST) as pool:
        before = [pool.alone(wishes[0], place) for place in (0, 1)]
        shared = [pool.sample(wish) for wish in wishes]
        after = [pool.alone(wishes[0], place) for place in (0, 1)]
        weight_bytes = pool.each[0].tell("weight bytes")
    streamed_bytes = weight_bytes - alone[0].resident_bytes
    assert streamed_bytes > 0
    for wish, one, streamed, found in zip(wishes, alone, streaming, shared, strict=True):
        assert_shared(one, found, exact=wish.texts == 2)
        for each, other in zip(found, streamed, strict=True):
            np.testing.assert_array_equal(each.latent, other.latent)
            assert (other.cost.share_bytes, other.cost.exchanged_bytes) == (0, 0)
            assert each.cost.planned_bytes == other.cost.planned_bytes
            assert each.cost.peak_bytes <= each.cost.planned_bytes
            spared_bytes = other.cost.streamed_bytes - each.cost.streamed_bytes
            if wish.lora:  # factors of more layers come from the host
                assert 0.9 * wish.steps * streamed_bytes < spared_bytes <= wish.steps * streamed_bytes
            else:
                assert spared_bytes == wish.steps * streamed_bytes, "all weights that a step read from the host"
        held = [each.cost.share_bytes for each in found]
        assert max(held) < 1.2 * min(held), "each holds half"
        # of its share a member receives nothing, and of the rest all, in each step
        calls = wish.steps
        assert [each.cost.exchanged_bytes for each in found] == [calls * other for other in reversed(held)]
        assert sum(each.used_bytes - each.resident_bytes for each in found) == 0, "nothing stays but resident weights"
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.latent, other.latent)
        assert (one.resident_bytes, one.cost.streamed_bytes) == (other.resident_bytes, other.cost.streamed_bytes)


def test_three_and_four_members_hold_parts_of_a_model(tmp_path: Path) -> None:
    """Three that divide tokens, and four that divide texts and tokens: weights go to all of them, also to those which
    predict for another text and exchange nothing else."""
    cases = ((Wish(None, texts=1), [0, 1, 2]), (Wish(None, texts=2), [0, 1, 2, 3]))
    with large(tmp_path, SLOW, 4) as pool:
        alone = [pool.alone(wish) for wish, _ in cases]
        streaming = [pool.sample(wish, ranks) for wish, ranks in cases]
    with large(tmp_path, FAST, 4) as pool:
        shared = [pool.sample(wish, ranks) for wish, ranks in cases]
        weight_bytes = pool.each[0].tell("weight bytes")
    for (wish, _), one, streamed, found in zip(cases, alone, streaming, shared, strict=True):
        assert_shared(one, found)
        held = [each.cost.share_bytes for each in found]
        for each, other in zip(found, streamed, strict=True):
            np.testing.assert_array_equal(each.latent, other.latent)
            assert other.cost.share_bytes == 0
            assert each.cost.exchanged_bytes == wish.steps * (sum(held) - each.cost.share_bytes)
            spared_bytes = other.cost.streamed_bytes - each.cost.streamed_bytes
            assert spared_bytes == wish.steps * (weight_bytes - one.resident_bytes), "nothing comes from a host"
        assert min(held) > 0
        assert max(held) < 2 * min(held)
        assert sum(each.used_bytes - each.resident_bytes for each in found) == 0


def test_all_members_are_connected_before_weights_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of different texts exchange nothing but weights: NCCL connected them in the first step, in memory that
    nothing had been planned for and after a share had taken its own."""
    host = torch.ones(64, 64)
    model: Any = SimpleNamespace(
        resident_modules=dict, host_parameters={"layer.weight": host}, ahead_bytes=0, bring=torch.clone
    )
    module = nn.ModuleDict({"layer": nn.Linear(64, 64)})
    group = GangGroup(Gang("one", (WorkerId("gpu-0"),) * 4, 0), GangLayout(2, 2), torch.device("cpu"))
    did: list[str] = []
    monkeypatch.setattr(GangGroup, "tell", lambda group, value: [value] * 4)
    monkeypatch.setattr(GangGroup, "agree", lambda group, numbers: torch.tensor([list(numbers)] * 4))
    monkeypatch.setattr(
        GangGroup, "begin_send", lambda group, own, size, owner: did.append(f"{size} bytes") or (lambda: own)
    )
    monkeypatch.setattr(PeerWeights, "hold", lambda peers, bring: did.append("hold"))
    for speed, expected in ((FAST, ["1 bytes", "hold"]), (None, ["1 bytes"])):
        did.clear()
        share = GangShare(None if speed is None else PeerLink(speed))
        share.room_bytes = host.nbytes
        with compute(torch.device("cpu"), torch.float32), peer_weights(group, model, module, share, 1.0):
            assert did[: len(expected)] == expected


def test_a_member_ends_in_the_middle_of_an_exchange(tmp_path: Path) -> None:
    """Stopped and killed: the other one notices in time, keeps the state of the last step and nothing on its device but
    resident weights, and makes alone what it made before."""
    with large(tmp_path, FAST) as pool:
        before = pool.alone(Wish(None, texts=1))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            pool.begin(Wish(None, texts=1, steps=500, step_seconds=STEP_SECONDS / 20))
            time.sleep(2.0)
            pool.each[1].signal(number)
            began = time.monotonic()
            (broken,) = pool.answers([0])
            assert broken.error.startswith("GangBroken"), broken.error
            assert broken.suspects == (1,)
            assert time.monotonic() - began < 60.0, "as after the first timeout, which is for loading"
            assert 0 < broken.state.step < broken.state.steps
            assert 0 < broken.used_bytes == broken.resident_bytes
            after = pool.alone(Wish(None, texts=1))
            np.testing.assert_array_equal(after.latent, before.latent)
            assert after.resident_bytes == before.resident_bytes
            if number == signal.SIGSTOP:
                pool.each[1].signal(signal.SIGCONT)
                (continued,) = pool.answers([1])
                assert continued.error.startswith("GangBroken"), continued.error
                assert continued.used_bytes == continued.resident_bytes


def test_a_link_is_measured_and_a_run_with_shares_is_stopped(tmp_path: Path) -> None:
    """The first gang measures the link, in the memory of its run, and holds nothing. Members that are asked to stop end
    after the same step, and nothing stays."""
    with large(tmp_path, None) as pool:
        first = pool.sample(Wish(None, texts=1))
        assert not any(each.error for each in first), [each.error for each in first]
        assert [each.cost.exchanged_bytes for each in first] == [0, 0], "no link was known"
        ((link,), others) = (pool.each[place].tell("links") for place in (0, 1))
        assert others == [link]
        reported = [each.cost.gang_link_bytes_per_second for each in first]
        assert 0 < reported[0] == reported[1] < link.bytes_per_second, "with the latency of a module"
        again = pool.sample(Wish(None, texts=1))
        assert [each.cost.gang_link_bytes_per_second for each in again] == reported, "it is measured once"
        turned = pool.sample(Wish(None, texts=1), [1, 0])
        assert not any(each.error for each in turned), [each.error for each in turned]
        assert len(pool.each[0].tell("links")) == 2, "in this order they have not met"
    with large(tmp_path, FAST) as pool:
        stopping = Wish(None, texts=1, steps=500, step_seconds=STEP_SECONDS / 20)
        for place, gang in enumerate(pool.gangs()):
            pool.each[place].ask(replace(stopping, gang=gang, stops_after=2.0 if place else 0.0))
        for answer in pool.answers():
            assert answer.error.startswith("Stopped"), answer.error
            assert answer.used_bytes == answer.resident_bytes


def test_a_link_is_measured_again_when_a_member_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was measured in every run. Members compare the lives in which they measured: a worker under the name of an
    earlier one is another one, and one that knows nothing makes all measure."""
    measured: list[PeerLink] = []

    def measure(group: GangGroup, most_bytes: int) -> PeerLink:
        measured.append(PeerLink(float(most_bytes + len(measured))))
        return measured[-1]

    monkeypatch.setattr(peer_weights_module, "measured_link", measure)
    names = (WorkerId("gpu-0"), WorkerId("gpu-1"))
    group = GangGroup(Gang("g", names, 0), GangLayout(1, 2), torch.device("cpu"))
    offer = ShareOffer((("layer", 4096),), 1, 1.0)

    def meet(*shares: GangShare) -> PeerLink:
        told = [_Told(offer, each.stated, each.measured(names), each.life, 0) for each in shares]
        links = [_link_among(group, told, each) for each in shares[:1]]
        for each in shares[1:]:
            if measured and links[0] is measured[-1]:
                each.learn(names, MeasuredLink(links[0], tuple(share.life for share in shares)))
        return links[0]

    first, second, third = GangShare(), GangShare(), GangShare()
    assert [meet(first, second) for _ in range(3)] == measured[:1] * 3
    assert meet(first, third) == measured[1]
    assert meet(first, third) == measured[1]
    assert meet(first, second) == measured[2], "what the second one knows is about an earlier first meeting"
    assert len(measured) == 3
    assert meet(GangShare(PeerLink(7.0)), GangShare(PeerLink(5.0))) == PeerLink(5.0), "stated by the operator"
    for number in range(2 * MOST_LINKS):
        first.learn((WorkerId(f"other {number}"),), MeasuredLink(measured[0], ()))
    assert len(first._measured) == MOST_LINKS


class TalkingGroup(GangGroup):
    """The group of members that are threads of one process: what each sends is at its place in a list."""

    def __init__(self, rank: int, sent: list[dict[int, Future[Tensor]]], barrier: threading.Barrier) -> None:
        gang = Gang("threads", (WorkerId("gpu-0"), WorkerId("gpu-1")), rank)
        super().__init__(gang, GangLayout(1, 2), torch.device("cpu"))
        self.began: list[int] = []
        self._table, self._barrier = sent[0], barrier
        self._numbers = sent[-1]

    def begin_send(self, own: Tensor | None, size_bytes: int, owner: int) -> Callable[[], Tensor]:
        number = len(self.began)
        self.began.append(owner)
        answer = self._table.setdefault(number, Future())
        if own is not None:
            answer.set_result(own)
            return lambda: own
        return lambda: answer.result(timeout=WAIT_SECONDS).clone()

    def agree(self, numbers: Sequence[float]) -> Tensor:
        mine: Future[Tensor] = Future()
        mine.set_result(torch.tensor(list(numbers), dtype=torch.float64))
        self._numbers[self.gang.rank] = mine
        self._barrier.wait()
        found = torch.stack([self._numbers[rank].result() for rank in (0, 1)])
        self._barrier.wait()
        return found


def test_modules_are_sent_ahead_in_the_order_of_the_last_pass() -> None:
    """With memory for one module, all but the modules of the first pass are sent before they are used, and the same on
    both members; those that use modules in another order are told."""
    hosts = [[torch.full((3, 5), float(place)), torch.full((7,), place + 0.5)] for place in range(4)]
    sent: list[dict[int, Future[Tensor]]] = [{}, {}]
    barrier = threading.Barrier(2, timeout=WAIT_SECONDS)
    groups = [TalkingGroup(rank, sent, barrier) for rank in (0, 1)]
    wrong: list[str] = []
    counts: list[int] = []

    def member(rank: int) -> None:
        modules = [_Module(place, place % 2, *_placed(tensors)) for place, tensors in enumerate(hosts)]
        share = GangShare()
        peers = PeerWeights(groups[rank], modules, share, 2 * ALIGNED_BYTES)
        peers.hold(torch.clone)
        for _ in range(3):
            for tensors in hosts:
                wrong.extend(f"{host}" for host in tensors if not torch.equal(host, peers.get(host)))
        assert peers.get(torch.zeros(3, 5)) is None
        peers.expect_same_order()
        peers.close(is_over=True)
        wrong.extend(["something is held"] if peers.get(hosts[0][0]) is not None else [])
        ahead = len(groups[rank].began)
        unlike = PeerWeights(groups[rank], modules, share, 0)
        unlike.hold(torch.clone)
        unlike.get(hosts[0 if rank else 2][0])  # both are of the first member
        with pytest.raises(GangsDiffer, match="in different orders"):
            unlike.expect_same_order()
        unlike.close(is_over=False)
        counts.append(ahead)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(member, (0, 1)))
    assert not wrong, wrong
    assert counts == [13, 13], "three passes, and one module ahead"
    assert groups[0].began[:13] == groups[1].began[:13]


def large(folder: Path, peer_bytes_per_second: float | None, count: int = 2) -> AbstractContextManager[Members]:
    return members(
        count,
        folder,
        ALL_FAMILIES["qwen_image"],
        times_too_large=TIMES_TOO_LARGE,
        peer_bytes_per_second=peer_bytes_per_second,
    )
