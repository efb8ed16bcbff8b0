"""A process with all imports done, of which Ray's workers on this machine are forks: torch, diffusers and transformers
take seconds to import, a fork takes milliseconds and shares the memory of the imports.

`ForkServer` starts it and names it to Ray; run as a program, this module is the server. Rules
1. The server never imports ray, which reads its environment once, at its import. It starts no thread, initializes no
   GPU and runs no torch operation: none of these survives a fork. If an import did one of the first two, it ends.
2. A worker ends with its `fork_client`, which is Ray's child, and the server ends with the process that started it.
   Without the server, workers start as they would without all this.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelpool.actors.ray import fork_client
from modelpool.actors.ray.code_folder import code_path
from modelpool.actors.ray.session_folder import SessionFolder

#: what the processes of a pool import before their first task
ENGINE_MODULES = (
    "modelpool.pool.engine.engine",
    "modelpool.pool.catalog.catalog",
    "modelpool.pool.registry.remote_models",
    "modelpool.actors.control.controller",
    "modelpool.actors.control.catalog_process",
    "modelpool.actors.control.pool_plan",
    "modelpool.actors.worker.gpu_worker",
    "modelpool.actors.wire.packing",
)
#: the socket of a server that pools use instead of starting one each: for programs that start many pools
SERVER_VARIABLE = "MODELPOOL_FORK_SERVER"
#: the key of a Ray runtime environment for what runs as Python
PY_EXECUTABLE = "py_executable"
#: read at imports: libraries start no threads (engines set the number that they use), and torch looks for GPUs without
#: initializing CUDA
_IMPORT_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
#: of commands: forks flush as their server does, and add no folder that was not asked for
_PYTHON_OPTIONS = ("-u", "-P")
#: files that a process has open once it uses a GPU: NVIDIA's, AMD's and Intel's
_GPU_FILES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/")


class ForkServer:
    """A running fork server; its imports may still be going on, and workers wait for them."""

    def __init__(self, folder: SessionFolder, process: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._process = process

    @classmethod
    def start(cls, modules: Sequence[str], parent_folder: Path) -> ForkServer | None:
        """Start a server that imports `modules`; None on systems other than Linux. Returns at once. Its socket is in a
        new folder of `parent_folder`, whose path must be short; the next pool removes what a killed one left."""
        if sys.platform != "linux":
            return None
        folder = SessionFolder(parent_folder, "fork-")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / "socket"))
            listener.listen(socket.SOMAXCONN)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno()), *modules],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_IMPORT_VARIABLES, "PYTHONPATH": code_path()},
                start_new_session=True,  # Ctrl-C in the terminal is not for workers
            )
        return cls(folder, process)

    @property
    def socket(self) -> Path:
        """The path of its socket."""
        return self._folder.path / "socket"

    def close(self) -> None:
        """End the server, but none of its forks. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._folder.close()


def python_command(runtime_environment: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command that starts Python in an actor with this runtime environment: a fork of the server, if the
    actor is one."""
    command = shlex.split(str(runtime_environment.get(PY_EXECUTABLE, "")))
    return tuple(command) if fork_client.__file__ in command else (sys.executable,)


def fork_environment(server: Path) -> dict[str, str]:
    """Return the Ray runtime environment of actors that are forks of the server with this socket."""
    return {PY_EXECUTABLE: shlex.join([sys.executable, "-I", "-S", str(Path(fork_client.__file__)), str(server)])}


def serve(listener: socket.socket) -> None:
    """Fork a process for each client, until stdin is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork becomes a zombie
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        client, _ = listener.accept()
        with client:
            if (call := _received(client)) is None:
                continue
            command, environment, folder, streams = call
            if not os.fork():
                listener.close()
                _become(client, command, environment, folder, streams)
            for stream in streams:
                os.close(stream)


def _received(client: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]] | None:
    """Return command, environment, folder and standard streams of a client; None if it has ended."""
    with contextlib.suppress(OSError):
        header, streams, _, _ = socket.recv_fds(client, fork_client.NUMBER.size, 3)
        if len(header) == fork_client.NUMBER.size:
            size = fork_client.NUMBER.unpack(header)[0]
            with client.makefile("rb") as file:
                text = file.read(size)
            if len(text) == size:
                call = json.loads(text)
                return call["command"], call["environment"], call["folder"], streams
        for stream in streams:
            os.close(stream)
    return None


def _become(
    client: socket.socket, command: Sequence[str], environment: Mapping[str, str], folder: str, streams: Sequence[int]
) -> None:
    """Turn this process into the one that the client stands for. Does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        _end_with(client)
        client.sendall(fork_client.NUMBER.pack(os.getpid()))
        random.seed()
        _run([part for part in command if part not in _PYTHON_OPTIONS], environment)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a script or, after "-m", a module, with the arguments after it."""
    added = _added_paths(environment)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path[:0] = added
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[:0] = [os.path.dirname(command[0]), *added]
        runpy.run_path(command[0], run_name="__main__")


def _added_paths(environment: Mapping[str, str]) -> list[str]:
    """Return the entries of PYTHONPATH that this process does not have yet."""
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]


def _end_with(client: socket.socket) -> None:
    """Have the kernel end this process when the client ends, which sends nothing more."""
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(client, fcntl.F_SETFL, fcntl.fcntl(client, fcntl.F_GETFL) | os.O_ASYNC)


def can_fork(gpu_files: tuple[str, ...] = _GPU_FILES) -> bool:
    """Return whether a fork of this process can do what this process can: it has one thread, and no GPU open, which is
    a file whose path begins with one of `gpu_files`."""
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(path.startswith(gpu_files) for path in opened)


def main() -> None:
    """Import the modules of the command line, then serve."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # imports leave no garbage worth the time of the collections
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not copy the memory of the imports
    if can_fork():
        serve(listener)


if __name__ == "__main__":
    main()
