"""Starts a pool or joins a running one: combines session, plan and actors into a connection."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from modelpool.actors.config.config import ControllerPlace, PoolConfig
from modelpool.actors.control.connection import CONTROLLER, Connection
from modelpool.actors.control.detached.job_service import JobsConnection
from modelpool.actors.control.detached.service_watch import WatchedService
from modelpool.actors.control.log_file import LogSettings
from modelpool.actors.control.output_commit import NodeWriters
from modelpool.actors.control.pool_plan import PoolPlan, most_workers, plan_pool
from modelpool.actors.outputs.results.outcomes import PoolLost, PoolUnreachable
from modelpool.actors.ray.fork_server import ENGINE_MODULES
from modelpool.actors.ray.forks import Forks
from modelpool.actors.ray.ray_session import AUTO, RaySession, open_session
from modelpool.actors.ray.run_file import RunningPool, is_running, running_pool
from modelpool.pool.values.core.errors import UserError

T = TypeVar("T")

DEFAULT_NAME = "modelpool"
#: time for Ray to free the name of a lost controller
NAME_SECONDS = 20.0
#: how long a program that joins a pool waits for the next controller if the current one has just ended, and how often
#: it looks
NEXT_CONTROLLER_SECONDS, LOOK_SECONDS = 30.0, 0.2


@dataclass(frozen=True, slots=True)
class OpenedPool:
    """A connection, the address of its pool, and a function that releases it.

    jobs     connects to the pool's job service; raises UserError if it has none
    restart  starts another controller in place of one that is lost, which takes over the workers; only for the process
             that started the pool
    service  the job service; for the same process
    node_writers  write outputs for this process on the nodes that made them
    ended    returns why a pool that was joined has ended, once this process has left its Ray; "" before
    tidy     removes what ended processes have left in the folder of a Ray that this process started
    """

    connection: Connection
    address: str
    close: Callable[[], None]
    jobs: Callable[[], JobsConnection] | None = None
    restart: Callable[[], None] | None = None
    service: WatchedService | None = None
    node_writers: NodeWriters | None = None
    ended: Callable[[], str] = str
    tidy: Callable[[], None] | None = None


def start_pool(
    config: PoolConfig,
    make_plan: Callable[[PoolConfig, int, bool], PoolPlan] = plan_pool,
    controller: ControllerPlace = "driver",
    keeps_jobs: bool = False,
    preload: Sequence[str] = ENGINE_MODULES,
    forks: Forks | None = None,
) -> OpenedPool:
    """Start a new pool. `make_plan` decides its shape (tests substitute their own engines); `controller` is its place
    unless one is configured. `keeps_jobs` starts a job service, unless the configuration has no journal. `preload` are
    modules that its processes on this machine share; they are imported while Ray starts. `forks` has imported them, or
    still does; it ends with the pool. Raises UserError.
    """
    cluster = config.cluster
    with contextlib.ExitStack() as opened:
        forks = forks or Forks.start(cluster.address, preload)
        opened.callback(forks.close)
        session = open_session(
            cluster.address,
            cluster.namespace,
            most_workers(config),
            bring_code=True,
            worker_python=forks.command,
            exports=bool(config.observability.export_seconds(own_ray=True)),
        )
        opened.callback(session.close)
        from modelpool.actors.ray.cluster import start_controller
        from modelpool.actors.ray.job_actor import start_job_service
        from modelpool.actors.ray.output_writers import RayNodeWriters
        from modelpool.actors.ray.ray_connection import RayConnection

        plan = _completed(make_plan(config, session.gpu_count(), not session.is_local), config, keeps_jobs)
        fork_environment = {} if session.workers_fork else forks.environment
        environment = {**(session.actor_environment or {}), **fork_environment} or None
        place = cluster.controller or controller
        start = partial(
            start_controller,
            namespace=cluster.namespace,
            name=cluster.name,
            place=place,
            models=None if session.is_local else config.models,
            environment=environment,
        )
        connection = RayConnection(*start(plan))
        atexit.register(connection.leave)  # as `program_ends` of a pool that is joined
        opened.callback(atexit.unregister, connection.leave)
        opened.callback(connection.leave)
        if plan.worker_lease_seconds is not None and not session.is_local:
            opened.callback(connection.end_workers, cluster.namespace, cluster.name)
        opened.callback(connection.end_controller)
        jobs: Callable[[], JobsConnection] | None = None
        service: WatchedService | None = None
        if keeps_jobs and config.pool.journal is not False:
            path = config.pool.journal or None
            started = start_job_service(path, cluster.namespace, cluster.name, place, environment, plan.output.by_nodes)
            opened.callback(started.close)
            jobs, service = partial(_same, started), started

        def restart() -> None:
            connection.kill_controller()
            until = time.monotonic() + NAME_SECONDS
            while True:
                try:
                    connection.replace(*start(replace(plan, has_run=True)))
                    return
                except UserError:  # Ray has not noticed yet that the lost one's name is free
                    if time.monotonic() > until:
                        raise
                time.sleep(0.5)

        writers = RayNodeWriters(lambda: connection.controller, _warn_of_writers)
        close = opened.pop_all().close
        return OpenedPool(connection, session.address, close, jobs, restart, service, writers, tidy=session.tidy)


def _completed(plan: PoolPlan, config: PoolConfig, keeps_jobs: bool) -> PoolPlan:
    """Return `plan` with the token of its cache and, if it `keeps_jobs`, with lease, log and journal."""
    if plan.cache is not None:
        # known to this pool's processes only: it grants access to the files of its nodes
        plan = replace(plan, cache=replace(plan.cache, token=secrets.token_hex(32)))
    if keeps_jobs and config.pool.worker_lease_seconds:
        plan = replace(plan, worker_lease_seconds=config.pool.worker_lease_seconds)
    if keeps_jobs and plan.log is None and config.observability.log is None:
        plan = replace(plan, log=LogSettings(None, config.observability.log_format == "json"))
    return replace(plan, journal=config.pool.journal) if keeps_jobs else plan


def _same(service: JobsConnection) -> JobsConnection:
    return service


def join_pool(name_or_address: str | None) -> OpenedPool:
    """Connect to a running pool. Closing leaves the pool running. Raises UserError if there is none."""
    if name_or_address is not None and (":" in name_or_address or name_or_address == "auto"):
        return _join(name_or_address, DEFAULT_NAME, DEFAULT_NAME)
    running = running_pool(name_or_address)
    if running is None:
        called = "" if name_or_address is None else f" called {name_or_address!r}"
        raise UserError(
            f"no pool{called} is running on this machine; start one with `modelpool up`, or pass an address (host:port)"
        )
    return _join(running.address, running.namespace, running.name, running)


def join_connected(namespace: str | None, name: str | None) -> OpenedPool:
    """Connect to a pool in the Ray cluster of this process, such as a Ray task or actor. Raises UserError if there is
    none."""
    return _join(AUTO, namespace or DEFAULT_NAME, name or DEFAULT_NAME)


def _join(address: str, namespace: str, name: str, running: RunningPool | None = None) -> OpenedPool:
    """Connect to a pool: `running`, if it is one of this machine."""
    session: RaySession = open_session(address, namespace)
    try:
        from modelpool.actors.ray.cluster import find_controller
        from modelpool.actors.ray.control_service import ControlService
        from modelpool.actors.ray.job_actor import find_job_service
        from modelpool.actors.ray.output_writers import RayNodeWriters
        from modelpool.actors.ray.pool_end import PoolEndWatch
        from modelpool.actors.ray.ray_connection import RayConnection

        control_service = ControlService(session.address)
        exists = None if running is None else partial(is_running, running)

        def connect() -> RayConnection:
            found = RayConnection(find_controller(namespace, name), control_service=control_service)
            found.call(CONTROLLER.output_defaults)  # the controller answers
            return found

        connection = answering(connect, exists, control_service.problem)
        writers = RayNodeWriters(lambda: connection.controller, _warn_of_writers, control_service)
    except BaseException:
        session.close()
        raise

    def leave() -> None:
        writers.close()
        session.close()

    watch = PoolEndWatch(name, control_service, lambda: running is None or is_running(running), leave)

    def program_ends() -> None:
        """Ask Ray nothing more: after its exit handler, which runs next, it ends a process that asks with code 1."""
        watch.stop()
        connection.leave()

    atexit.register(program_ends)

    def close() -> None:
        atexit.unregister(program_ends)
        watch.close()
        connection.leave()
        session.close()

    jobs = partial(find_job_service, namespace, name, control_service)
    return OpenedPool(connection, session.address, close, jobs, node_writers=writers, ended=watch.reason)


def answering(connect: Callable[[], T], exists: Callable[[], bool] | None, problem: Callable[[], str]) -> T:
    """Return what `connect` returns. If the controller has just ended, try again until the next one answers.

    `connect` raises UserError without a controller, and PoolLost for one that does not answer. Raises its error after
    `NEXT_CONTROLLER_SECONDS`, and at once if there is a `problem` with the Ray of the pool, or no pool: it no longer
    `exists`, or, where that is not known (None), no controller was found at first.
    """
    until = time.monotonic() + NEXT_CONTROLLER_SECONDS
    was_found = False
    while True:
        try:
            return connect()
        except PoolUnreachable:
            raise
        except (UserError, PoolLost) as lost:
            was_found = was_found or isinstance(lost, PoolLost)
            is_expected = was_found if exists is None else exists()
            if not is_expected or problem() or time.monotonic() > until:
                raise
        time.sleep(LOOK_SECONDS)


def _warn_of_writers(problem: str) -> None:
    warnings.warn(problem, stacklevel=2)
