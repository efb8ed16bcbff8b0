"""Several nodes that fetch one file: each byte comes from the source once, and every node ends with all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.files.fetch.chunk_plan import ChunkPlan
from modelpool.pool.files.fetch.fetch_progress import FetchProgress, new_progress

PATIENCE = 5.0
SIZE = 14 * (1 << 18)


@dataclass
class Node:
    """A node of the model: its plan, its complete chunks, and the chunks that it takes from the source."""

    plan: ChunkPlan
    done: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    from_peer: dict[int, str] = field(default_factory=dict)

    def progress(self) -> FetchProgress:
        fresh = new_progress(SIZE)
        return FetchProgress(SIZE, fresh.chunk_bytes, frozenset(self.done), frozenset(self.claimed))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.data())
def test_nodes_that_see_each_other_take_each_chunk_from_the_source_once(count: int, data: st.DataObject) -> None:
    nodes = [Node(ChunkPlan(new_progress(SIZE), start=i / count, patience_seconds=PATIENCE)) for i in range(count)]
    chunks = new_progress(SIZE).chunks
    taken: list[int] = []
    for _ in range(100 * chunks * count):
        unfinished = [i for i, node in enumerate(nodes) if len(node.done) < chunks]
        if not unfinished:
            break
        i = data.draw(st.sampled_from(unfinished))
        node = nodes[i]
        for j, other in enumerate(nodes):
            if j != i:
                node.plan.peer_is(str(j), other.progress(), at=0.0)
        busy = sorted(node.claimed | set(node.from_peer))
        if busy and data.draw(st.booleans()):
            chunk = busy[0]
            peer = node.from_peer.pop(chunk, None)
            node.claimed.discard(chunk)
            node.done.add(chunk)
            node.plan.done(chunk, 0.1, peer)
            continue
        found = node.plan.from_peer()
        if found is not None:
            assert found[1] in nodes[int(found[0])].done
            node.from_peer[found[1]] = found[0]
            continue
        chunk_or_none = node.plan.from_source(at=0.0)
        if chunk_or_none is not None:
            taken.append(chunk_or_none)
            node.claimed.add(chunk_or_none)
        elif busy:
            chunk = busy[0]
            peer = node.from_peer.pop(chunk, None)
            node.claimed.discard(chunk)
            node.done.add(chunk)
            node.plan.done(chunk, 0.1, peer)
    assert all(len(node.done) == chunks and node.plan.is_complete for node in nodes)
    assert sorted(taken) == list(range(chunks))


def test_a_claim_without_progress_is_waited_for_only_so_long() -> None:
    fresh = new_progress(SIZE)
    plan = ChunkPlan(fresh, patience_seconds=PATIENCE)
    stuck = FetchProgress(SIZE, fresh.chunk_bytes, frozenset(), frozenset(range(fresh.chunks)))
    plan.peer_is("stuck", stuck, at=10.0)
    assert plan.from_source(at=10.0) is None
    plan.peer_is("stuck", stuck, at=14.0)
    assert plan.from_source(at=10.0 + PATIENCE - 0.1) is None
    assert plan.from_source(at=10.0 + PATIENCE) == 0


def test_a_node_that_is_gone_is_not_waited_for() -> None:
    fresh = new_progress(SIZE)
    plan = ChunkPlan(fresh, patience_seconds=PATIENCE)
    plan.peer_is("a", FetchProgress(SIZE, fresh.chunk_bytes, frozenset(), frozenset(range(fresh.chunks))), at=0.0)
    plan.peer_gone("a")
    assert plan.from_source(at=0.0) == 0


def test_a_node_that_fails_is_not_asked_for_ever() -> None:
    fresh = new_progress(SIZE)
    plan = ChunkPlan(fresh)
    plan.peer_is("bad", FetchProgress(SIZE, fresh.chunk_bytes, frozenset(range(fresh.chunks))), at=0.0)
    assert plan.from_source(at=0.0) is None
    failures = 0
    while (found := plan.from_peer()) is not None:
        plan.failed(found[1], found[0])
        failures += 1
        assert failures < 100
    assert plan.from_source(at=0.0) is not None


def test_a_much_faster_source_is_preferred_to_a_slow_node() -> None:
    fresh = new_progress(SIZE)
    for peer_seconds, prefers_source in ((10.0, True), (0.1, False)):
        plan = ChunkPlan(fresh)
        chunk = plan.from_source(at=0.0)
        assert chunk is not None
        plan.done(chunk, 0.1)
        plan.peer_is("a", FetchProgress(SIZE, fresh.chunk_bytes, frozenset(range(fresh.chunks))), at=0.0)
        peer, other = plan.from_peer() or ("", -1)
        plan.done(other, peer_seconds, peer)
        assert (plan.from_source(at=0.0) is not None) == prefers_source, peer_seconds
        assert (plan.from_peer() is None) == prefers_source, peer_seconds


def test_resumed_chunks_are_not_fetched_again() -> None:
    fresh = new_progress(SIZE)
    plan = ChunkPlan(FetchProgress(SIZE, fresh.chunk_bytes, frozenset(range(10, fresh.chunks))), start=0.5)
    taken = []
    while (chunk := plan.from_source(at=0.0)) is not None:
        taken.append(chunk)
    assert sorted(taken) == list(range(10))


def test_nodes_do_not_follow_each_other_through_the_file() -> None:
    """What a node knows of the others is old: after meeting the range of another node it continues elsewhere.

    Found by a benchmark: two nodes that advanced side by side took each chunk from the source twice.
    """
    for others_start in (0.1, 0.5, 0.9):
        fresh = new_progress(64 << 20)
        nodes = [ChunkPlan(fresh, 0.3, is_alone=True), ChunkPlan(fresh, others_start)]
        done: list[set[int]] = [set(), set()]
        taken: list[int] = []
        rounds = 0
        while any(not plan.is_complete for plan in nodes):
            rounds += 1
            assert rounds < 10_000
            if rounds % 8 == 0:  # each asks the other only after it has taken some chunks
                for i, plan in enumerate(nodes):
                    other = frozenset(done[1 - i])
                    plan.peer_is("other", FetchProgress(fresh.size_bytes, fresh.chunk_bytes, other), at=0.0)
            for i, plan in enumerate(nodes):
                while (found := plan.from_peer()) is not None:
                    plan.done(found[1], 0.01, found[0])
                    done[i].add(found[1])
                chunk = plan.from_source(at=0.0)
                if chunk is not None:
                    taken.append(chunk)
                    plan.done(chunk, 0.01)
                    done[i].add(chunk)
        assert len(taken) < 1.15 * fresh.chunks, others_start
