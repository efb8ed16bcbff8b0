"""This process's connection to Ray: starts a local Ray, joins a running one, or uses the existing connection.

Which of them: the connection that this process has; else the configured address; else RAY_ADDRESS, which Ray sets for
submitted jobs; else a local Ray. A cluster that merely runs on this machine is never joined.

Ray is imported only when a session opens, because it reads the environment once, at its import. Rules
1. Only what this process started is shut down.
2. A Ray that we start listens on loopback only and requires a token, which is kept in our state folder: anyone who can
   read it may use the pool. A note next to it names the address: other clusters on loopback get no token of ours. Ray
   gives up a driver that has one if its cluster has none.
3. Ray prints nothing on the user's terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import json
import logging
import os
import platform
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from modelpool.actors.ray.code_folder import (
    OVERRIDE_VARIABLE,
    PY_MODULES,
    code_for_other_machines,
    code_path,
    job_environment,
    with_user_modules,
)
from modelpool.actors.ray.session_folder import SessionFolder, remove_abandoned
from modelpool.actors.ray.small_ray import fewer_processes
from modelpool.actors.ray.unused_state import remove_unused_state
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.process_identity import found_process, process_start
from modelpool.pool.values.core.user_folders import former_machine_folders, machine_folder

logger = logging.getLogger(__name__)

#: where the folders of Ray are: its sockets need short paths
SHORT_FOLDERS = (Path("/tmp"), Path(tempfile.gettempdir()))
TOKEN_NAME = "ray_token"
#: how long to wait for an answer from an address
ANSWER_SECONDS = 10.0
#: how often Ray tries to connect to a control service. Measured with Ray 2.60: one attempt takes 41 s where the service
#: ended after it was found, and by default there are 20
JOIN_ATTEMPTS = 2
#: limit of Ray's shutdown. Measured with Ray 2.60: 1.4 s; 7 s if its control service is gone, no end if that is stopped
SHUTDOWN_SECONDS = 15.0
#: read by Ray at its import; without it, every port of a local Ray is open to the network
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Ray's own variable for the niceness of workers
NICENESS_VARIABLE = "RAY_worker_niceness"
#: Ray's own variable for the address of a cluster
ADDRESS_VARIABLE = "RAY_ADDRESS"
#: addresses with a meaning: a new Ray on this machine; the running one of this machine
LOCAL, AUTO = "local", "auto"


class RaySession:
    """A connection, and what this process started for it.

    actor_environment  the runtime environment that actors need to find our code; None if the whole job has it
    workers_fork       whether workers without a runtime environment are started by the command that was passed for them
    """

    def __init__(
        self,
        address: str,
        connected_here: bool,
        folder: SessionFolder | None,
        actor_environment: Mapping[str, Any] | None = None,
        note: Path | None = None,
        workers_fork: bool = False,
    ) -> None:
        self.workers_fork = workers_fork
        self.address = address
        self.actor_environment = actor_environment
        self._connected_here = connected_here
        self._folder = folder
        #: of a Ray that was started here
        self._note = note

    @property
    def is_local(self) -> bool:
        """Whether this process started the whole cluster."""
        return self._folder is not None

    def gpu_count(self) -> int:
        """Return the number of GPUs in the cluster, used or free."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def tidy(self) -> None:
        """Remove old logs of a Ray that this process started: it keeps a file of each driver that ever joined. Never
        raises."""
        if self._folder is not None:
            self._folder.remove_old_logs()

    def close(self) -> None:
        """Disconnect, and shut down what this process started. Idempotent. Takes a limited time: a Ray that does not
        shut down is killed if this process started it, and is left in any case.
        """
        if self._connected_here:
            self._connected_here = False
            _shut_down()
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.kill_processes()  # without its control service, Ray leaves some
            self._folder.close()


def _shut_down() -> None:
    """Shut Ray down. Without its control service that may take forever, here and once more when the program exits: then
    the program ends without it, with exit code 1.
    """
    import ray

    shutdown = threading.Thread(target=ray.shutdown, name="shut Ray down", daemon=True)
    shutdown.start()
    shutdown.join(SHUTDOWN_SECONDS)
    if shutdown.is_alive():
        logger.warning("Ray does not shut down; its processes are left or killed")
        atexit.register(_exit_at_once)  # before Ray's own handler


