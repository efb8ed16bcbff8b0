"""A process with all imports done, of which Ray's workers on this machine are forks: torch, diffusers and transformers
take seconds to import, a fork takes milliseconds and shares the memory of the imports.

`ForkServer` starts it and names it to Ray; run as a program, this module is the server. Rules
1. The server never imports ray, which reads its environment once, at its import. It starts no thread, initializes no
   GPU and runs no torch operation: none of these survives a fork. If an import did one of the first two, it ends.
2. The first fork, the controller, needs less. It is one of the process that has imported that; another one, its fork,
   imports the rest meanwhile, and serves all later clients.
3. A worker ends with its `fork_client`, which is Ray's child, and the server ends with the process that started it.
   Without the server, workers start as they would without all this.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import Any

from modelpool.actors.ray import fork_client
from modelpool.actors.ray.code_folder import code_path
from modelpool.actors.ray.session_folder import SessionFolder

#: what the processes of a pool import before their first task
ENGINE_MODULES = (
    "modelpool.pool.engine.engine",
    "modelpool.pool.catalog.catalog",
    "modelpool.pool.catalog.registry.remote_models",
    "modelpool.actors.control.controller",
    "modelpool.actors.control.catalog_process",
    "modelpool.actors.control.pool_plan",
    "modelpool.actors.worker.gpu_worker",
    "modelpool.actors.worker.wire.packing",
)
#: what the first of them, the controller, imports: without torch and diffusers, and so several seconds earlier
CONTROLLER_MODULES = ENGINE_MODULES[3:]
#: before the modules that only later forks have
_LATER = "--later"
#: what the process with all imports sends to the one that serves the first client
_READY = b"r"
_PR_SET_PDEATHSIG = 1
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
    def start(cls, modules: Sequence[str], parent_folder: Path, first: Sequence[str] = ()) -> ForkServer | None:
        """Start a server that imports `modules`; None on systems other than Linux. Returns at once. Its socket is in a
        new folder of `parent_folder`, which needs a short path; the next pool removes what a killed one left. The first
        client is served as soon as the modules `first` are imported, if the others are not yet."""
        if sys.platform != "linux":
            return None
        folder = SessionFolder(parent_folder, "fork-")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / "socket"))
            listener.listen(socket.SOMAXCONN)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno()), *first, _LATER, *modules],
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


def python_command(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that starts Python in a process with these environment variables: a fork of the server, if
    the process is one."""
    command = environment.get(fork_client.COMMAND_VARIABLE)
    return (sys.executable,) if command is None else tuple(shlex.split(command))


def fork_command(server: Path) -> tuple[str, ...]:
    """Return the command that replaces Python for forks of the server with this socket."""
    return sys.executable, "-I", "-S", str(Path(fork_client.__file__)), str(server)


def fork_environment(command: Sequence[str]) -> dict[str, str]:
    """Return the Ray runtime environment of actors that are started by `command`, as of `fork_command`."""
    return {PY_EXECUTABLE: shlex.join(command)} if command else {}


def serve(listener: socket.socket, successor: int | None = None, own: Sequence[int] = ()) -> None:
    """Fork a process for each client, until stdin is closed. With the pipe of a `successor`: for one client, if
    it comes before the successor is ready; then wait until stdin is closed, or the successor ends. Forks close the file
    descriptors `own`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork becomes a zombie
    listener.setblocking(False)  # the other process may have been faster
    waiting: list[Any] = [sys.stdin, listener] if successor is None else [sys.stdin, listener, successor]
    while True:
        readable, _, _ = select.select(waiting, [], [])
        if sys.stdin in readable:
            return
        if successor in readable:
            assert successor is not None
            if not os.read(successor, 1):
                return
            waiting = [sys.stdin, successor]
            continue
        try:
            client, _ = listener.accept()
        except BlockingIOError:
            continue
        if successor is not None:
            waiting.remove(listener)
        with client:
            if (call := _received(client)) is None:
                continue
            command, environment, folder, streams = call
            if not os.fork():
                listener.close()
                for descriptor in own:
                    os.close(descriptor)
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
    a file with a path that begins with one of `gpu_files`."""
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(path.startswith(gpu_files) for path in opened)


def main() -> None:
    """Import the modules of the command line, then serve."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    later = sys.argv.index(_LATER)
    gc.disable()  # imports leave no garbage worth the time of the collections
    if first := sys.argv[2:later]:
        _import(first)
        if can_fork() and (successor := _successor()) is not None:
            gc.enable()
            serve(listener, successor, (successor,))
            return
    _import(sys.argv[later + 1 :])
    gc.enable()
    if can_fork():
        for pipe in _to_predecessor:
            os.write(pipe, _READY)
        serve(listener, own=_to_predecessor)


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # so that a collection in a fork does not copy the memory of the imports; one here takes half a second


#: in the process with all imports: the pipe to the one that serves the first client, which notices its end
_to_predecessor: list[int] = []


def _successor() -> int | None:
    """Fork the process that imports the rest. Returns its pipe in this one, and None in the new one, which ends with
    this one."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    os.close(reading)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _to_predecessor.append(writing)
    return None


if __name__ == "__main__":
    main()
