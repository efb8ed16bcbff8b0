"""A driver's line to the controller, as a protocol: questions go out, answers and results come back.

`actors.ray.ray_connection` is the real one; a controller on an event loop of the same process serves as well.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from modelpool.actors.control.controller import Controller
from modelpool.actors.wire.messages import ResultRef
from modelpool.pool.core.stage_params import Result

P = ParamSpec("P")
T = TypeVar("T")

#: a method of Controller, such as Controller.status
Question = Callable[Concatenate[Controller, P], Coroutine[Any, Any, T]]


class Line(Protocol):
    """Waits in the calling thread. Any thread may call.

    Every method raises PoolLost when the controller is gone.
    """

    def ask(self, question: Question[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call that method of the controller; its answer. Raises what the method raises."""

    def fetch(self, ref: ResultRef) -> Result:
        """The result behind a reference. Raises ResultGone when it cannot be read any more."""

    def give(self, result: Result) -> ResultRef:
        """A reference to a result of the driver's own, good for as long as the driver lives."""


class ResultGone(Exception):
    """A result was lost with the machine that held it."""
