"""The store of a worker at which the members of a gang meet: one for all gangs that it leads, each with a prefix."""

from __future__ import annotations

import datetime

from modelpool.pool.devices.torch_api.process_groups import PrefixStore, TCPStore
from modelpool.pool.values.specs.gang import Gang

#: limit of the answer of a store that is reached, and of the wait for a value that another member sets
STORE_SECONDS = 60.0


def open_store(host: str) -> TCPStore:
    """Open a store at a free port of this machine, which members reach as `host`. It serves for as long as it lives."""
    limit = datetime.timedelta(seconds=STORE_SECONDS)
    return TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)


def reach_store(gang: Gang, seconds: float = STORE_SECONDS) -> PrefixStore:
    """Connect to the store of the leader of `gang`, and return what belongs to its next run: each member counts them.
    Raises RuntimeError if it cannot be reached."""
    host, _, port = gang.address.rpartition(":")
    limit = datetime.timedelta(seconds=seconds)
    store = TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
    own = PrefixStore(gang.gang_id, store)
    return PrefixStore(str(own.add(f"runs/{gang.rank}", 1)), own)
