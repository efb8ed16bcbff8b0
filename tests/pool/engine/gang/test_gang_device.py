"""What a member of a gang does with a device that computes while the host is ahead of it, as CUDA does.

Proves: members agree, and leave, when their device has finished, and say how long that took; a wait for the device ends
if another member does not take part; the memory of communicators is planned with.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from modelpool.pool.devices.copy_streams import StreamMaker
from modelpool.pool.devices.device_kinds import SimMemory
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.torch_modules import gpu_place
from modelpool.pool.devices.workspaces import communicator_bytes
from modelpool.pool.engine import engine as engine_module
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.engine.gang import gang_group, gang_run
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.gang_layout import layout_of
from modelpool.pool.engine.gang.gang_run import _SharedRun
from modelpool.pool.engine.gang.token_exchange import TokenExchange, TokenShares
from modelpool.pool.engine.task_runner import TaskRun, TaskRunner
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.gang_errors import GangBroken
from modelpool.pool.values.core.stage_params import RunHooks
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId
from tests.pool.devices.fake_streams import FakeEvent, Trace
from tests.pool.families.tiny_relatives import ALL_FAMILIES
from tests.pool.families.whole_transformer import Whole

MIB = 1 << 20
GANG = Gang("gang", (WorkerId("gpu-0"), WorkerId("gpu-1")), 0, "127.0.0.1:1")
STEP_SECONDS = 0.2
NCCL_ERROR = """NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.27.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888), error: No space left on device (28)
"""


class SlowEvent(FakeEvent):
    """Happens `STEP_SECONDS` after it was recorded."""

    def record(self, stream: object) -> None:
        self.ends_at = time.monotonic() + STEP_SECONDS

    def query(self) -> bool:
        return time.monotonic() >= self.ends_at


class EndlessEvent(SlowEvent):
    """Never happens: another member does not take part."""

    def query(self) -> bool:
        return False


def group_with(event: type[FakeEvent]) -> GangGroup:
    maker: StreamMaker = replace(Trace().maker, new_event=event)
    group = GangGroup(GANG, layout_of(2, 1), torch.device("cpu"), maker)
    group._store = PrefixStore("run", HashStore())
    return group


def test_members_agree_when_their_devices_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: they agreed on steps that their devices had not computed, and left while others still read
    from them; and the limit of an operation was by the time in which a step is launched."""
    told: list[tuple[float, ...]] = []
    began = time.monotonic()
    monkeypatch.setattr(
        GangGroup, "agree", lambda group, numbers: told.append((time.monotonic(), *numbers)) or torch.zeros(2, 3)
    )
    run = _SharedRun(GANG, 1, RunHooks(lambda done, steps: None, lambda: False), lambda seconds: None)
    run._group, run._begun = group_with(SlowEvent), began
    run.hooks.on_step(1, 3)
    ((at, _, _, seconds),) = told
    assert at - began >= STEP_SECONDS
    assert seconds >= STEP_SECONDS, "the time of a step is the device's"


