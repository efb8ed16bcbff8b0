"""Clusters of real raylets on loopback, for tests.

The cluster runs in a process of its own, which ends with the test process at the latest and kills nothing but its own
children. Tests use it from outside: they control the nodes through `LocalCluster`, and run what needs a Ray connection
as functions in separate processes (`LocalCluster.run`), so that no test inherits the connection of another.

    def batch(cluster: LocalCluster, wanted: list[GenerateRequest]) -> Finished:
        with sim_pool(cluster, workers=2) as pool:
            jobs = pool.submit(wanted, output=False)
            cluster.kill(cluster.nodes["b"])
            return finish(jobs)

    @pytest.mark.ray
    def test_a_lost_node_costs_no_image(...):
        with local_cluster() as cluster:
            cluster.add_node("a", gpus=1)
            cluster.add_node("b", gpus=1)
            assert cluster.run(batch, wanted) == expected_of(wanted)

Functions that are run must be at the top level of a module, and their arguments and results must be picklable.
`sim_pool` needs Ray GPUs on the nodes: each of its workers occupies one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

if TYPE_CHECKING:
    from modelpool import GenerateRequest, ImageResult, ModelPool
    from modelpool.actors.client.jobs import Jobs

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
SHAPES = ROOT / "examples" / "shapes"
PROMPTS = ("a red circle", "a blue square", "a yellow triangle", "a green circle")
#: GCS notices a dead node within half a second instead of 16 s, a hanging one within two seconds
QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 3,
    "timeout_ms_task_wait_for_death_info": 100,
}
_OBJECT_STORE_BYTES = 100 << 20
#: variables that would connect a cluster or a driver to something else
_FOREIGN = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "CUDA_VISIBLE_DEVICES", "MODELPOOL_CONFIG", "PYTHONPATH")


#: a command in a mount namespace of its own
_OWN_MOUNTS = ("unshare", "--mount") if os.getuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One raylet.

    pid       of the raylet
    temp_dir  Ray's folder of this node; `ray.init(address, _temp_dir=...)` connects a driver to it
    """

    name: str
    node_id: str
    pid: int
    temp_dir: str


class ClusterFailed(AssertionError):
    """A function that was run in another process, or a command to the cluster, raised. The message has its traceback
    and output.
    """


