"""`DemandWatch`: ends the workers that wait for a node when their pool has no controller any more.

A worker that outlives its controller ends by its lease. One that waits for a node has no process for that: it would
remain demand, to which Ray's autoscaler reacts, as long as the cluster runs. While workers wait, a detached actor
without resources has a lease for them.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from modelpool.actors.ray.ray_nodes import NAME_SEPARATOR
from modelpool.actors.ray.survivors import Succession, epoch_of_name
from modelpool.actors.worker.worker_lease import LeaseWatch, WorkerLease

logger = logging.getLogger(__name__)

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


class DemandWatch:
    """The watch of one controller, once a worker has waited for a node. Belongs to its event loop."""

    def __init__(self, succession: Succession, threads: Executor, on_refused: Callable[[RayError], None]) -> None:
        """`threads` start the actor. `on_refused` receives the error of a renewal."""
        self._succession = succession
        self._threads = threads
        self._on_refused = on_refused
        self._starting = asyncio.Lock()
        #: None while none has waited
        self.actor: ActorHandle[Any] | None = None

    async def start(self, limit_seconds: float) -> None:
        """Have the workers that wait for a node end with the pool, also if this process is killed. Does not wait for
        the process that does it."""
        try:
            async with self._starting:
                if self.actor is None:
                    start = asyncio.get_running_loop().run_in_executor(self._threads, start_watch, self._succession)
                    self.actor = await asyncio.wait_for(start, limit_seconds)
        except (TimeoutError, RayError, ValueError) as failed:  # tried again while it waits
            logger.info("nothing watches the workers that wait for a node yet: %s", failed or "Ray does not answer")

    async def renew(self) -> None:
        """Renew the lease of the workers that wait."""
        watch = self.actor
        if watch is None:
            return
        try:
            await watch.renew.remote(self._succession.epoch)
        except RayError as failed:
            self._on_refused(failed)
            # the watch was lost with its node: the next start that has to wait creates another one
            if self.actor is watch:
                self.actor = None

    def end(self) -> bool:
        """End the actor. Blocks while Ray's control service does not answer."""
        with suppress(RayError):
            end_watch(self._succession.namespace, self._succession.pool)
        return True


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
