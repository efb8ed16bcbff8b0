"""What commands that serve a running pool do when it ends: they say so, and wait for the next `modelpool up`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelpool.actors.cli.terminal.screen import say
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.cli.terminal.session import Session

#: interval of looking whether the pool has ended, and whether the next one runs
LOOK_SECONDS = 1.0
#: interval of asking whether its controller is there
ASK_SECONDS = 5.0
#: after this time without the controller that was joined it is joined again: a daemon has replaced it by then, or the
#: pool has ended on a machine from which this one hears nothing
LOST_SECONDS = 30.0


def wait_for_end(
    pool: Pool, now: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep
) -> str:
    """Wait until a pool that was joined has ended, and this process has left its Ray, or until the controller that was
    joined is lost for LOST_SECONDS; return why.
    """
    from modelpool.actors.outputs.results.outcomes import PoolLost

    asked_at, lost_since = now(), None
    while not (reason := pool.why_ended()):
        pause(LOOK_SECONDS)
        if now() - asked_at < ASK_SECONDS:
            continue
        try:
            pool.status()
            lost_since = None
        except PoolLost as lost:
            lost_since = now() if lost_since is None else lost_since
            if now() - lost_since >= LOST_SECONDS:
                return str(lost)
        asked_at = now()
    return reason


def wait_for_next(name: str, reason: str, console: Console) -> None:
    """Wait until a pool of this name runs on this machine. Raises PoolLost with `reason` for the address of a pool, or
    "auto": nobody says where the next one is.
    """
    from modelpool.actors.outputs.results.outcomes import PoolLost
    from modelpool.actors.ray.run_file import running_pool

    if ":" in name or name == "auto":
        raise PoolLost(reason)
    say(console, f"waiting for the next `modelpool up` of {name!r}; Ctrl-C ends this", "yellow")
    while running_pool(name) is None:
        time.sleep(LOOK_SECONDS)


class Rejoining:
    """A connection to a running pool, and to the next ones of its name."""

    def __init__(self, session: Session, name: str, console: Console) -> None:
        """Join the pool. Raises UserError if none runs."""
        self._session, self._name, self._console = session, name, console
        self.pool = self._joined()

    def keep_joined(self) -> None:
        """Join the next pool whenever one has ended, until Ctrl-C. Raises PoolLost as `wait_for_next`."""
        while True:
            reason = wait_for_end(self.pool)
            self.close()
            wait_for_next(self._name, reason, self._console)
            while True:
                try:
                    self.pool = self._joined()
                    break
                except UserError as problem:  # it has ended again, or its controller does not answer yet
                    say(self._console, str(problem), "yellow")
                    time.sleep(LOOK_SECONDS)
            say(self._console, f"joined pool {self._name!r} again")

    def close(self) -> None:
        """Leave the pool. Idempotent."""
        self.pool.__exit__(None, None, None)

    def _joined(self) -> Pool:
        from modelpool.actors.cli.terminal.options import PoolOptions

        return self._session.open_pool(PoolOptions(pool=self._name)).__enter__()
