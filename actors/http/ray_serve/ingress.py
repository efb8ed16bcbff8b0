"""`app`: builds the Ray Serve application: replicas that answer HTTP calls over one pool, and if wanted that pool.

Imports Ray Serve at once: import this module only to serve with it.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field
from ray import serve
from ray.serve import Application

from modelpool.actors.client.client import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.http.application import application
from modelpool.actors.http.ray_serve.pool_process import PoolProcess
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: between two attempts to find a pool that starts
RETRY_SECONDS = 1.0
#: interval of checking whether the pool answers
HEALTH_SECONDS = 5.0
#: calls that one replica answers at a time: streams and waiting calls are open for as long as their jobs
MAX_ONGOING_CALLS = 1000


class IngressArguments(Strict):
    """Arguments of the application, as `key=value` of `serve run` and as `args` of a Serve configuration.

    config        TOML file, at the same path on every node with a replica; by default as `PoolConfig.find` finds it.
                  Replicas read `[serve]`, and name and namespace in `[cluster]`
    start         start the pool with this configuration and keep it running; otherwise it has to run
    replicas      of the deployment `Ingress`; `num_replicas` of a Serve configuration has priority
    wait_seconds  how long a replica waits for the pool
    open_access   permit a configuration without `[serve.keys]`: everybody who reaches Ray Serve's port is one user
    """

    config: Path | None = None
    start: bool = False
    replicas: int = Field(default=1, ge=1)
    wait_seconds: float = Field(default=120.0, ge=0)
    open_access: bool = False


class Ingress:
    """A replica: answers the calls of all HTTP interfaces."""

    def __init__(self, arguments: IngressArguments, secret: bytes, pool: object = None) -> None:
        """Connect to the pool. `secret` signs addresses of outputs, and is the same for all replicas. `pool` is the
        deployment that keeps the pool running, which Ray Serve starts first. Raises UserError.
        """
        self._settings = PoolConfig.find(arguments.config)
        self._secret = secret
        self._open_access = arguments.open_access
        self._pool = _connected(self._settings, arguments.wait_seconds)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        folder = served_folder(self._settings)
        return application(self._pool, self._settings.serve, folder, self._secret, True, self._open_access)

    def check_health(self) -> None:
        """Raise PoolLost if the pool does not answer; Ray Serve then replaces the replica."""
        self._pool.status()


def app(arguments: IngressArguments) -> Application:
    """Return the application. Raises UserError if the configuration has no keys and the arguments do not permit that,
    or if its outputs are written to another place than a folder.
    """
    settings = PoolConfig.find(arguments.config)
    if not settings.serve.keys and not arguments.open_access:
        raise UserError(
            "[serve.keys]: found none, expected a key for each user, as Ray Serve decides which addresses reach its "
            "port; open_access=true serves everybody"
        )
    served_folder(settings)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        num_replicas=arguments.replicas,
        max_ongoing_requests=MAX_ONGOING_CALLS,
        health_check_period_s=HEALTH_SECONDS,
    )
    secret = secrets.token_bytes(32)
    if not arguments.start:
        return ingress.bind(arguments, secret)
    keeper = serve.deployment(PoolProcess, num_replicas=1, health_check_period_s=HEALTH_SECONDS)
    return ingress.bind(arguments, secret, keeper.bind(arguments.config))


def served_folder(settings: PoolConfig) -> Path:
    """Return the folder of outputs and uploaded images, which all replicas must see. Raises UserError."""
    folder = settings.serve.folder or settings.output.folder
    if not isinstance(folder, Path):
        raise UserError(
            f"[serve] folder: found {folder}, expected a folder that all nodes with a replica see; it is where outputs "
            "are written and served from"
        )
    return folder.absolute()


def _connected(settings: PoolConfig, wait_seconds: float) -> ModelPool:
    until = time.monotonic() + wait_seconds
    while True:
        try:
            return ModelPool.connect_here(settings.cluster.name, namespace=settings.cluster.namespace)
        except UserError:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_SECONDS)
