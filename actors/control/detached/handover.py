"""`Handover`: what a controller leaves to the next one in the journal: memory, pins of users, orders of operators."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from modelpool.actors.control.connection import CONTROLLER, Connection
from modelpool.actors.control.detached.left_memory import ended_memory, left_memory, stored_memory
from modelpool.actors.control.detached.submission_journal import Journal, JournalFailed
from modelpool.actors.control.operator_orders import OperatorOrder, OrderTaken
from modelpool.actors.control.status import PinnedModel
from modelpool.pool.values.core.errors import UnknownName, UserError, unknown_name

logger = logging.getLogger(__name__)


class Handover:
    """The part of the journal that is for controllers. `connect` returns a connection to the present one; it raises
    PoolLost or UserError while there is none. Thread-safe."""

    def __init__(self, journal: Journal, connect: Callable[[], Connection]) -> None:
        self._journal = journal
        self._connect = connect
        #: a controller and the journal get pins in the same order
        self._pinning = threading.Lock()
        #: held from the question to the end of the write: an older memory must not replace a newer one
        self.keeping = threading.Lock()
        #: the pool ends: what its controller has now is not for the next pool
        self.has_dropped = False

    def pin(self, models: Sequence[str], replicas: int) -> tuple[PinnedModel, ...]:
        """As `Controller.pin`, for the next controllers too. Raises UserError, and PoolLost without a controller. A
        model that only the journal knows can be unpinned."""
        with self._pinning:
            connection = self._connect()
            try:
                pinned = connection.call(CONTROLLER.pin, tuple(models), replicas)
            except UnknownName:
                if replicas:
                    raise
                pinned = _unpin_known(self._journal, connection, models)
            if not self.has_dropped:
                self._journal.keep_pins(models, replicas)
        return pinned

    def operate(self, order: OperatorOrder) -> OrderTaken:
        """As `Controller.operate`, for the next controllers too: the journal has it before this returns. Raises
        UserError, and PoolLost without a controller."""
        connection = self._connect()
        self._remind(connection)  # first: the value stored below replaces it
        taken = connection.call(CONTROLLER.operate, order)
        with self.keeping:
            found = connection.call(CONTROLLER.memory, sys.maxsize)  # without histories: `keep_memory` fetches them
            if not self.has_dropped:
                self._journal.keep_memory(stored_memory(found.memory, found.controllers))
        return taken

    def hand_over(self, connection: Connection) -> None:
        """Give a controller what the one before it has left in the journal, and have it pin what users have pinned, in
        place of what its configuration says. A model without its file is left out."""
        self._remind(connection)
        with self._pinning:
            for model, replicas in self._journal.pins().items():
                try:
                    connection.call(CONTROLLER.pin, (model,), replicas)
                except UserError as problem:
                    if replicas:  # else it is not pinned, as it should be
                        logger.warning("model %s is not pinned again: %s", model, problem)

    def _remind(self, connection: Connection) -> None:
        """Give a controller the memory of the one before it, unless it has that already."""
        left = left_memory(self._journal.memory())
        connection.call(CONTROLLER.remember, left.memory, left.gap_seconds(), left.controllers)

    def drop(self) -> None:
        """The pool ends, and with it its pins."""
        with self.keeping, suppress(JournalFailed):
            self.has_dropped = True
            self._journal.drop_pins()
            self._journal.keep_memory(ended_memory(self._journal.memory()))


def _unpin_known(journal: Journal, connection: Connection, models: Sequence[str]) -> tuple[PinnedModel, ...]:
    """Unpin the `models` that the controller has pinned. The others may be in the journal only: their file was
    gone when the controller started, or the service was lost before it noted that they are unpinned. Raises
    UnknownName for any other; nothing changes then."""
    known = {pinned.model for pinned in connection.call(CONTROLLER.status).pins}
    kept = journal.pins()
    unknown = next((model for model in models if model not in known and model not in kept), None)
    if unknown is not None:
        raise unknown_name("pinned model", unknown, known | {model for model in kept if kept[model]})
    return connection.call(CONTROLLER.pin, tuple(model for model in models if model in known), 0)