def _exit_at_once() -> None:
    """End this process without further handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def open_session(
    address: str | None,
    namespace: str,
    local_workers: int = 1,
    bring_code: bool = False,
    worker_python: Sequence[str] = (),
    exports: bool = True,
) -> RaySession:
    """Start a local Ray with room for `local_workers` without GPUs, or join the one at `address`, by default at
    RAY_ADDRESS.

    `bring_code` ships our packages to the nodes of a joined cluster. `worker_python` is what a local Ray runs instead
    of Python for workers; without it, it starts some before they are needed. `exports` keeps its export of metrics. An
    existing Ray connection of this process is used, and left alone on closing. Raises UserError if nothing answers at
    `address`, if it cannot be joined from this process, or if this process is connected elsewhere.
    """
    if (known := _connected()) is not None:
        there = known.get_runtime_context().gcs_address
        if address not in (None, AUTO, there):
            raise UserError(f"this program is already connected to the Ray at {there}, so it cannot join {address}")
        return RaySession(there, False, None, _code_for_actors(known) if bring_code else None)
    chosen = chosen_address(address, os.environ)
    if chosen == LOCAL:
        return _start(namespace, local_workers, worker_python, exports)
    return _join(chosen, namespace, bring_code)


def chosen_address(configured: str | None, variables: Mapping[str, str]) -> str:
    """Return the address to use: "local", "auto" or host:port. Raises UserError for an address of another kind."""
    address, origin = configured, "address"
    if configured is None or (configured == AUTO and variables.get(ADDRESS_VARIABLE)):
        address, origin = variables.get(ADDRESS_VARIABLE) or LOCAL, ADDRESS_VARIABLE
    assert address is not None, "a missing address is replaced"
    scheme, found, rest = address.partition("://")
    if not found:
        return address
    host = rest.split("/")[0].rpartition(":")[0] or rest.split("/")[0]
    if scheme == "ray":
        problem = "Ray Client keeps the driver outside of the cluster, where it cannot share objects with the workers"
    else:
        problem = "this is the address of Ray's dashboard, which only accepts jobs"
    raise UserError(
        f"{origin} {address!r}: {problem}. Run this program on a machine of the cluster with the address of its GCS "
        f"(host:port; the port is 6379 unless `ray start --port` changed it, so {host}:6379), or submit it with "
        "`ray job submit`" + (f"; unset {ADDRESS_VARIABLE} to use a local Ray" if origin == ADDRESS_VARIABLE else "")
    )


def is_on_this_machine(address: str | None) -> bool:
    """Whether all nodes of the Ray that `open_session` opens for `address` are on this machine, and the user's job
    brings no environment of its own. Raises UserError as `chosen_address`.
    """
    if (known := _connected()) is not None:
        context = known.get_runtime_context()
        return is_loopback(context.gcs_address) and not dict(context.runtime_env)
    chosen = chosen_address(address, os.environ)
    return (chosen == LOCAL or is_loopback(chosen)) and not job_environment(os.environ)


def _connected() -> ModuleType | None:
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _start(namespace: str, local_workers: int, worker_python: Sequence[str], exports: bool) -> RaySession:
    """Start a local Ray, after removing what ended programs left behind. Tried twice: Ray gives its parts a fixed time
    to start, which a busy machine can exceed."""
    remove_abandoned(SHORT_FOLDERS)
    remove_unused_state()
    _prepare_environment(machine_folder())
    try:
        folder, workers_fork = _start_once(namespace, local_workers, worker_python, exports)
    except Exception as failed:
        logger.info("Ray did not start; trying once more: %s", failed)
        folder, workers_fork = _start_once(namespace, local_workers, worker_python, exports)
    import ray

    address = ray.get_runtime_context().gcs_address
    return RaySession(address, True, folder, note=write_note(address), workers_fork=workers_fork)


def write_note(address: str) -> Path:
    """Note that this process has started the Ray at `address`. Returns the file."""
    path = _note_of(address, machine_folder())
    pid = os.getpid()
    note = {"pid": pid, "started_at": psutil.Process().create_time(), "start": process_start(pid)}
    path.write_text(json.dumps(note))
    return path


def is_ours(address: str) -> bool:
    """Whether the Ray at `address` was started by a process like this one that still runs: it has our token."""
    return _token_folder(address) is not None


def _token_folder(address: str) -> Path | None:
    """Return the folder with the token of the Ray at `address`; None if no process like this one has started it."""
    for folder in (machine_folder(), *former_machine_folders()):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
            note = json.loads(_note_of(address, folder).read_text())
            if found_process(note["pid"], note.get("start", ""), note["started_at"]) is not None:
                return folder
    return None


def _note_of(address: str, folder: Path) -> Path:
    return folder / f"ray-at-{address.rpartition(':')[2]}.json"


def _start_once(
    namespace: str, local_workers: int, worker_python: Sequence[str], exports: bool
) -> tuple[SessionFolder, bool]:
    """Start Ray in its own folder, which is returned, and whether its workers are started by `worker_python`; clean up
    after a failed start."""
    folder = SessionFolder(short_folder())
    try:
        with _code_on_path(), fewer_processes(worker_python, exports) as small:
            _init(
                address="local",
                namespace=namespace,
                num_cpus=local_workers,
                include_dashboard=False,
                _temp_dir=str(folder.path),
                _system_config={
                    "prestart_worker_first_driver": not worker_python,
                    "worker_niceness": worker_niceness(os.environ),
                },
            )
    except BaseException:
        folder.kill_processes()
        folder.close()
        raise
    return folder, small.workers_fork


def worker_niceness(variables: Mapping[str, str]) -> int:
    """Return the niceness of workers relative to this process: the user's setting of Ray, else 0. Ray's own 15 would
    leave the controller, and the threads that launch kernels, what other programs of the machine leave: a core that
    another program keeps busy would delay every answer of the controller.
    """
    with contextlib.suppress(KeyError, ValueError):
        return int(variables[NICENESS_VARIABLE])
    return 0


def _join(address: str, namespace: str, bring_code: bool) -> RaySession:
    if is_loopback(address):
        _prepare_environment(_token_folder(address))
    if address == AUTO:
        _prove_someone_listens(_found_by_ray())
    elif ":" in address:
        _prove_someone_listens(address)
    else:
        raise UserError(f'address {address!r}: expected host:port, "auto" for the Ray of this machine, or "local"')
    try:
        with _job_environment_replaced() if bring_code else contextlib.nullcontext() as environment, _few_attempts():
            _init(address=address, namespace=namespace, runtime_env=environment)
    except UserError:
        raise
    except Exception as error:
        raise UserError(join_problem(address, str(error).strip() or type(error).__name__)) from error
    import ray

    return RaySession(ray.get_runtime_context().gcs_address, True, None)


@contextlib.contextmanager
def _few_attempts() -> Iterator[None]:
    """Have Ray give up a control service that ends while this process connects to it."""
    import ray

    constants: Any = ray._private.ray_constants
    before = constants.NUM_REDIS_GET_RETRIES
    constants.NUM_REDIS_GET_RETRIES = min(before, JOIN_ATTEMPTS)
    try:
        yield
    finally:
        constants.NUM_REDIS_GET_RETRIES = before


def _found_by_ray() -> str:
    """Return the address that Ray means by "auto". Raises UserError if there is none."""
    import ray

    try:
        address: str = ray._private.services.canonicalize_bootstrap_address(AUTO)
    except (ConnectionError, ValueError) as error:
        raise UserError(
            'address "auto": no Ray runs on this machine; start one with `ray start`, pass host:port, or leave the '
            f"address out for a local Ray ({error})"
        ) from None
    return address


@contextlib.contextmanager
def _job_environment_replaced() -> Iterator[dict[str, Any]]:
    """Return the runtime environment to pass to `ray.init`. If this driver is a Ray job with packages of its own, let
    Ray accept a list that contains them and ours, which it refuses otherwise.
    """
    job = job_environment(os.environ)
    environment = with_user_modules(code_for_other_machines(), job)
    if PY_MODULES not in job or OVERRIDE_VARIABLE in os.environ:
        yield environment
        return
    os.environ[OVERRIDE_VARIABLE] = "1"
    try:
        yield environment
    finally:
        del os.environ[OVERRIDE_VARIABLE]


def _code_for_actors(ray: ModuleType) -> dict[str, Any] | None:
    """Return a runtime environment that ships our code with actors, for a connection that the user has opened; None if
    its job has the code, or runs on this machine only. Uploads the code.
    """
    started = getattr(ray._private.worker, "_global_node", None)
    if started is not None and started.is_head():
        return None
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

    environment = dict(ray.get_runtime_context().runtime_env)
    with tempfile.TemporaryDirectory() as scratch:
        code = upload_py_modules_if_needed(
            code_for_other_machines(), include_gitignore=True, scratch_dir=scratch, logger=logger
        )
    if set(code[PY_MODULES]) <= set(environment.get(PY_MODULES) or ()):
        return None
    return with_user_modules(code, environment)


def join_problem(address: str, text: str) -> str:
    """Explain in one line why `ray.init` could not join: Ray's whole message, and what to do if that is known."""
    whole = " ".join(text.split())
    versions = _VERSIONS.search(text)
    if versions is not None:
        theirs, mine = versions["ray"], versions["my_ray"]
        packages = f"pip install ray=={theirs}" if theirs != mine else "use a Python environment of that version"
        return (
            f"the Ray cluster at {address} runs Ray {theirs} on Python {versions['python']}; this program runs Ray "
            f"{mine} on Python {versions['my_python']}. Both must be equal: {packages}, or submit the program with "
            "`ray job submit`, which runs it in the cluster's environment"
        )
    advice = ""
    if "RAY_AUTH" in text or "token" in text.lower():
        advice = (
            f"; its token must be readable on {platform.node() or 'this machine'}: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH, or RAY_AUTH_MODE=disabled if it was started without one"
        )
    return f"could not join the Ray cluster at {address!r}: {whole}{advice}"


