"""Opens a line to a pool: starts one, or joins one that runs. Puts session, plan and actors together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.actors.control.connection import Line
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.pool_plan import PoolPlan, most_workers, plan_pool
from modelpool.actors.ray.ray_session import RaySession, open_session
from modelpool.actors.ray.run_file import running_pool
from modelpool.actors.results.outcomes import PoolLost
from modelpool.actors.settings.config import PoolConfig
from modelpool.pool.core.errors import UserError

DEFAULT_NAME = "modelpool"


@dataclass(frozen=True, slots=True)
class OpenedPool:
    """A line, where its pool is, and how to let go of it."""

    line: Line
    address: str
    close: Callable[[], None]


def start_pool(config: PoolConfig, make_plan: Callable[[PoolConfig, int, bool], PoolPlan] = plan_pool) -> OpenedPool:
    """A new pool. `make_plan` decides what it will be (tests bring engines of their own). Raises UserError."""
    cluster = config.cluster
    session = open_session(cluster.address, cluster.namespace, most_workers(config), bring_code=True)
    try:
        from modelpool.actors.ray.cluster import start_controller
        from modelpool.actors.ray.ray_connection import RayLine

        plan = make_plan(config, session.gpu_count(), not session.is_local)
        controller = start_controller(plan, cluster.namespace, cluster.name)
    except BaseException:
        session.close()
        raise
    line = RayLine(controller)

    def close() -> None:
        try:
            line.ask(Controller.close)
        except PoolLost:
            pass  # it ended first
        finally:
            line.end_controller()
            session.close()

    return OpenedPool(line, session.address, close)


def join_pool(name_or_address: str | None) -> OpenedPool:
    """A line to a pool that runs. Closing it leaves the pool alone. Raises UserError when there is none."""
    if name_or_address is not None and (":" in name_or_address or name_or_address == "auto"):
        return _join(name_or_address, DEFAULT_NAME, DEFAULT_NAME)
    running = running_pool(name_or_address)
    if running is None:
        called = "" if name_or_address is None else f" called {name_or_address!r}"
        raise UserError(f"no pool{called} runs here; start one with `modelpool up`, or give an address (host:port)")
    return _join(running.address, running.namespace, running.name)


def _join(address: str, namespace: str, name: str) -> OpenedPool:
    session: RaySession = open_session(address, namespace)
    try:
        from modelpool.actors.ray.cluster import find_controller
        from modelpool.actors.ray.ray_connection import RayLine

        line = RayLine(find_controller(namespace, name))
    except BaseException:
        session.close()
        raise
    return OpenedPool(line, session.address, session.close)
