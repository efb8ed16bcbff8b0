"""`RayConnection`: the connection of a driver to a controller that is a Ray actor, and how calls of actors are awaited.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, TypeAlias, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from modelpool.actors.control.connection import ControllerMethod, P, ResultGone, T
from modelpool.actors.outputs.results.outcomes import PoolLost, PoolUnreachable
from modelpool.actors.ray.control_service import ControlService
from modelpool.actors.ray.owned_values import OwnedValues
from modelpool.actors.ray.reachable import Reach, place_of
from modelpool.actors.ray.survivors import end_left_workers
from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.actors.worker.wire.packed_calls import PACKED_CALLS
from modelpool.actors.worker.wire.packing import result_of
from modelpool.pool.values.core.stage_params import Result

#: a call that waits checks this often whether Ray still works
WAIT_SECONDS = 5.0
#: limit of closing a controller, which only sends messages
CLOSE_SECONDS = 15.0
#: why calls fail after the end of a pool that this program has opened
CLOSED = (
    "the pool is closed: this program has called close(), or left its with block; open one with ModelPool.start() or "
    "ModelPool.connect()"
)


#: a reference to a controller that travels to other processes of the Ray cluster
ControllerHandle: TypeAlias = ActorHandle[Any]


def connected_to(controller: ControllerHandle) -> RayConnection:
    """Return a connection of this process, which is one of the cluster, to a controller."""
    return RayConnection(controller)


class RayConnection:
    """See `Connection`. Without Ray's control service the pool counts as lost, although it may still answer: Ray is
    about to end this process with an abort."""

    def __init__(
        self, controller: ActorHandle[Any], epoch: int = 0, control_service: ControlService | None = None
    ) -> None:
        """`epoch` is the controller's; 0 is unknown. `control_service` is shared by all connections of this process to
        the pool."""
        self._controller, self._epoch = controller, epoch
        self._reach = reach_of(controller)
        self._control_service = control_service or ControlService(ray.get_runtime_context().gcs_address)
        #: images of requests, which the controller is the last to use
        self._owned = OwnedValues()

    @property
    def controller(self) -> ControllerHandle:
        """The controller, as another process of the cluster can use it."""
        return self._controller

    def call(self, question: ControllerMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Connection`."""
        self._check()
        with self._control_service.call():
            known = None if kwargs else PACKED_CALLS.get(question.__name__)
            arguments = None if known is None else known.pack(*args)
            if known is not None and arguments is not None:
                return cast("T", known.unpack(self._get(getattr(self._controller, known.method).remote(*arguments))))
            call = getattr(self._controller, question.__name__)
            return cast("T", self._get(call.remote(*args, **kwargs)))

    def fetch(self, ref: ResultRef) -> Result:
        """See `Connection`. Large arrays are read-only views of the object store."""
        with self._control_service.call():
            if isinstance(ref, bytes):  # it came with the end of its job
                return cast("Result", result_of(ref))
            try:
                result: Result = result_of(self._get(ref))
            except ObjectLostError as lost:
                raise ResultGone(str(lost).splitlines()[0]) from lost
            return result

    def give(self, result: Result) -> ResultRef:
        """See `Connection`."""
        with self._control_service.call():
            ref: ResultRef = ray.put(result)
            self._owned.watch((ref,))
            return ref

    def replace(self, controller: ActorHandle[Any], epoch: int) -> None:
        """Continue with another controller."""
        self._controller, self._epoch, self._reach = controller, epoch, reach_of(controller)

    def end_controller(self) -> None:
        """Close the controller, if it answers within `CLOSE_SECONDS`; then kill it, and with it the remaining workers
        that belong to it."""
        with contextlib.suppress(RayActorError, GetTimeoutError):
            ray.get(self._controller.close.remote(), timeout=CLOSE_SECONDS)
        self.kill_controller()

    def kill_controller(self) -> None:
        """End the controller at once, and with it workers that belong to it. Raises PoolLost without Ray's control
        service."""
        self._check()
        ray.kill(self._controller)

    def leave(self) -> None:
        """Let no call begin any more: this process leaves the Ray cluster. Ray would start another one for a call."""
        self._control_service.end(CLOSED, 0.0)

    def end_workers(self, namespace: str, pool: str) -> None:
        """End the workers of a pool that have outlived its controller, and serve no newer one. Raises PoolLost without
        Ray's control service: then their lease ends them."""
        self._check()
        end_left_workers(namespace, pool, self._epoch)

    def _check(self) -> None:
        check(self._control_service)

    def _get(self, ref: Any) -> Any:
        return awaited(ref, self._control_service, "the controller of the pool is gone", self._reach)


def reach_of(controller: ActorHandle[Any]) -> Reach:
    """Return how this process reaches a controller."""
    return Reach("the controller of the pool", partial(place_of, controller))


def awaited(ref: Any, control_service: ControlService, gone: str, reach: Reach) -> Any:
    """Wait for a call of an actor, as long as Ray's control service answers, and the actor takes connections. Raises
    what the method raises, ObjectLostError, and PoolLost: `gone` if the actor has ended.
    """
    while True:
        try:
            found = ray.get(ref, timeout=WAIT_SECONDS)
        except GetTimeoutError:
            check(control_service)
            if problem := reach.problem():
                raise PoolUnreachable(problem) from None
        except RayTaskError as raised:
            reach.answered()
            raise raised.cause from None
        except ObjectLostError:
            raise
        except ActorUnavailableError as lost:
            raise PoolLost(reach.unavailable()) from lost
        except RayActorError as lost:
            raise PoolLost(gone) from lost
        except RayError as lost:
            raise PoolLost(str(lost).splitlines()[0]) from lost
        else:
            reach.answered()
            return found


def check(control_service: ControlService) -> None:
    """Raise PoolLost without Ray's control service."""
    if problem := control_service.problem():
        raise PoolLost(problem)
