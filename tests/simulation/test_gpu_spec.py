"""What a person writes for a cluster.

Proves: the file has the simulated values; machines hold as many GPUs as they are said to, of one kind; errors are told
with what was found and what was expected.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import GIB, DoesNotFit, UnknownName, UnusableField
from modelpool.scheduler.model.gpu_kinds import GPU_KINDS, GpuKind
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.gpu_spec import NodeShape, parse_gpus, require_fit, simulated_gpus
from modelpool.scheduler.simulator.workloads.models import InventedModel


def test_kinds_counts_and_memory() -> None:
    h100, small, own = parse_gpus("64xH100, 32x4090:12GiB,24GiB")
    kind = GPU_KINDS["H100"]
    assert (h100.count, h100.kind, h100.memory_bytes) == (64, "H100", kind.memory_bytes)
    assert (h100.link_bytes_per_second, h100.speed) == (kind.link_bytes_per_second, 1.0), "workloads are told for it"
    assert (small.count, small.memory_bytes) == (32, 12 * GIB)
    assert small.speed == GPU_KINDS["RTX4090"].speed / kind.speed < 1.0
    assert (own.count, own.kind, own.memory_bytes, own.speed) == (1, "24GiB", 24 * GIB, 1.0)
    assert [group.words for group in (h100, small, own)] == ["64xH100", "32xRTX4090:12GiB", "1x24GiB"]


def test_seconds_measured_on_another_kind() -> None:
    (l4,), (h100,) = parse_gpus("L4", "L4"), parse_gpus("H100", "l4")
    assert l4.speed == 1.0
    assert h100.speed > 3.0
    with pytest.raises(UnknownName, match="unknown kind of GPU in --measured-on 'abacus'"):
        parse_gpus("L4", "abacus")


@given(st.sampled_from(sorted(GPU_KINDS.values(), key=lambda kind: kind.name)), st.integers(1, 1000))
def test_every_kind_can_be_asked_for(kind: GpuKind, count: int) -> None:
    (group,) = parse_gpus(f"{count}x{kind.name}")
    assert (group.count, group.kind, group.memory_bytes) == (count, kind.name, kind.memory_bytes)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("4xH1000", UnknownName, r"unknown kind of GPU in --gpus 'H1000'; did you mean 'H100'\?"),
        ("4x24", UnknownName, "unknown kind of GPU in --gpus '24'"),
        ("", UnusableField, "--gpus: found '', expected GPUs such as"),
        ("H100,", UnusableField, "expected GPUs such as"),
        ("0xH100", UnusableField, "found '0xH100', expected 1 to 100000 GPUs"),
        ("999999xH100", UnusableField, "expected 1 to 100000 GPUs"),
        ("2xH100,3xh100", UnusableField, "expected each kind once"),
        ("4xL4:48GiB", UnusableField, r"found 'L4:48GiB', expected at most its memory, 24\.0 GiB"),
        ("9" * 5000 + "xH100", UnusableField, r"found '9{80}[.]{3}', expected 1 to 100000 GPUs"),
        ("1e3xH100", UnusableField, "found '1e3xH100', expected a whole number of GPUs before the x"),
        ("4xH100:1", UnusableField, r"found 'H100:1', expected at least 256.0 MiB of memory; a unit may be missing"),
        ("4x64MiB", UnusableField, "found '64MiB', expected at least 256.0 MiB"),
        ("4xL4:much", UnusableField, "found 'much', expected a positive number with a unit"),
        ("4x24GiB:12GiB", UnknownName, "unknown kind of GPU"),
    ],
)
def test_what_is_wrong_is_told(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        parse_gpus(text)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_machines_hold_gpus_of_one_kind(first: int, second: int, per_node: int) -> None:
    groups = parse_gpus(f"{first}xA10,{second}xL4")
    gpus, nodes = simulated_gpus(groups, NodeShape(per_node, 64 * GIB, 1e9))
    assert [gpu.kind for gpu in gpus] == ["A10"] * first + ["L4"] * second
    assert len({gpu.worker_id for gpu in gpus}) == first + second
    on = Counter(gpu.node for gpu in gpus)
    if per_node == 0:
        assert (nodes, set(on)) == ((), {""})
        return
    assert set(on) == {node.node for node in nodes}
    assert max(on.values()) <= per_node
    assert len(nodes) == -(-first // per_node) - (-second // per_node)
    assert len({(gpu.node, gpu.kind) for gpu in gpus}) == len(nodes)


def test_a_job_that_no_gpu_can_run_is_named() -> None:
    model = InventedModel("m", activation_bytes=8 * GIB)
    jobs = [Submitted(0.0, model.job("image-7", "p", 1))]
    large, _ = simulated_gpus(parse_gpus("6GiB,24GiB"), NodeShape())
    require_fit(jobs, large)
    with pytest.raises(DoesNotFit, match=r"image-7 \(sample\) needs at least 8\.2 GiB .* the budget is 6\.0 GiB"):
        require_fit(jobs, large[:1])
