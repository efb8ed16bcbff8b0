"""The context of one run of the command: its arguments, and a function that opens a pool.

Pools are opened through it so that nothing loads ray before a command needs it, and so that tests can substitute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.cli.terminal.options import PoolOptions
    from modelpool.actors.client.start_checks import NameCheck
    from modelpool.actors.control.status_values import PoolStatus


def no_answer(name: str) -> PoolStatus | None:
    """Leave the question for a status to a connection with the pool."""
    return None


def no_simulation(options: PoolOptions) -> bool:
    """Say nothing about GPUs."""
    return False


def no_name_check(options: PoolOptions) -> NameCheck:
    """Return a check that leaves every name to the pool."""
    from modelpool.actors.client.start_checks import NameCheck

    return NameCheck(None)


@dataclass(frozen=True, slots=True)
class Session:
    """The context of one run of the command.

    arguments    as typed, without the command's name
    check_names  returns the check of names in requests, before a pool is opened
    ask_status   returns the status of a running pool, by name, without a connection to it; None if that is impossible
    simulates    whether it is certain that a pool that is started has simulated GPUs
    """

    arguments: tuple[str, ...]
    open_pool: Callable[[PoolOptions], Pool]
    check_names: Callable[[PoolOptions], NameCheck] = no_name_check
    ask_status: Callable[[str], PoolStatus | None] = no_answer
    simulates: Callable[[PoolOptions], bool] = no_simulation


def session_of(context: typer.Context) -> Session:
    """Return the session of the running command."""
    session = context.find_root().obj
    assert isinstance(session, Session), "run() gives every command a session"
    return session


def new_session(arguments: Sequence[str]) -> Session:
    """Return a session with real pools."""
    from modelpool.actors.cli.terminal.open_pool import ask_status, name_check, open_pool, simulates

    return Session(tuple(arguments), open_pool, name_check, ask_status, simulates)