def test_a_wait_for_the_device_ends_without_the_other_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: a member waited in the driver for an exchange with one that was killed, without end."""
    monkeypatch.setattr(gang_group, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(gang_group, "SEEN_SECONDS", 0.1)
    silent = group_with(EndlessEvent)
    silent.allow(0.1)
    with pytest.raises(
        GangBroken, match=r"gpu-1 \(rank 1\) does not take part any more: no end of an exchange"
    ) as found:
        silent.await_device()
    assert found.value.suspects == (1,)

    left = group_with(EndlessEvent)  # its first step, in which all may take long
    left._store.set("left/1", "OutOfMemoryError: it had no memory")
    began = time.monotonic()
    with pytest.raises(GangBroken, match=r"gpu-1 .rank 1. does not take part: OutOfMemoryError"):
        left.await_device()
    assert time.monotonic() - began < gang_group.FIRST_SECONDS / 4, "not as after the timeout"


def test_a_sum_that_the_host_reads_is_waited_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: caches read the change of the latent in the middle of a step, without end if a member of those
    that sum it was gone."""
    monkeypatch.setattr(gang_group, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(gang_group, "SEEN_SECONDS", 0.1)
    silent = group_with(EndlessEvent)
    silent.allow(0.1)
    with pytest.raises(GangBroken, match="no end of an exchange"):
        silent.sum_of_parts(torch.ones(2))
    assert group_with(SlowEvent).sum_of_parts(torch.ones(2)).tolist() == [1.0, 1.0]


def test_lengths_that_the_host_reads_are_waited_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: a module that leaves tokens out, as in Mochi, reads how many each member has."""
    monkeypatch.setattr(gang_group, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(gang_group, "SEEN_SECONDS", 0.1)
    silent = group_with(EndlessEvent)
    silent.allow(0.1)
    for group, ends in ((silent, False), (group_with(SlowEvent), True)):
        exchange = TokenExchange(group, TokenShares(1, {}), None)
        exchange.leaves_out = True
        if ends:
            assert exchange._lengths(("text",), 3) == [3]
        else:
            with pytest.raises(GangBroken, match="no end of an exchange"):
                exchange._lengths(("text",), 3)


def test_a_step_with_more_calls_than_those_before_is_allowed_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: an option that begins in a later step adds calls of the model, and the others took a member
    for gone after twice the time of a step without them."""
    allowed: list[float] = []
    monkeypatch.setattr(GangGroup, "agree", lambda group, numbers: torch.tensor([[0.0, 0.0, 3.0]]))
    monkeypatch.setattr(GangGroup, "allow", lambda group, seconds: allowed.append(seconds))
    monkeypatch.setattr(gang_run, "gang_obstacle", lambda *asked: "")
    hooks = RunHooks(lambda done, steps: None, lambda: False)
    for extra in (0, 2):
        shared = _SharedRun(GANG, 2, hooks, lambda seconds: None)
        work = SimpleNamespace(options=SimpleNamespace(extra_predictions=extra), texts=2)
        run: Any = SimpleNamespace(facts=None, work=work)
        shared.part(run)
        shared._group = group_with(SlowEvent)
        shared.hooks.on_step(1, 3)
    assert allowed == [3.0, 9.0], "two more calls beside the one of each member"


def test_a_failure_of_nccl_names_its_cause() -> None:
    """Found in a review: the first line has a place in torch's source; what failed, such as shared memory of 64 MiB in
    a container, is in the last one."""
    group = group_with(SlowEvent)
    group._store.set("seen/1", "1")
    with pytest.raises(GangBroken, match=r"ended: NCCL: Error while .* No space left"), group._failing_as_broken():
        raise RuntimeError(NCCL_ERROR)


def test_instances_of_one_card_share_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: NCCL refuses them, as an error with a text that names no GPU, and the run was tried again."""
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=129, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    group, told = group_with(SlowEvent), list[str]()
    monkeypatch.setattr(GangGroup, "tell", lambda group, place: [place, *told])
    group.device = torch.device("cuda", 0)
    told.append(gpu_place(group.device))
    with pytest.raises(UnusableField, match="gpu-0 and gpu-1 are parts of one GPU"):
        group._expect_own_gpus()
    told[0] = "another machine [0, 129, 0]"
    group._expect_own_gpus()
    del facts.pci_bus_id  # torch does not tell
    told[0] = ""
    group._expect_own_gpus()


def test_memory_of_communicators_is_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: plans gave all memory to weights, and torch keeps what it has taken: NCCL had the reserve of
    400 MiB for its buffers."""
    planned: list[int] = []
    run = TaskRunner.run

    def noted(runner: TaskRunner, task_run: TaskRun[Any]) -> Any:
        result, cost = run(runner, task_run)
        planned.append(cost.planned_bytes)
        return result, cost

    monkeypatch.setattr(TaskRunner, "run", noted)
    monkeypatch.setattr(engine_module, "communicator_bytes", lambda kind, sizes: 8 * MIB)
    monkeypatch.setattr(
        gang_run, "sample_in_gang", lambda gang, texts, alone, hooks, met, *share: alone(hooks, lambda run: None)
    )
    monkeypatch.setattr(SimMemory, "cached_bytes", lambda memory: memory.free_bytes())
    released: list[bool] = []
    monkeypatch.setattr(SimMemory, "release_cached", lambda memory: released.append(True))
    whole = Whole(tmp_path, ALL_FAMILIES["flux_dev"], settings=EngineSettings("sim", budget_bytes=64 * MIB))
    try:
        texts = whole.texts()
        whole.latent(texts)
        released.clear()
        whole.gang = GANG
        whole.latent(texts)
        assert planned[-1] == planned[-2] + 8 * MIB
        assert released == [True], "what torch holds unused is no memory for NCCL"
        monkeypatch.setattr(engine_module, "communicator_bytes", lambda kind, sizes: 80 * MIB)
        whole.latent(texts)  # no assumption about NCCL makes a run not fit
        whole.gang, dropped = None, list[int]()
        kept: Any = SimpleNamespace(sizes=(2, 2), drop=lambda: dropped.append(1), drop_others=lambda *other: None)
        whole.engine._kept_group = kept
        whole.latent(texts)
        assert dropped == [1], "a run alone may need the memory of a group that is kept"
        monkeypatch.setattr(engine_module, "communicator_bytes", lambda kind, sizes: MIB)
        whole.latent(texts)
        assert dropped == [1], "there is enough for both"
    finally:
        whole.engine.close()

    texts_and_tokens, tokens = layout_of(8, 2).group_sizes, layout_of(8, 1).group_sizes
    assert (texts_and_tokens, tokens) == ((4, 2), (8, 1))
    alone = {size: communicator_bytes(DeviceKind.CUDA, (size,)) for size in (1, 2, 4, 8)}
    assert 0 == alone[1] < alone[2] < alone[4] < alone[8]
    assert communicator_bytes(DeviceKind.CUDA, texts_and_tokens) == alone[2] + alone[4], "two groups have two"
    assert communicator_bytes(DeviceKind.SIM, tokens) == communicator_bytes(DeviceKind.CUDA, (1, 1)) == 0
