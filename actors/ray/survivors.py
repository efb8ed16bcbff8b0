"""The workers of a pool that outlive its controller: their names, the epochs of controllers, and who is left.

Such a worker is a detached actor: it belongs to the control service (GCS), and the next controller finds it by its
name, which contains the pool's. It ends when a controller ends it, or by its lease
(`actors.worker.worker_lease`).

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.experimental import internal_kv

from modelpool.actors.control.succession import WorkerOrigin
from modelpool.actors.ray.actor_options import CONTROL
from modelpool.actors.ray.ray_nodes import NAME_SEPARATOR, ActorReport
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.actors.worker.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

#: limit for an answer of a worker that an earlier controller left. Imports and copies may keep the interpreter lock
#: for 2.3 s on a busy machine
ANSWER_SECONDS = 10.0
#: limit for a worker to answer which controller it serves before it is ended; as above, it may be busy for a while
ASK_SECONDS = 5.0
#: workers that are asked, and ended, at the same time
ENDS = 4
_KEY_SPACE = b"modelpool"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A worker that was taken over, and is not used yet."""

    handle: ActorHandle[Any]
    origin: WorkerOrigin
    process: WorkerProcess


@dataclass(frozen=True, slots=True)
class Succession:
    """How the workers of a pool outlive its controllers.

    epoch          of this controller
    lease_seconds  without a call from a controller after which a worker ends itself
    controller     this controller
    kind_of        the kind of the workers of a group; None if there is no such group
    on_replaced    called, on any thread, when a worker serves a newer controller; this one must end
    """

    namespace: str
    pool: str
    epoch: int
    lease_seconds: float
    controller: ActorHandle[Any]
    kind_of: Callable[[str], str | None]
    on_replaced: Callable[[], None]


def next_epoch(namespace: str, pool: str) -> int:
    """Return the epoch of the next controller of a pool: larger than all before it. The control service keeps the
    number as long as any worker can live.

    For the process that starts the controller: two of them that start one at the same time may get equal numbers, but
    only one of their controllers gets the name of the pool.
    """
    key = f"epoch:{namespace}:{pool}".encode()
    before = internal_kv._internal_kv_get(key, namespace=_KEY_SPACE)
    epoch = int(before or 0) + 1
    internal_kv._internal_kv_put(key, str(epoch).encode(), namespace=_KEY_SPACE)
    return epoch


def detached_options(namespace: str, pool: str, origin: WorkerOrigin) -> dict[str, Any]:
    """Return the options of the actor of a worker that outlives its controller."""
    name = NAME_SEPARATOR.join((pool, origin.worker_id, str(origin.epoch), str(origin.incarnation)))
    return {"lifetime": "detached", "namespace": namespace, "name": name}


def epoch_of_name(name: str) -> int:
    """Return the epoch of the controller that has created a worker, by the name of its actor."""
    return int(name.rsplit(NAME_SEPARATOR, 2)[1])


def left_workers(namespace: str, pool: str) -> list[ActorHandle[Any]]:
    """Return the workers of a pool that outlive its controllers, also those that wait for a node. Raises Ray's
    errors."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(f"{pool}{NAME_SEPARATOR}"):
            with contextlib.suppress(ValueError):  # it has ended since
                found.append(ray.get_actor(actor["name"], namespace))
    return found


def end_left_workers(namespace: str, pool: str, epoch: int) -> None:
    """End the workers that the controller of `epoch` of a pool has left. Workers of a newer one stay: it has taken the
    pool over. Raises Ray's errors."""
    left = left_workers(namespace, pool)
    with ThreadPoolExecutor(ENDS) as ends:
        for end in [ends.submit(end_own, handle, epoch) for handle in left]:
            with contextlib.suppress(OlderEpoch):
                end.result()


def end_own(handle: ActorHandle[Any], epoch: int) -> None:
    """End a worker as the controller of `epoch`. Blocks until it has answered, at most `ASK_SECONDS`. Raises
    OlderEpoch if it serves a newer one: then it continues."""
    try:
        ray.get(handle.ping.options(concurrency_group=CONTROL).remote(epoch), timeout=ASK_SECONDS)
    except RayTaskError as raised:
        if isinstance(raised.cause, OlderEpoch):
            raise raised.cause from None
    except (GetTimeoutError, RayError):
        pass  # it hangs, waits for a node, or is gone
    ray.kill(handle)


async def take_over(
    left: Sequence[ActorHandle[Any]],
    change_controller: Callable[[ActorHandle[Any]], Awaitable[tuple[WorkerOrigin, WorkerProcess]]],
    kind_of: Callable[[str], str | None],
    record_of: Callable[[str], Awaitable[ActorReport | None]],
) -> tuple[list[Survivor], list[ActorHandle[Any]]]:
    """Ask workers to serve this controller; return those that do, by node and name, and those to end.

    change_controller  asks one of them
    kind_of            the kind of the workers of a group; None if there is no such group
    record_of          Ray's record of an actor

    Raises OlderEpoch if one of them serves a newer controller.
    """
    answers = await asyncio.gather(*(_asked(handle, change_controller, record_of) for handle in left))
    survivors, others = [], []
    for handle, answer in zip(left, answers, strict=True):
        if answer is None:
            others.append(handle)
        elif answer[0].kind != kind_of(answer[0].group):
            logger.info("worker %s was started for another configuration: it is replaced", answer[0].worker_id)
            others.append(handle)
        else:
            survivors.append(Survivor(handle, *answer))
    survivors.sort(key=lambda found: (found.process.node, found.origin.worker_id))
    return survivors, others


async def _asked(
    handle: ActorHandle[Any],
    change_controller: Callable[[ActorHandle[Any]], Awaitable[tuple[WorkerOrigin, WorkerProcess]]],
    record_of: Callable[[str], Awaitable[ActorReport | None]],
) -> tuple[WorkerOrigin, WorkerProcess] | None:
    """Return the answer of a worker; None if it gives none. One that waits for a node has nothing to keep. Raises
    OlderEpoch."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            record = await record_of(handle._actor_id.hex())
            if record is None or record.death is not None or not record.node:
                return None
            return await change_controller(handle)
    except RayTaskError as raised:
        if isinstance(raised.cause, OlderEpoch):
            raise raised.cause from None
        reason: object = raised.cause
    except (TimeoutError, RayError) as failed:
        reason = str(failed) or type(failed).__name__
    logger.info("a worker of an earlier controller does not answer, and is replaced: %s", reason)
    return None
