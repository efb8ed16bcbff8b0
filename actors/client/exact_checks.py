"""`ExactChecks`: the check of a request that its pool would make, in this process, before the pool starts.

It imports torch, which takes seconds. So it is for requests that are likely to be refused (`is_doubtful`): with little
memory for their size, an unknown embedding, no step, or a model that its header does not describe. It answers with the
words of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from modelpool.actors.request.image_fields import DEFAULT_MASKED_STRENGTH, DEFAULT_STRENGTH

if TYPE_CHECKING:
    from modelpool.actors.config.config import PoolConfig
    from modelpool.actors.control.pool_plan import PoolPlan
    from modelpool.actors.graph.common.graph_catalog import GraphCatalog
    from modelpool.actors.request.requests import GenerateRequest

#: a budget below so many times the largest tensor may be too small for a layer with its activations
LAYERS_IN_DOUBT = 4
#: bytes of a pixel in the decoder's input and output; a budget below so many times the image may be too small
PIXEL_BYTES, IMAGES_IN_DOUBT = 24, 4


def is_doubtful(
    request: GenerateRequest, largest_bytes: int, size: tuple[int, int], steps: int, budget_bytes: int | None
) -> bool:
    """Whether a pool is likely to refuse `request`: of a model with a largest tensor of `largest_bytes`, for an output
    of `size`, with `steps`, in `budget_bytes` of device memory (None: not known)."""
    if budget_bytes is not None:
        scale = 1.0 if request.hires is None else request.hires.scale
        image_bytes = size[0] * size[1] * scale * scale * (request.frames or 1) * PIXEL_BYTES
        if budget_bytes < max(LAYERS_IN_DOUBT * largest_bytes, IMAGES_IN_DOUBT * image_bytes):
            return True
    if request.image is not None:
        default = DEFAULT_STRENGTH if request.mask is None else DEFAULT_MASKED_STRENGTH
        if (default if request.strength is None else request.strength) * steps < 1:
            return True
    return request.hires is not None and request.hires.strength * (request.hires.steps or steps) < 1


class ExactChecks:
    """Checks requests as the pool of a configuration would. Opens its catalog for the first one."""

    def __init__(self, config: PoolConfig, on_slow: Callable[[], object] = lambda: None) -> None:
        """`config` is of a pool on this machine in which no GPU computes. `on_slow` is called once, before seconds of
        work."""
        self._config = config
        self._on_slow = on_slow
        self._opened: tuple[PoolPlan, GraphCatalog] | None = None

    def check(self, request: GenerateRequest) -> None:
        """Raise the UserError with which the pool would refuse `request`, which has no images that are not read."""
        plan, catalog = self._open()
        from modelpool.actors.graph.build_graph import build_graph
        from modelpool.actors.graph.features.auto_batch import BatchTerms
        from modelpool.actors.graph.memory_fit import check_fits
        from modelpool.pool.values.specs.spec import JobId

        seeded = request if request.seed is not None else request.model_copy(update={"seed": 0})
        _, graph = build_graph(seeded, JobId("check"), catalog, BatchTerms(plan.auto_batch))
        if plan.budget_bytes is not None:
            check_fits(graph.job, plan.budget_bytes)

    def _open(self) -> tuple[PoolPlan, GraphCatalog]:
        if self._opened is None:
            self._on_slow()
            from modelpool.actors.control.pool_plan import plan_pool

            plan = plan_pool(self._config, gpu_count=0, can_grow=False)
            self._opened = plan, plan.open_catalog()
        return self._opened
