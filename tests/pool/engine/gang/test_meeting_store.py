"""The store at which members of gangs meet."""

from __future__ import annotations

import pytest

from modelpool.pool.engine.gang import meeting_store
from modelpool.pool.engine.gang.meeting_store import open_store, reach_store
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId

#: each gang opens two connections, which take most of the time
KEPT_GANGS = 3


def test_a_store_has_the_keys_of_the_last_gangs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of all runs that a worker had led stayed for as long as the worker lived."""
    monkeypatch.setattr(meeting_store, "KEPT_GANGS", KEPT_GANGS)
    store, sizes = open_store("127.0.0.1"), []
    for number in range(3 * KEPT_GANGS):
        for rank in (1, 0):  # another member may come before the leader
            address = f"127.0.0.1:{store.port}"
            gang = Gang(f"7/a#1-{number}", (WorkerId("a"), WorkerId("b")), rank, address)
            reach_store(gang).set(f"here/{rank}", "1")
        sizes.append(store.num_keys())
    assert sizes[KEPT_GANGS] == sizes[-1], sizes
    kept = {name.split("/")[1] for name in store.list_keys() if name.startswith("7/")}
    assert kept == {f"a#1-{number}" for number in range(2 * KEPT_GANGS, 3 * KEPT_GANGS)}