def _init(**arguments: Any) -> None:
    """Call `ray.init` without its output."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    with _own_signals():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    # Ray prints worker deaths with a listener that no setting turns off; we report them ourselves.
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = _log_lines


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of this process: Ray replaces the one of SIGTERM. Ray's processes ignore SIGHUP, which a closed
    terminal sends to all of them: this process decides when they end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # processes that start now inherit it
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
        if before[signal.SIGTERM] is not signal.SIG_DFL:  # without a handler of the program, Ray's ends it in order
            signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def _log_lines(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data.get("lines", ()):
        logger.debug("%s: %s", data.get("pid"), line)


def _prepare_environment(token_folder: Path | None) -> None:
    """Set what Ray must find before it is imported, or as soon after as possible, to stay on loopback, behind our
    token in `token_folder`, unless that is None or the user has set one.
    """
    os.environ[LOOPBACK_VARIABLE] = "0"
    if token_folder is not None and not any(name in os.environ for name in TOKEN_VARIABLES):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token_file(token_folder))
    if "ray" in sys.modules:  # it has already read the environment; these are the two places that keep it
        private: Any = sys.modules["ray"]
        private._private.ray_constants.ENABLE_RAY_CLUSTER = False
        private._raylet.Config.initialize("")


def _token_file(folder: Path) -> Path:
    """Return our token, created if missing. Two processes that create it at once agree on one."""
    path = folder / TOKEN_NAME
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


def short_folder() -> Path:
    """Return a writable folder in which the paths of sockets are short enough."""
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


#: Ray's message for a cluster of other versions
_VERSIONS = re.compile(
    r"Version mismatch:.*?Ray: (?P<ray>\S+)\s+Python: (?P<python>\S+)"
    r".*?Ray: (?P<my_ray>\S+)\s+Python: (?P<my_python>\S+)",
    re.DOTALL,
)
