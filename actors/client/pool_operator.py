"""`PoolOperator`: what operators ask of a running pool: orders, pins, and what would be requested now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelpool.actors.control.connection import CONTROLLER, Connection
from modelpool.actors.control.operator_orders import MOST_ORDER_SECONDS, OperatorOrder, OrderTaken
from modelpool.actors.control.status_values import PinnedModel
from modelpool.pool.values.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    from modelpool.actors.control.detached.job_service import JobsConnection
    from modelpool.scheduler.autoscaling.preview import ScalingPreview
    from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup


class PoolOperator:
    """One pool, as its operators use it. With a journal, what they order holds for a controller that replaces this
    one."""

    def __init__(self, connection: Connection, job_service: Callable[[], JobsConnection]) -> None:
        """`job_service` raises UserError for a pool without one: it ends with its driver, or has no journal."""
        self._connection = connection
        self._job_service = job_service

    def order(self, order: OperatorOrder) -> OrderTaken:
        """Begin to carry out an order: cordon, uncordon or drain a node, cordon or restart a worker.

        Raises UnusableField for a node or worker that the pool does not have (the message lists those that it has),
        and for an order that a disruption limit or a maintenance window forbids.
        """
        if not 0.0 <= order.seconds <= MOST_ORDER_SECONDS:
            raise unusable_field("seconds", order.seconds, f"a number from 0 to {MOST_ORDER_SECONDS:.0f}")
        try:
            service = self._job_service()
        except UserError:
            return self._connection.call(CONTROLLER.operate, order)
        from modelpool.actors.control.detached.job_service import JobService

        return service.call(JobService.operate, order)

    def pin(self, models: tuple[str, ...], replicas: int) -> tuple[PinnedModel, ...]:
        """See `ModelPool.pin`; 0 replicas unpin."""
        try:
            service = self._job_service()
        except UserError:
            return self._connection.call(CONTROLLER.pin, models, replicas)
        from modelpool.actors.control.detached.job_service import JobService

        return service.call(JobService.pin, models, replicas)

    def would_request(
        self, groups: Sequence[NodeGroup] = (), limits: AutoscalingConfig | None = None
    ) -> ScalingPreview:
        """Return the nodes that would be requested for the waiting work now, with the reasons, without requesting any:
        of the pool's groups, or of these, within these limits. Raises UnusableField for a pool without groups, and for
        groups that lack one that workers of the pool are of."""
        return self._connection.call(CONTROLLER.would_request, tuple(groups), limits)
