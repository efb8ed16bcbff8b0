"""`DemandWatch`: ends the workers that wait for a node when their pool has no controller any more.

A worker that outlives its controller ends by its lease. One that waits for a node has no process for that: it would
remain demand, to which Ray's autoscaler reacts, as long as the cluster runs. While workers wait, a detached actor
without resources has a lease for them.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from modelpool.actors.ray.ray_nodes import NAME_SEPARATOR
from modelpool.actors.ray.survivors import Succession, epoch_of_name
from modelpool.actors.worker.worker_lease import LeaseWatch, WorkerLease

#: follows the name of the pool in the name of its watch
_SUFFIX = ".demand"
#: Ray's states of an actor without a process
_WAITING = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


class DemandWatchActor:
    """The watch of one pool, for the controller of one epoch."""

    def __init__(self, namespace: str, pool: str, epoch: int, lease_seconds: float) -> None:
        self._namespace, self._pool, self._epoch = namespace, pool, epoch
        self._lease = WorkerLease(epoch, lease_seconds)
        LeaseWatch(self._lease, self._end).start()

    def renew(self, epoch: int) -> None:
        """Renew the lease. Raises OlderEpoch."""
        self._lease.check(epoch)

    def _end(self) -> None:
        try:
            end_waiting(self._namespace, self._pool, self._epoch)
        finally:
            os._exit(0)


def start_watch(succession: Succession) -> ActorHandle[Any]:
    """Start the watch of a controller, in place of one of an earlier controller. Raises Ray's errors."""
    end_watch(succession.namespace, succession.pool)
    name = f"{succession.pool}{_SUFFIX}"
    options = {"name": name, "namespace": succession.namespace, "lifetime": "detached", "num_cpus": 0}
    watch: ActorHandle[Any] = (
        ray.remote(DemandWatchActor)
        .options(**options, max_restarts=0)
        .remote(succession.namespace, succession.pool, succession.epoch, succession.lease_seconds)
    )
    return watch


def end_watch(namespace: str, pool: str) -> None:
    """End the watch of a pool, if it has one. Raises Ray's errors."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(f"{pool}{_SUFFIX}", namespace))


def end_waiting(namespace: str, pool: str, epoch: int) -> None:
    """End the workers of a pool that wait for a node, and that this controller or an earlier one has requested."""
    rows = [
        row for state in _WAITING for row in ray._private.state.state.actor_table(None, actor_state_name=state).values()
    ]
    for row in rows:
        if row["Name"].startswith(f"{pool}{NAME_SEPARATOR}") and epoch_of_name(row["Name"]) <= epoch:
            with suppress(ValueError, RayError):  # it has ended since
                ray.kill(ray.get_actor(row["Name"], namespace))
