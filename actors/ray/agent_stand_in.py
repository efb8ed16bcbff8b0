"""Stands in for an agent of Ray, which a Ray of our own starts later, or not at all.

A script without imports of ours, which a raylet runs as `python -I -S agent_stand_in.py PORTS NODE SECONDS [COMMAND]`.
Ray requires both of its agents, each a second of CPU time and tens of MB. Without COMMAND, this one announces that the
agent does not exist. With it, it keeps a port for the agent, and becomes it after SECONDS; who wants it before has to
wait. It ends with the raylet.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time

#: names of the files that announce ports of the agent that exports metrics, before the name of the node
EXPORT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
#: of the agent for runtime environments: the name of the file, and the option of the agent
ENVIRONMENT_PORT = "runtime_env_agent_port"
ENVIRONMENT_PORT_OPTION = "--runtime-env-agent-port="
#: Ray's number of a port that nobody listens to
_NO_PORT = -1
_LOOK_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def main(ports: str, node: str, seconds: float, command: list[str]) -> None:
    """Announce ports in the folder `ports` for the node; wait, and become the agent that `command` starts."""
    raylet = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not command:
        for name in EXPORT_PORTS:
            announce(ports, name, node, _NO_PORT)
        while os.getppid() == raylet:  # where the kernel does not end it
            time.sleep(_LOOK_SECONDS)
        return
    # it does not listen: Ray tries again until the agent does. The agent has it, too: a port that another program took
    # before it listens would end the agent, and with it the raylet. Both may have it, as both allow its reuse
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))  # of all addresses: the agent listens at its node's
    kept.set_inheritable(True)
    port = kept.getsockname()[1]
    announce(ports, ENVIRONMENT_PORT, node, port)
    time.sleep(seconds)
    os.execv(command[0], [*command, f"{ENVIRONMENT_PORT_OPTION}{port}"])


def announce(folder: str, name: str, node: str, port: int) -> None:
    """Write the file that announces a port, at once."""
    path = os.path.join(folder, f"{name}_{node}")
    with open(f"{path}.new", "w") as file:
        file.write(str(port))
    os.rename(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
