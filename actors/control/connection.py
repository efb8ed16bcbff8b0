"""The connection of a driver to the controller, as a protocol.

`actors.ray.ray_connection` implements it for Ray; a controller on an event loop of the same process can be used too.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from modelpool.actors.control.controller import Controller
from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.pool.values.core.stage_params import Result

P = ParamSpec("P")
T = TypeVar("T")

#: a method of Controller, such as Controller.status
ControllerMethod = Callable[Concatenate[Controller, P], Coroutine[Any, Any, T]]


class Connection(Protocol):
    """Calls block the calling thread. Any thread may call.

    Every method raises PoolLost if the controller is gone.
    """

    def call(self, question: ControllerMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the controller and return its result. Raises what the method raises."""

    def fetch(self, ref: ResultRef) -> Result:
        """Return the result behind a reference. Raises ResultGone if it is no longer available."""

    def give(self, result: Result) -> ResultRef:
        """Store a result of the driver and return its reference, valid as long as the driver lives."""


class ResultGone(Exception):
    """A result was lost with the machine that stored it."""
