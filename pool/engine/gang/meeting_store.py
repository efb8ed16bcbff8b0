"""The store of a worker at which the members of a gang meet: one for all gangs that it leads, each with a prefix.

It lives as long as the worker. A member may still look at it for a while after the leader has ended, so the keys of the
last `KEPT_GANGS` gangs stay, and the leader deletes older ones when it comes to its next.
"""

from __future__ import annotations

import datetime

from modelpool.pool.devices.torch_api.process_groups import PrefixStore, TCPStore
from modelpool.pool.values.specs.gang import Gang

#: limit of the answer of a store that is reached, and of the wait for a value that another member sets
STORE_SECONDS = 60.0
#: gangs with keys in a store, the current one included: runs of a leader follow each other, and members that are late
#: are ended after `SchedulerConfig.stop_grace_seconds`
KEPT_GANGS = 16
#: below it, the members that have said that they come
_COMING = "coming"
#: the number of gangs that the leader has come to, and below it the id of each that is kept
_LED = "led"


def open_store(host: str) -> TCPStore:
    """Open a store at a free port of this machine, which members reach as `host`. It serves for as long as it lives."""
    limit = datetime.timedelta(seconds=STORE_SECONDS)
    return TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)


def reach_store(gang: Gang, seconds: float = STORE_SECONDS) -> PrefixStore:
    """Connect to the store of the leader of `gang`, and return what belongs to its next run: each member counts them.
    Raises RuntimeError if it cannot be reached."""
    store = _connected(gang, seconds)
    if gang.leads:
        _forget_older(store, gang.gang_id)
    own = PrefixStore(gang.gang_id, store)
    return PrefixStore(str(own.add(f"runs/{gang.rank}", 1)), own)


def announce(gang: Gang, facts: str, seconds: float) -> None:
    """Say at the store of the leader that this member comes to the next run of `gang`; `facts` are for the others.
    Raises RuntimeError if it cannot be reached."""
    PrefixStore(gang.gang_id, _connected(gang, seconds)).set(f"{_COMING}/{gang.rank}", facts)


def announced(store: PrefixStore, rank: int) -> str:
    """Return the facts of a member that has said that it comes; "" if it has not. `store` is of `reach_store`."""
    own, key = store.underlying_store, f"{_COMING}/{rank}"
    return own.get(key).decode() if own.check([key]) else ""


def _connected(gang: Gang, seconds: float) -> TCPStore:
    host, _, port = gang.address.rpartition(":")
    limit = datetime.timedelta(seconds=seconds)
    return TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)


def _forget_older(store: TCPStore, gang_id: str) -> None:
    """Delete what the store has of all gangs before the last ones, of which `gang_id` is the newest."""
    newest, key = store.add(_LED, 1), f"{_LED}/{{}}".format
    store.set(key(newest), gang_id)
    if newest <= KEPT_GANGS:
        return
    oldest = key(newest - KEPT_GANGS)
    prefix = f"{store.get(oldest).decode()}/"
    for found in [oldest, *(name for name in store.list_keys() if name.startswith(prefix))]:
        store.delete_key(found)
