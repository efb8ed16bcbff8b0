"""`PoolProcess`: keeps `modelpool up` running as a deployment of Ray Serve."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import ray

from modelpool.actors.config.config import PoolConfig
from modelpool.actors.ray.code_folder import code_path
from modelpool.actors.ray.ray_session import ADDRESS_VARIABLE, AUTO
from modelpool.pool.values.core.errors import UserError

#: added to the pool's own limit for draining, until the process is killed
END_SECONDS = 15.0


class PoolProcess:
    """One replica. Ray Serve replaces it if `modelpool up` ends, and the new process takes over the pool's workers."""

    def __init__(self, config: Path | None) -> None:
        """Start the process in the Ray cluster of this replica. Its messages are in the replica's log. Raises UserError
        if the configuration names another cluster."""
        settings = PoolConfig.find(config)
        here = ray.get_runtime_context().gcs_address
        if settings.cluster.address not in (None, AUTO, here):
            raise UserError(
                f"[cluster] address: found {settings.cluster.address}, expected none, {AUTO!r} or {here}, the Ray "
                "cluster of Ray Serve"
            )
        self._drain_seconds = settings.cluster.drain_seconds
        options = () if config is None else ("--config", str(config))
        environment = {**os.environ, ADDRESS_VARIABLE: here, "PYTHONPATH": code_path()}
        self._process = subprocess.Popen([sys.executable, "-m", "modelpool", "up", *options], env=environment)

    def check_health(self) -> None:
        """Raise RuntimeError if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"`modelpool up` has ended with exit code {code}; the replica's log has its messages")

    def __del__(self) -> None:
        """Drain and end the pool, as `modelpool down` does. Ray Serve calls this when the application ends."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._drain_seconds + END_SECONDS)
        self._process.kill()