class LocalCluster:
    """A handle to a running cluster; created by `local_cluster`, and passed to functions that it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: Connection | None = None

    def __reduce__(self) -> tuple[type[LocalCluster], tuple[Path]]:
        return type(self), (self._folder,)

    @property
    def folder(self) -> Path:
        """A folder that only this user can read, removed with the cluster. Its path is short."""
        return self._folder

    @property
    def address(self) -> str:
        """host:port of the GCS."""
        address: str = self._ask("address")
        return address

    @property
    def nodes(self) -> dict[str, LocalNode]:
        """The nodes by name, without those that were removed or killed. The first is the head."""
        nodes: dict[str, LocalNode] = self._ask("nodes")
        return nodes

    @property
    def head(self) -> LocalNode:
        """The head node, without GPUs unless requested."""
        return self.nodes["head"]

    def add_node(
        self,
        name: str,
        *,
        gpus: int = 0,
        cpus: int = 2,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        hides: Sequence[Path] = (),
        shows: Mapping[Path, Path] | None = None,
    ) -> LocalNode:
        """Start a raylet and wait until it has joined. No hardware is needed for `gpus`. The folders `hides` are empty
        for all processes of the node, as if its machine lacked their files, and in place of the folders of `shows` they
        find others; see `can_hide`.
        """
        mounts = {str(folder): "" for folder in hides} | {str(at): str(other) for at, other in (shows or {}).items()}
        node: LocalNode = self._ask("add_node", name, gpus, cpus, dict(labels or {}), dict(resources or {}), mounts)
        return node

    def kill(self, node: LocalNode) -> None:
        """End the raylet and all its processes at once, as if its machine had lost power."""
        self._ask("kill", node)

    def remove(self, node: LocalNode) -> None:
        """Let the raylet shut down and leave the cluster."""
        self._ask("remove", node)

    def drain(self, node: LocalNode, seconds: float, reason: str = "preemption") -> None:
        """Announce through the GCS that the node ends after `seconds`, because of "preemption" or "idle". Ray ends it
        as soon as nothing runs on it, at once if it is idle. Meanwhile `ray.nodes()` shows no resources of it.
        """
        self._ask("drain", node, seconds, reason)

    def stop_control_service(self) -> None:
        """End Ray's control service (GCS) at once."""
        self._ask("stop_control_service")

    def start_control_service(self) -> None:
        """Start it again at its address. It knows the cluster only if its state is in Redis."""
        self._ask("start_control_service")

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment for a driver of this cluster: our packages, its token, loopback only, and `more`."""
        kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        return kept | _ray_environment(self._folder) | {"PYTHONPATH": str(ROOT)} | more

    def start(
        self, function: Callable[..., T], *arguments: Any, node: LocalNode | None = None, **more: str
    ) -> Running[T]:
        """Start `function(cluster, *arguments)` in another process, and return without waiting for it.

        With `node`, the process is connected to that node before the function is called, as a driver on that machine
        would be. `more` are environment variables.
        """
        return Running(self, function, arguments, node, more)

    def run(self, function: Callable[..., T], *arguments: Any, node: LocalNode | None = None, **more: str) -> T:
        """As `start`; wait, and return the result. Raises ClusterFailed if the function raises."""
        return self.start(function, *arguments, node=node, **more).result()

    def _ask(self, command: str, *arguments: Any) -> Any:
        if self._connection is None:
            self._connection = Client(str(self._folder / "control"))
        self._connection.send((command, arguments))
        answer, problem = self._connection.recv()
        if problem:
            raise ClusterFailed(problem)
        return answer


class Running(contextlib.AbstractContextManager["Running[T]"]):
    """A function that runs in another process. `process` can be used to send signals; leaving the context kills it."""

    def __init__(
        self,
        cluster: LocalCluster,
        function: Callable[..., T],
        arguments: Sequence[Any],
        node: LocalNode | None,
        environment: Mapping[str, str],
    ) -> None:
        self._answer = cluster.folder / f"answer-{secrets.token_hex(4)}"
        self._output = (cluster.folder / f"{self._answer.name}.log").open("w+b")
        call = pickle.dumps((str(self._answer), cluster, node, function.__module__, function.__qualname__, arguments))
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _run; _run()"],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            env=cluster.environment(**environment),
            cwd=cluster.folder,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(call)
        self.process.stdin.close()

    def result(self) -> T:
        """Wait for the function to return. Raises ClusterFailed if it raises."""
        self.process.wait()
        if not self._answer.exists():
            raise ClusterFailed(f"exit code {self.process.returncode}\n{self.output()}")
        answer, problem = pickle.loads(self._answer.read_bytes())
        if problem:
            raise ClusterFailed(f"{problem}\n{self.output()}")
        value: T = answer
        return value

    def output(self) -> str:
        """Return what the process has printed so far."""
        return Path(self._output.name).read_text(errors="replace")

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def can_hide() -> bool:
    """Whether this machine allows mount namespaces, which hide folders from single nodes."""
    return subprocess.run([*_OWN_MOUNTS, "true"], capture_output=True, check=False).returncode == 0


def new_folder() -> Path:
    """Return an empty folder with a short path that only this user can read, as sockets of Ray need it."""
    return Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))


@contextlib.contextmanager
def local_cluster(
    head_gpus: int = 0, head_cpus: int = 2, code: bool = True, head_hides: Sequence[Path] = (), redis: str = ""
) -> Iterator[LocalCluster]:
    """Start a cluster of one node, the head. With `code`, its processes find our packages and tests where they are;
    otherwise only what drivers ship to it. `head_hides` as in `LocalCluster.add_node`. `redis` is the address of a
    server for the state of the control service.
    """
    folder = new_folder()
    hidden = {str(folder): "" for folder in head_hides}
    log = (folder / "cluster.log").open("w+b")
    (folder / "ray").mkdir()  # for Ray's note of the latest cluster
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from {__name__} import _serve; _serve({str(folder)!r}, {head_gpus}, {head_cpus}, {code}, {hidden})",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=kept
        | _ray_environment(folder)
        | {"PYTHONPATH": str(ROOT)}
        | ({"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": folder.name} if redis else {}),
        cwd=folder,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if server.stdout.readline() != b"ready\n":
            raise ClusterFailed((folder / "cluster.log").read_text(errors="replace"))
        yield LocalCluster(folder)
    finally:
        family = _family(server.pid)
        server.stdin.close()  # the server ends its nodes
        psutil.wait_procs(family, timeout=20)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=20)
        server.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def sim_pool(cluster: LocalCluster, **settings: Any) -> ModelPool:
    """Start a pool of simulated GPUs over the shapes model on the cluster. Call it in a function that is run."""
    from modelpool import ModelPool, PoolConfig

    values = {
        "device": "sim",
        "vram": "64MiB",
        "models": [SHAPES / "models"],
        "loras": [SHAPES / "loras"],
        "address": cluster.address,
        **settings,
    }
    return ModelPool.start(PoolConfig().override(**values))


#: what became of a submission: the pixels of each image in order, and the failures
Finished = tuple[list[bytes], list[str]]


def shapes_requests(count: int, **fields: object) -> list[GenerateRequest]:
    """Return requests for the shapes model, each with its own seed. Four steps unless `fields` differ."""
    from modelpool import GenerateRequest

    common: dict[str, object] = {"model": "shapes", "steps": 4, **fields}
    return [
        GenerateRequest.model_validate({"prompt": PROMPTS[i % len(PROMPTS)], "seed": i, **common}) for i in range(count)
    ]


def finish(jobs: Jobs, *taken: ImageResult) -> Finished:
    """Wait for a submission and return all of its images by index, including those that were `taken` before. Raises
    AssertionError if one of them arrived twice.
    """
    images = sorted((*taken, *jobs.images()), key=lambda image: image.index)
    assert len({image.index for image in images}) == len(images), "an image arrived twice"
    return [image.pixels.tobytes() for image in images], [failure.message for failure in jobs.failures]


def expected_of(requests: Sequence[GenerateRequest]) -> Finished:
    """Return the outcome of a run without faults: of the same engines in this process, one at a time, without Ray."""
    from modelpool import PoolConfig
    from tests.actors.loop_connection import open_real_pool

    config = PoolConfig().override(
        device="sim", workers=1, vram="64MiB", models=[SHAPES / "models"], loras=[SHAPES / "loras"]
    )
    with open_real_pool(config) as pool:
        return finish(pool.submit(requests, output=False))


def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; the time limit of the test ends it otherwise."""
    while not condition():
        time.sleep(0.05)


