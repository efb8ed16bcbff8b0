"""What one run of the command has at hand: its own arguments and a way to get a pool.

The pool comes through here so that nothing loads ray before a command needs it, and tests can bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from modelpool.actors.cli.options import PoolOptions
    from modelpool.actors.cli.ports import Pool


@dataclass(frozen=True, slots=True)
class Session:
    """`arguments` as they were typed, after the command's own name."""

    arguments: tuple[str, ...]
    open_pool: Callable[[PoolOptions], Pool]


def session_of(context: typer.Context) -> Session:
    """The session of the command that runs."""
    session = context.find_root().obj
    assert isinstance(session, Session), "run() gives every command a session"
    return session


def new_session(arguments: Sequence[str]) -> Session:
    """A session with real pools."""
    from modelpool.actors.cli.open_pool import open_pool

    return Session(tuple(arguments), open_pool)
