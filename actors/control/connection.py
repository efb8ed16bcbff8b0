"""The connection of a driver to the controller, as a protocol.

`actors.ray.ray_connection` implements it for Ray; a controller on an event loop of the same process can be used too.
A driver names the methods of the controller by `CONTROLLER` and does not import it, with the scheduler and all that
builds graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.pool.values.core.stage_params import Result

if TYPE_CHECKING:
    from modelpool.actors.control.controller import Controller

P = ParamSpec("P")
T = TypeVar("T")

#: a method of Controller, such as Controller.status
ControllerMethod: TypeAlias = "Callable[Concatenate[Controller, P], Coroutine[Any, Any, T]]"


class _MethodByName:
    """Stands for a method of the controller."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, controller: Controller, *args: Any, **kwargs: Any) -> Any:
        return getattr(controller, self.__name__)(*args, **kwargs)


class _MethodsByName:
    """Has each public name as an attribute; the type checker knows which names the controller has."""

    def __getattr__(self, name: str) -> _MethodByName:
        if name.startswith("_"):
            raise AttributeError(name)
        return _MethodByName(name)


#: the methods of the controller, for `Connection.call`
CONTROLLER = cast("type[Controller]", _MethodsByName())


class Connection(Protocol):
    """Calls block the calling thread. Any thread may call.

    Every method raises PoolLost if the controller is gone.
    """

    def call(self, question: ControllerMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the controller and return its result. Raises what the method raises."""

    def fetch(self, ref: ResultRef) -> Result:
        """Return the result behind a reference, or a packed one. Raises ResultGone if it is no longer available."""

    def give(self, result: Result) -> ResultRef:
        """Store a result of the driver and return its reference, valid as long as the driver lives."""


class ResultGone(Exception):
    """A result was lost with the machine that stored it."""


class UnknownDriver(RuntimeError):
    """The pool does not know this driver: it was silent for too long, or the pool was restarted."""
