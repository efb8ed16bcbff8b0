"""This process's connection to Ray: starts a local Ray, joins a running one, or uses the existing connection.

Ray is imported only when a session opens, because it reads the environment once, at its import. Rules
1. Only what this process started is shut down.
2. A Ray that we start listens on loopback only and requires a token, which is kept in our state folder: anyone who can
   read it may use the pool.
3. Ray prints nothing on the user's terminal.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from modelpool.actors.ray.code_folder import code_for_other_machines, code_path
from modelpool.actors.ray.state_folder import state_folder
from modelpool.pool.core.errors import UserError

logger = logging.getLogger(__name__)

#: sockets are in Ray's folder; their paths may have 107 bytes, of which Ray uses about 70
SHORT_FOLDERS = (Path("/tmp"), Path(tempfile.gettempdir()))
TOKEN_NAME = "ray_token"
#: how long to wait for an answer from an address
ANSWER_SECONDS = 10.0
#: read by Ray at its import; without it, every port of a local Ray is open to the network
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class RaySession:
    """A connection, and what this process started for it."""

    def __init__(self, address: str, connected_here: bool, folder: tempfile.TemporaryDirectory[str] | None) -> None:
        self.address = address
        self._connected_here = connected_here
        self._folder = folder

    @property
    def is_local(self) -> bool:
        """Whether this process started the whole cluster."""
        return self._folder is not None

    def gpu_count(self) -> int:
        """Return the number of GPUs in the cluster, used or free."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def close(self) -> None:
        """Disconnect, and shut down what this process started. Idempotent."""
        import ray

        if self._connected_here:
            self._connected_here = False
            ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def open_session(address: str | None, namespace: str, local_workers: int = 1, bring_code: bool = False) -> RaySession:
    """Start a local Ray with room for `local_workers` without GPUs, or join the one at `address`.

    `bring_code` ships our packages to the other machines of a joined cluster. An existing Ray connection of this
    process is used, and left alone on closing. Raises UserError if nothing answers at `address`, or if this process is
    connected elsewhere.
    """
    if (known := _connected()) is not None:
        there = known.get_runtime_context().gcs_address
        if address not in (None, "auto", there):
            raise UserError(f"this program is already connected to the Ray at {there}, so it cannot join {address}")
        return RaySession(there, False, None)
    if address is None:
        return _start(namespace, local_workers)
    return _join(address, namespace, bring_code)


def _connected() -> ModuleType | None:
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _start(namespace: str, local_workers: int) -> RaySession:
    """Start a local Ray. Tried twice: Ray gives its parts a fixed time to start, which a busy machine can exceed."""
    _prepare_environment()
    try:
        folder = _start_once(namespace, local_workers)
    except Exception as failed:
        logger.info("Ray did not start; trying once more: %s", failed)
        folder = _start_once(namespace, local_workers)
    import ray

    return RaySession(ray.get_runtime_context().gcs_address, True, folder)


def _start_once(namespace: str, local_workers: int) -> tempfile.TemporaryDirectory[str]:
    """Start Ray in its own folder; clean up after a failed start."""
    folder = tempfile.TemporaryDirectory(prefix="modelpool-", dir=_short_folder(), ignore_cleanup_errors=True)
    try:
        with _code_on_path():
            _init(
                address="local",
                namespace=namespace,
                num_cpus=local_workers,
                include_dashboard=False,
                _temp_dir=folder.name,
            )
    except BaseException:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(folder.name in argument for argument in child.cmdline()):
                    child.kill()
        folder.cleanup()
        raise
    return folder


def _join(address: str, namespace: str, bring_code: bool) -> RaySession:
    local = is_loopback(address)
    if local:
        _prepare_environment()
    environment = code_for_other_machines() if bring_code and not local else None
    if ":" in address:
        _prove_someone_listens(address)
    try:
        _init(address=address, namespace=namespace, runtime_env=environment)
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"could not join a Ray cluster at {address!r} ({_first_line(error)})") from error
    import ray

    return RaySession(ray.get_runtime_context().gcs_address, True, None)


def _init(**arguments: Any) -> None:
    """Call `ray.init` without its output."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    # Ray prints worker deaths with a listener that no setting turns off; we report them ourselves.
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = _log_lines


def _log_lines(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data.get("lines", ()):
        logger.debug("%s: %s", data.get("pid"), line)


def _prepare_environment() -> None:
    """Set what Ray must find before it is imported, or as soon after as possible, to stay on loopback behind a
    token.
    """
    os.environ[LOOPBACK_VARIABLE] = "0"
    if not any(name in os.environ for name in TOKEN_VARIABLES):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token_file())
    if "ray" in sys.modules:  # it has already read the environment; these are the two places that keep it
        private: Any = sys.modules["ray"]
        private._private.ray_constants.ENABLE_RAY_CLUSTER = False
        private._raylet.Config.initialize("")


def _token_file() -> Path:
    """Return our token, created if missing. Two processes that create it at once agree on one."""
    path = state_folder() / TOKEN_NAME
    if not path.exists():
        draft = path.with_name(f"{TOKEN_NAME}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path


def is_loopback(address: str) -> bool:
    """Whether host:port is on this machine only."""
    host = address.rpartition(":")[0] or address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _short_folder() -> Path:
    return next(folder for folder in (*SHORT_FOLDERS, Path()) if os.access(folder, os.W_OK))


@contextlib.contextmanager
def _code_on_path() -> Iterator[None]:
    """Set the environment that Ray's processes inherit, so that they find our packages wherever this program was
    started.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = code_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _prove_someone_listens(address: str) -> None:
    """Check that the address answers, as Ray would try for minutes. Raises UserError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at {address!r} ({error})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
