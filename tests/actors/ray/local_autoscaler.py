"""A cluster on loopback that Ray's real autoscaler (version 2) resizes: its nodes are raylets of this machine.

Ray's own `AutoscalingCluster` ends every Ray process of the machine, and misses a file in the wheel. This one has its
own ports, folder and token, and ends only what it started. Drivers are processes of their own, since a process reads
Ray's environment once.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
#: the names that Ray's provider gives to head and node types
HEAD_ID, HEAD_TYPE = "f" * 51 + "00000", "ray.head.default"
#: variables of other clusters and of CI that must not reach this one
FOREIGN = ("RAY_ADDRESS", "RAY_JOB_ID", "CUDA_VISIBLE_DEVICES", "MODELPOOL_CONFIG")
#: more than anything takes on a busy machine
PATIENCE_SECONDS = 120.0

_OBJECT_STORE_BYTES = 100 << 20


@dataclass(frozen=True)
class NodeType:
    """What the autoscaler may launch."""

    gpus: int = 1
    cpus: int = 1
    most: int = 3
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    node_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """An entry of `available_node_types`."""
        counted = {"CPU": self.cpus, "GPU": self.gpus, "object_store_memory": _OBJECT_STORE_BYTES}
        return {
            "resources": {**counted, **self.resources},
            "labels": dict(self.labels),
            "node_config": dict(self.node_config),
            "min_workers": 0,
            "max_workers": self.most,
        }


class DriverFailed(Exception):
    """A function in another process raised. The message has its traceback and output."""


class LocalAutoscaler:
    """The running cluster."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address

    def environment(self) -> dict[str, str]:
        """The environment of the cluster's processes and drivers."""
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        return kept | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on loopback only
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_TMPDIR": str(self.folder),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "XDG_STATE_HOME": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(address, *arguments)`, called in a process of its own. Raises DriverFailed."""
        answer = self.folder / f"answer-{secrets.token_hex(4)}"
        call = pickle.dumps((str(answer), function.__module__, function.__qualname__, (self.address, *arguments)))
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import run_call; run_call()"],
            input=call, capture_output=True, env=self.environment(), cwd=self.folder, check=False,
        )  # fmt: skip
        output = (done.stdout + done.stderr).decode(errors="replace")
        if not answer.exists():
            raise DriverFailed(f"exit code {done.returncode}\n{output}")
        value, problem = pickle.loads(answer.read_bytes())
        if problem:
            raise DriverFailed(f"{problem}\n{output}\n{self.log()}")
        result: T = value
        return result

    def log(self) -> str:
        """The end of the autoscaler's log."""
        logs = [path.read_text(errors="replace") for path in self.folder.glob("session_*/logs/monitor.*")]
        lines = "\n".join(logs).splitlines()
        return "\n".join([line for line in lines if "legacy field" not in line][-60:])


def autoscaler_config(
    node_types: Mapping[str, Mapping[str, Any]], address: str, idle_seconds: float, head_cpus: int
) -> dict[str, Any]:
    """The autoscaler's configuration for these entries of `available_node_types`, without the head."""
    head = {"resources": {"CPU": head_cpus, "GPU": 0}, "labels": {}, "node_config": {}, "max_workers": 0}
    commands = (
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )  # fmt: skip
    return {
        "cluster_name": "local",
        "max_workers": sum(node_type["max_workers"] for node_type in node_types.values()),
        "provider": {
            "type": "external",
            "module": "tests.actors.ray.local_node_provider.LocalNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
        },
        "available_node_types": {HEAD_TYPE: head, **node_types},
        "head_node_type": HEAD_TYPE,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "upscaling_speed": 1000,
        "idle_timeout_minutes": idle_seconds / 60,
        **{name: [] for name in commands},
    }


@contextlib.contextmanager
def local_autoscaler(
    node_types: Mapping[str, Mapping[str, Any]], idle_seconds: float = 3.0, head_cpus: int = 4
) -> Iterator[LocalAutoscaler]:
    """Start a head without GPUs and an autoscaler that may launch these node types."""
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    port = _free_port()
    cluster = LocalAutoscaler(folder, f"127.0.0.1:{port}")
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(autoscaler_config(node_types, cluster.address, idle_seconds, head_cpus)))
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
        f"--temp-dir={folder}", f"--autoscaling-config={config}", f"--num-cpus={head_cpus}", "--num-gpus=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-dashboard=false", "--disable-usage-stats",
        f"--dashboard-port={_free_port()}",
    ]  # fmt: skip
    of_head = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_NODE_TYPE_NAME": HEAD_TYPE,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with (folder / "head.log").open("w+b") as log:
        head = subprocess.Popen(
            command, env=cluster.environment() | of_head, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_for(head, folder / "head.log", "Ray runtime started")
            yield cluster
        finally:
            _end(head, folder)
            shutil.rmtree(folder, ignore_errors=True)


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds. Raises AssertionError after more than anything takes."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def run_call() -> None:
    """Run the function that is described on standard input, and write its result (in a driver's process)."""
    import importlib

    answer, module, name, arguments = pickle.load(sys.stdin.buffer)
    value, problem = None, ""
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
    except BaseException:
        problem = traceback.format_exc()
    draft = Path(f"{answer}.draft")
    draft.write_bytes(pickle.dumps((value, problem)))
    draft.rename(answer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(process: subprocess.Popen[bytes], log: Path, words: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while words not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.1)


def _end(head: subprocess.Popen[bytes], folder: Path) -> None:
    """End all processes of the cluster: the descendants of its head, and those that name its folder."""
    family: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(head.pid)
        family = {one.pid: one for one in (process, *process.children(recursive=True))}
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.pid != os.getpid() and any(str(folder) in argument for argument in one.cmdline()):
                family[one.pid] = one
    for one in family.values():
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(list(family.values()), timeout=20)
    head.wait()
