"""The job service of a pool as a Ray actor, and the connection of drivers to it.

Imports Ray at once: import this module after a session is open. Unlike the other actors, this one is restarted by Ray,
and its calls are repeated: its state is in the journal, and each of its methods may be called twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from modelpool.actors.config.config import ControllerPlace
from modelpool.actors.control.connection import Connection
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.detached.job_service import JobService, P, ServiceMethod, T
from modelpool.actors.control.detached.submission_journal import Journal, JournalFailed
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.cluster import controller_node, find_controller
from modelpool.actors.ray.control_service import ControlService
from modelpool.actors.ray.node_affinity import on_node
from modelpool.actors.ray.output_writers import RayNodeWriters
from modelpool.actors.ray.ray_connection import RayConnection, awaited, check
from modelpool.actors.ray.ray_nodes import read_cluster, this_node
from modelpool.actors.ray.reachable import Reach, place_of
from modelpool.actors.ray.state_folder import journal_path
from modelpool.pool.values.core.errors import UserError

logger = logging.getLogger(__name__)

SERVICE_GONE = "the job service of the pool is gone"
#: concurrency group of the question whether the service answers: drivers that wait may occupy all other threads
HEALTH = "health"
#: calls that run at a time: drivers that wait, and those that ask
CALLS = 32
#: time for outputs that have arrived to be written
CLOSE_SECONDS = 30.0
#: a service that has ended may hold the lock of its journal for a moment longer
LOCK_SECONDS = 10.0
#: interval of opening it again where it cannot be opened
RETRY_SECONDS = 2.0


class JobServiceActor(JobService):
    """See `JobService`."""

    def __init__(self, journal: Path | None, namespace: str, name: str, by_nodes: bool = True) -> None:
        self._failed: JournalFailed | None = None
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        try:
            path = journal_path(journal, name)
            opened = _opened_at_last(path, partial(_tell, namespace, name)) if is_again else _opened(path)
        except JournalFailed as failed:
            self._failed = failed  # an error of a constructor would arrive as a text of Ray
            return
        writers = RayNodeWriters(partial(find_controller, namespace, name)) if by_nodes else None
        super().__init__(opened, partial(_controller, namespace, name), writers)

    def ready(self) -> None:
        """Return if the journal is open. Raises JournalFailed; then no other method can be called."""
        if self._failed is not None:
            raise self._failed


class RayJobsConnection:
    """See `JobsConnection`."""

    def __init__(self, service: ActorHandle[Any], control_service: ControlService | None = None) -> None:
        """`control_service` as in `RayConnection`."""
        self._service = service
        self._reach = Reach("the job service of the pool", partial(place_of, service))
        self._control_service = control_service or ControlService(ray.get_runtime_context().gcs_address)

    def call(self, question: ServiceMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `JobsConnection`. Without Ray's control service, the pool counts as lost."""
        check(self._control_service)
        with self._control_service.call():
            call = getattr(self._service, question.__name__)
            return cast("T", awaited(call.remote(*args, **kwargs), self._control_service, SERVICE_GONE, self._reach))

    def ask(self) -> Future[Any]:
        """Ask the service whether it answers, on a thread of its own."""
        answer: Future[Any] = self._service.ready.options(concurrency_group=HEALTH).remote().future()
        return answer

    def restart(self) -> None:
        """End the process of the service, which may hang; Ray starts another one. Measured: 7 s for a process that was
        stopped."""
        ray.kill(self._service, no_restart=False)

    def close(self) -> None:
        """Have the service write what has arrived, and end it. What it has not committed runs again when its journal
        is opened next.
        """
        with suppress(GetTimeoutError, RayError):
            ray.get(self._service.close.remote(), timeout=CLOSE_SECONDS)
        ray.kill(self._service)


def start_job_service(
    journal: Path | None,
    namespace: str,
    name: str,
    place: ControllerPlace,
    environment: Mapping[str, Any] | None,
    by_nodes: bool = True,
) -> RayJobsConnection:
    """Start the service of the pool called `name`, where its controller is; return when its journal is open. With
    `by_nodes`, outputs are written by the nodes that made them. Raises JournalFailed.
    """
    node = controller_node(read_cluster(), place, this_node())
    options: dict[str, Any] = {"namespace": namespace, "name": service_name(name), **on_node(node)}
    options |= {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": CALLS, "enable_task_events": False}
    if environment is not None:
        options["runtime_env"] = dict(environment)
    actor_class = ray.remote(concurrency_groups={HEALTH: 1})(JobServiceActor)
    service: ActorHandle[Any] = actor_class.options(**options).remote(journal, namespace, name, by_nodes)
    try:
        ray.get(service.ready.remote())
    except RayTaskError as raised:
        ray.kill(service)
        raise raised.cause from None
    except RayActorError as lost:
        raise PoolLost("the job service of the pool could not start") from lost
    return RayJobsConnection(service)


def find_job_service(namespace: str, name: str, control_service: ControlService) -> RayJobsConnection:
    """Return the service of a running pool. Raises UserError if it has none, and PoolLost after the end of the pool."""
    try:
        with control_service.call():
            return RayJobsConnection(ray.get_actor(service_name(name), namespace), control_service)
    except ValueError as missing:
        raise UserError(
            f"pool {name!r} has no detached jobs: it ends with its driver, or has [pool] journal = false; start one "
            "with `modelpool up`"
        ) from missing


def service_name(pool_name: str) -> str:
    """Return the name of the actor of a pool's job service."""
    return f"{pool_name}.jobs"


def _controller(namespace: str, name: str) -> Connection:
    return RayConnection(find_controller(namespace, name))


def _opened(path: Path) -> Journal:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return Journal(path)
        except JournalFailed as failed:
            if "another running pool" not in str(failed) or time.monotonic() > until:
                raise
        time.sleep(0.2)


def _tell(namespace: str, name: str, trouble: str) -> bool:
    """Have the status of the pool show why detached jobs wait; False if no controller answers now."""
    try:
        _controller(namespace, name).call(Controller.jobs_troubled, (trouble,))
    except (UserError, PoolLost):
        return False
    return True


def _opened_at_last(path: Path, tell: Callable[[str], bool]) -> Journal:
    """Open the journal of a service that has run before, once its disk has room, say. Ray starts no other process if
    the constructor of this one raises: the pool would be without its detached jobs. `tell` is given the reason, until
    it has returned True."""
    told = ""
    while True:
        try:
            return _opened(path)
        except JournalFailed as failed:
            if told != str(failed) and tell(str(failed)):
                told = str(failed)
                logger.warning("detached jobs wait: %s", failed)
        time.sleep(RETRY_SECONDS)
