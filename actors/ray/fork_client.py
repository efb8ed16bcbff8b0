"""The command that Ray runs instead of Python to start a worker: has the fork server fork the worker.

Ray runs this script as `python -I -S fork_client.py SOCKET default_worker.py ...`; it imports no module of modelpool.
It runs as long as the worker: if one of the two ends, so does the other. It starts Python itself, as Ray would, if no
server answers, for a worker with a runtime environment that Ray has not applied yet, and if the server has other files
or networks than this process, as in containers and mount namespaces.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import struct
import sys

#: arguments of Ray's script that applies runtime environments, which it does not pass on
_ENVIRONMENT_OPTION, _LANGUAGE_OPTION, _SETUP_SCRIPT = (
    "--serialized-runtime-env-context=",
    "--language=",
    "setup_worker.py",
)
_NO_ENVIRONMENT = f"{_ENVIRONMENT_OPTION}{{}}"
#: the environment variable of a fork that has the command by which other forks of its server are started
COMMAND_VARIABLE = "MODELPOOL_FORK_COMMAND"
#: a number of bytes, and the pid of a worker
NUMBER = struct.Struct("Q")
#: these differ where two processes of a machine see different files, users, processes or networks
_NAMESPACES = ("mnt", "user", "pid", "net")
_PR_SET_PDEATHSIG = 1


def main(server: str, command: list[str]) -> None:
    """Run `command`, a Python script with its arguments, as a process that the server at the socket `server` forks."""
    _die_with_raylet()
    command = [part for part in command if part != _NO_ENVIRONMENT]
    if any(part.startswith(_ENVIRONMENT_OPTION) for part in command):  # of a task of the user's program
        script = os.path.join(os.path.dirname(command[0]), _SETUP_SCRIPT)
        os.execv(sys.executable, [sys.executable, script, *command])
    command = [part for part in command if not part.startswith(_LANGUAGE_OPTION)]
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(server)
        if not _sees_the_same(connection):
            raise OSError("the server runs in another namespace")
        environment = {**os.environ, COMMAND_VARIABLE: shlex.join([sys.executable, "-I", "-S", __file__, server])}
        call = json.dumps({"command": command, "environment": environment, "folder": os.getcwd()}).encode()
        socket.send_fds(connection, [NUMBER.pack(len(call))], [0, 1, 2])
        connection.sendall(call)
        if not connection.recv(NUMBER.size):
            raise OSError("the server ended")
    except OSError:
        os.execv(sys.executable, [sys.executable, *command])
    connection.recv(1)  # returns when the worker has ended


def _sees_the_same(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = struct.unpack("3i", credentials)[0]
    return all(os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES)


def _die_with_raylet() -> None:
    """Have the kernel end this process with its raylet, which does not always manage to do it itself."""
    with open(f"/proc/{os.getppid()}/comm") as comm:
        if comm.read().strip() == "raylet":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
