"""Where the processes of a pool come from: forks of a server, or processes that import for themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelpool.actors.ray.fork_server import (
    CONTROLLER_MODULES,
    ENGINE_MODULES,
    SERVER_VARIABLE,
    ForkServer,
    fork_command,
    fork_environment,
)
from modelpool.actors.ray.ray_session import is_on_this_machine, short_folder


class Forks:
    """Where the processes of a pool come from: an own or a named fork server, or none.

    command  runs instead of Python for its forks; empty without one
    """

    def __init__(self, command: Sequence[str] = (), server: ForkServer | None = None) -> None:
        self.command = command
        self._server = server

    @property
    def environment(self) -> Mapping[str, str]:
        """The Ray runtime environment of actors that are its forks, where Ray does not start all workers so."""
        return fork_environment(self.command)

    @classmethod
    def start(cls, address: str | None, modules: Sequence[str] = ENGINE_MODULES) -> Forks:
        """Start a server that imports `modules`, for a pool at Ray's `address`; use the one that the environment names
        if there is one. None is used if there are no modules, or for other machines. Returns at once: what the caller
        imports next runs at the same time.
        """
        if not modules or not is_on_this_machine(address):
            return cls()
        if SERVER_VARIABLE in os.environ:
            return cls(fork_command(Path(os.environ[SERVER_VARIABLE])))
        server = ForkServer.start(modules, short_folder(), CONTROLLER_MODULES)
        return cls() if server is None else cls(fork_command(server.socket), server)

    def close(self) -> None:
        """End an own server, but none of its forks. Idempotent."""
        if self._server is not None:
            self._server.close()
