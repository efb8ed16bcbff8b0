"""The batch size that `batch = "auto"` means: chosen from facts that are fixed before a request is submitted.

These are the measured gains of the model (`pool.families.batch_gain_table`), the size of the image, the kind and the
configured memory of the GPUs, and the outputs that the submission has already. Neither what waits nor what runs is
among them: the same submission has the same sizes whenever, and in whatever order, its requests arrive. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recorded_batches import NO_BATCHES, BatchKind, SubmittedBatches
from modelpool.pool.values.core.batch_gains import BatchChoice, BatchedWork
from modelpool.pool.values.core.errors import format_bytes
from modelpool.pool.values.core.stage_params import DecodeParams, EncodeParams, SampleParams, StageParams
from modelpool.pool.values.specs.spec import ComponentKey, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes

#: part of a GPU's memory that a batch may need, with its weights: the rest is for the device, copies ahead and errors
#: of estimates. A batch that does not fit fails, since a smaller one would change its bytes
FIT_SHARE = 0.85
#: assumed memory of GPUs of which nothing is known when a request is submitted
ASSUMED_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class AutoBatch:
    """What a pool's configuration says about `batch = "auto"`.

    size         for all requests that may have one; 0: as measured
    least_bytes  memory of the smallest GPU that may run them; None if it is not configured
    workers      number of workers; 1 if it is not configured
    """

    size: int = 0
    least_bytes: int | None = None
    workers: int = 1

    def usual(self, work: BatchedWork, width: int, height: int, frames: int, expected: int = 0) -> BatchChoice:
        """Return the size for images of this size, before what a submission has already."""
        if self.size:
            return BatchChoice(self.size, "set in the configuration ([pool] batch)")
        return work.usual_size(width, height, frames, expected, self.workers)


AS_MEASURED = AutoBatch()


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """What decides about `batch = "auto"` besides the request and its model: the pool, and the submission."""

    pool: AutoBatch = AS_MEASURED
    submission: SubmittedBatches = NO_BATCHES


USUAL_TERMS = BatchTerms()


def chosen_batch(kind: BatchKind, graph: JobGraph, work: BatchedWork, terms: BatchTerms) -> BatchChoice:
    """Return the batch size of the request with this graph, which has been built with any size.

    Images of this kind that exist decide, so that a submission that is resumed has one size, also after the table of
    gains or the configuration was changed; those without a batch size have 1."""
    auto, known = terms.pool, terms.submission
    width, height = _largest_sampled(graph, kind)
    choice = auto.usual(work, width, height, kind.frames, known.expected)
    if recorded := known.recorded.get(kind, ()):
        usual = auto.usual(work, width, height, kind.frames).size
        size = next((size for size in (choice.size, usual) if size in recorded), recorded[-1])
        choice = choice if size == choice.size else BatchChoice(size, "as images of this kind that exist there")
    if auto.least_bytes is not None:
        room_bytes = auto.least_bytes
    elif work.device_bytes is not None:
        room_bytes = work.device_bytes or ASSUMED_BYTES
    else:
        return choice
    size = choice.size
    while size > 1 and not _fits(graph, size, int(room_bytes * FIT_SHARE)):
        size //= 2
    if size < choice.size:
        return BatchChoice(size, f"{choice.size} do not fit in {format_bytes(room_bytes)} with the weights")
    return choice


def _largest_sampled(graph: JobGraph, kind: BatchKind) -> tuple[int, int]:
    shapes = [work.shape for work in graph.works.values() if isinstance(work, SampleParams)]
    largest = max(shapes, key=lambda shape: shape.width * shape.height, default=None)
    return (kind.width, kind.height) if largest is None else (largest.width, largest.height)


def _fits(graph: JobGraph, size: int, room_bytes: int) -> bool:
    """Whether passes of `size` keep as much of the weights on a GPU as single ones do, and fit in any case."""
    weights = {spec.key: spec.weight_bytes for spec in graph.components}
    has_size = any(task.batch_size > 1 for task in graph.job.tasks)
    return all(
        _task_fits(task, size if _is_in_passes(graph.works[task.task_id], has_size) else 1, room_bytes, weights)
        for task in graph.job.tasks
        if task.together
    )


def _is_in_passes(work: StageParams, has_size: bool) -> bool:
    """Whether tasks like `work` may run in passes of the batch size of their request. `has_size`: the graph was built
    with one, so that texts in passes have it."""
    if isinstance(work, EncodeParams):
        return work.batch_size > 1 or not has_size
    return isinstance(work, SampleParams) or (isinstance(work, DecodeParams) and work.gains_in_passes)


def _task_fits(task: TaskSpec, size: int, room_bytes: int, weights: Mapping[ComponentKey, int]) -> bool:
    one_bytes = (task.counted_bytes or task.activation_bytes) // task.batch_size
    weight_bytes = sum(weights[use.component] for use in task.uses)
    if weight_bytes + needed_bytes(task.uses, one_bytes) <= room_bytes:
        return weight_bytes + needed_bytes(task.uses, size * one_bytes) <= room_bytes
    # the weights stream in any case, and once for all images of a pass
    return needed_bytes(task.uses, size * one_bytes) <= room_bytes