def _ray_environment(folder: Path) -> dict[str, str]:
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on loopback only
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_TMPDIR": str(folder),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "XDG_STATE_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class _Server:
    """Executes the commands of `LocalCluster`, in the cluster's process."""

    def __init__(self, folder: Path, head_gpus: int, head_cpus: int, head_mounts: dict[str, str]) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._cluster: Any = Cluster()
        self._nodes: dict[str, Any] = {}
        self._start(
            "head", head_gpus, head_cpus, {}, {}, head_mounts,
            _system_config=QUICK_HEALTH_CHECKS, include_dashboard=False,
        )  # fmt: skip

    def address(self) -> str:
        return str(self._cluster.address)

    def nodes(self) -> dict[str, LocalNode]:
        return {name: self._described(name) for name in self._nodes}

    def add_node(
        self,
        name: str,
        gpus: int,
        cpus: int,
        labels: dict[str, str],
        resources: dict[str, float],
        mounts: dict[str, str],
    ) -> LocalNode:
        if name in self._nodes:
            raise ValueError(f"there is a node called {name!r} already")
        return self._start(name, gpus, cpus, labels, resources, mounts)

    def kill(self, node: LocalNode) -> None:
        family = _family(node.pid)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)  # nobody reacts to the end of another
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.remove(node, graceful=False)

    def remove(self, node: LocalNode, graceful: bool = True) -> None:
        known = self._nodes.pop(node.name)
        self._cluster.remove_node(known, allow_graceful=graceful)

    def stop_control_service(self) -> None:
        self._nodes["head"].kill_gcs_server(check_alive=True)

    def start_control_service(self) -> None:
        self._nodes["head"].start_gcs_server()

    def drain(self, node: LocalNode, seconds: float, reason: str) -> None:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        code = autoscaler_pb2.DrainNodeReason.Value(f"DRAIN_NODE_REASON_{_DRAIN_REASONS[reason]}")
        deadline_ms = time.time_ns() // 1_000_000 + round(1000 * seconds)
        client = GcsClient(address=self.address())
        accepted, why = client.drain_node(node.node_id, code, f"test: {reason}", deadline_ms)
        if not accepted:
            raise ValueError(why)

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self._cluster.remove_node(self._nodes.pop(name), allow_graceful=name == "head")

    def _start(
        self,
        name: str,
        gpus: int,
        cpus: int,
        labels: dict[str, str],
        resources: dict[str, float],
        mounts: dict[str, str],
        **more: Any,
    ) -> LocalNode:
        with self._mounted(name, mounts):
            self._nodes[name] = self._cluster.add_node(
                node_name=name,
                num_cpus=cpus,
                num_gpus=gpus,
                labels=labels,
                resources=resources,
                object_store_memory=_OBJECT_STORE_BYTES,
                temp_dir=str(self._folder / name),
                **more,
            )
        return self._described(name)

    @contextlib.contextmanager
    def _mounted(self, name: str, folders: dict[str, str]) -> Iterator[None]:
        """Start raylets, and so their workers, with other folders in place of `folders`, or empty file systems."""
        from ray._private import services

        if not folders:
            yield
            return
        raylet = services.RAYLET_EXECUTABLE
        mounts = " && ".join(
            f"mount --bind {shlex.quote(other)} {shlex.quote(at)}"
            if other
            else f"mount -t tmpfs none {shlex.quote(at)}"
            for at, other in folders.items()
        )
        script = self._folder / f"raylet-{name}"
        inside = f'{mounts} && exec {shlex.quote(raylet)} "$@"'
        outside = f'exec {shlex.join(_OWN_MOUNTS)} sh -c {shlex.quote(inside)} raylet "$@"'
        script.write_text(f"#!/bin/sh\n{outside}\n")
        script.chmod(0o700)
        services.RAYLET_EXECUTABLE = str(script)
        try:
            yield
        finally:
            services.RAYLET_EXECUTABLE = raylet

    def _described(self, name: str) -> LocalNode:
        node = self._nodes[name]
        (raylet,) = node.all_processes["raylet"]
        return LocalNode(name, node.node_id, raylet.process.pid, str(self._folder / name))


