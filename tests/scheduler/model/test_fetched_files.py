"""Disks of machines as the core assumes them: bounds, holders and prices of the tiers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    FileOnDisk,
    NodeId,
    Role,
    RunCost,
    WorkerId,
    WorkerSpec,
)
from modelpool.scheduler.model.fetched_files import PEER_BYTES_PER_SECOND, SOURCE_BYTES_PER_SECOND, FetchedFiles

GB = 10**9


def component(number: int, fetch: str = "") -> ComponentSpec:
    return ComponentSpec(ComponentKey(f"c{number}"), Role.VAE, GB, GB, fetch or f"f{number}", 2 * GB)


def worker(node: int, cache_bytes: int = 0, cached: tuple[FileOnDisk, ...] = ()) -> WorkerSpec:
    return WorkerSpec(
        WorkerId(f"w{node}"), 1, 10 * GB, 1e10, node=NodeId(f"n{node}"), cache_bytes=cache_bytes, cached_files=cached
    )


def reads(*numbers: int) -> tuple[tuple[ComponentKey, int], ...]:
    return tuple((ComponentKey(f"c{number}"), GB) for number in numbers)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from("efg")), max_size=40))
def test_bounds_and_holders_are_consistent_after_any_steps(steps: list[tuple[int, int, str]]) -> None:
    """e: a run starts; f: it fails; g: the machine is gone."""
    files = FetchedFiles()
    files.know(component(number) for number in range(6))
    limit = 5 * GB
    for node, number, step in steps:
        spec = worker(node, limit)
        if step == "e":
            before = files.missing(spec, reads(number))
            assert bool(files.expect(spec, reads(number))) == (sum(before) > 0)
            assert files.missing(spec, reads(number)) == (0, 0)
        elif step == "f":
            files.forget(spec, reads(number))
            assert sum(files.missing(spec, reads(number))) == 2 * GB
        else:
            files.node_gone(spec.node)
        for node_id, disk in files.disks.items():
            assert disk.used_bytes == sum(disk.files.values()) <= limit
            assert all(node_id in files.holders[key] for key in disk.files)
        held = [(key, node_id) for key, nodes in files.holders.items() for node_id in nodes]
        assert sorted(held) == sorted((key, node_id) for node_id, disk in files.disks.items() for key in disk.files)


def test_the_disk_costs_nothing_a_peer_less_than_the_source() -> None:
    files = FetchedFiles()
    files.know([component(1), component(2)])
    here, there = worker(0), worker(1)
    assert files.seconds(here, reads(1)) == 2 * GB / SOURCE_BYTES_PER_SECOND
    files.expect(here, reads(1))
    assert files.seconds(here, reads(1)) == 0
    assert files.seconds(there, reads(1)) == 2 * GB / PEER_BYTES_PER_SECOND
    assert files.seconds(there, reads(1, 2)) == 2 * GB / PEER_BYTES_PER_SECOND + 2 * GB / SOURCE_BYTES_PER_SECOND
    files.node_gone(here.node)
    assert files.seconds(there, reads(1)) == 2 * GB / SOURCE_BYTES_PER_SECOND


def test_components_of_one_file_fetch_it_once() -> None:
    files = FetchedFiles()
    files.know([component(1, "one"), component(2, "one")])
    assert files.missing(worker(0), reads(1, 2)) == (2 * GB, 0)
    files.expect(worker(0), reads(1))
    assert files.missing(worker(0), reads(2)) == (0, 0)


def test_local_components_are_never_fetched() -> None:
    files = FetchedFiles()
    files.know([ComponentSpec(ComponentKey("c1"), Role.VAE, GB, GB)])
    assert not files.sets
    assert files.seconds(worker(0), reads(1)) == 0
    assert not files.expect(worker(0), reads(1))
    assert not files.disks


def test_what_was_on_the_disk_when_a_worker_started_is_known() -> None:
    files = FetchedFiles()
    files.know([component(1), component(2)])
    warm = worker(0, cached=(FileOnDisk("f1", 2 * GB),))
    assert files.missing(warm, reads(1, 2)) == (2 * GB, 0)
    assert files.missing(worker(1), reads(1)) == (0, 2 * GB)


def test_measured_speeds_replace_the_assumptions() -> None:
    files = FetchedFiles()
    files.know([component(1)])
    here = worker(0)
    for cost, tier in (
        (RunCost(fetched_bytes=GB, fetch_seconds=10.0), "source_bytes_per_second"),
        (RunCost(peer_bytes=GB, fetch_seconds=2.0), "peer_bytes_per_second"),
    ):
        for _ in range(7):
            files.learn(here, cost)
        assert getattr(files.disk_of(here), tier) == (cost.fetched_bytes + cost.peer_bytes) / cost.fetch_seconds
    before = files.disk_of(here).source_bytes_per_second
    for odd in (
        RunCost(fetched_bytes=10, fetch_seconds=1.0),
        RunCost(fetched_bytes=GB, peer_bytes=GB, fetch_seconds=9.0),
        RunCost(fetched_bytes=GB),
    ):
        assert not files.learn(here, odd), odd
    assert files.disk_of(here).source_bytes_per_second == before
    # other machines are not slow because this one is
    assert files.disk_of(worker(1)).source_bytes_per_second == SOURCE_BYTES_PER_SECOND


def test_a_slow_machine_is_not_preferred_to_the_source() -> None:
    files = FetchedFiles()
    files.know([component(1)])
    here, there = worker(0), worker(1)
    files.expect(there, reads(1))
    for _ in range(7):
        files.learn(here, RunCost(peer_bytes=GB, fetch_seconds=1000.0))
    assert files.missing(here, reads(1)) == (2 * GB, 0)