_DRAIN_REASONS = {"preemption": "PREEMPTION", "idle": "IDLE_TERMINATION"}


def _serve(path: str, head_gpus: int, head_cpus: int, code: bool, mounts: dict[str, str]) -> None:
    """Run a cluster until standard input ends."""
    folder = Path(path)
    if not code:
        del os.environ["PYTHONPATH"]
    server = _Server(folder, head_gpus, head_cpus, mounts)
    listener = Listener(str(folder / "control"), "AF_UNIX")
    # Ray installs signal handlers, and ties the life of raylets to a thread: commands are executed by the main one
    commands: queue.Queue[tuple[Connection, str, tuple[Any, ...]] | None] = queue.Queue()

    def receive(connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                commands.put((connection, *connection.recv()))

    def accept() -> None:
        while True:
            threading.Thread(target=receive, args=(listener.accept(),), daemon=True).start()

    def end_with_parent() -> None:
        sys.stdin.read()
        commands.put(None)

    for endless in (accept, end_with_parent):
        threading.Thread(target=endless, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while (received := commands.get()) is not None:
        connection, command, arguments = received
        try:
            answer = (getattr(server, command)(*arguments), "")
        except Exception:
            answer = (None, traceback.format_exc())
        with contextlib.suppress(OSError):  # whoever asked is gone
            connection.send(answer)
    server.close()
    os._exit(0)


def _run() -> None:
    """Run the function that is described on standard input, and write its result."""
    import importlib

    answer, cluster, node, module, name, arguments = pickle.load(sys.stdin.buffer)
    if node is not None:
        import ray

        ray.init(
            cluster.address, _temp_dir=node.temp_dir, namespace="modelpool", log_to_driver=False, logging_level="ERROR"
        )
    value, problem = None, ""
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        value = function(cluster, *arguments)  # type: ignore[operator]
    except Exception:
        problem = traceback.format_exc()
    draft = Path(f"{answer}.draft")
    draft.write_bytes(pickle.dumps((value, problem)))
    draft.rename(answer)
