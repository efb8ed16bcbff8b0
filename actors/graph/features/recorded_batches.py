"""The batch sizes of the outputs of a place, and of the requests of a submission to it: what is recorded, the rest
follows. A submission that is resumed finds its images by it, and goes on with their sizes. Pure; imports no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from modelpool.actors.request.field_table import CHOSEN_BATCHES as CHOSEN_BATCHES
from modelpool.actors.request.labels import output_key

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe
    from modelpool.actors.request.requests import GenerateRequest

#: kinds of outputs of one place that are remembered, the latest
KINDS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class BatchKind:
    """What has one batch size in a submission: images of one size by one model."""

    model_sha256: str
    width: int
    height: int
    frames: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> BatchKind:
        """Return the kind of an output."""
        return cls(recipe.model_sha256, recipe.width, recipe.height, recipe.frames)


@dataclass(frozen=True, slots=True)
class SubmittedBatches:
    """What a submission knows about the batch sizes of its requests.

    recorded  the sizes of outputs that exist where its outputs are written, the latest last
    expected  requests in all; 0 if that is not known
    """

    recorded: Mapping[BatchKind, tuple[int, ...]] = field(default_factory=dict)
    expected: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """All recorded sizes."""
        return tuple({size: None for sizes in self.recorded.values() for size in sizes})


NO_BATCHES = SubmittedBatches()


def output_keys(request: GenerateRequest, recipe: Recipe, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the keys (`output_key`) of the outputs that are as good as the output of `recipe`, which comes first: for
    chosen batch sizes ("auto"), those that have one of these sizes instead."""
    batches = [recipe.batch, *(size if size > 1 else 0 for size in sizes if request.batch in CHOSEN_BATCHES)]
    recipes = [recipe if batch == recipe.batch else replace(recipe, batch=batch) for batch in dict.fromkeys(batches)]
    return tuple(output_key(each.digest, request.id or "") for each in recipes)


class RecordedBatches:
    """Collects the batch sizes of existing outputs; of too many kinds, the latest."""

    def __init__(self) -> None:
        self._sizes: dict[BatchKind, tuple[int, ...]] = {}

    def note(self, recipe: Recipe) -> None:
        """Note an output, later than those before."""
        kind, size = BatchKind.of(recipe), recipe.batch or 1
        known = self._sizes.get(kind, ())
        if known[-1:] == (size,):
            return
        self._sizes.pop(kind, None)
        self._sizes[kind] = (*(each for each in known if each != size), size)
        if len(self._sizes) > KINDS_REMEMBERED:
            del self._sizes[next(iter(self._sizes))]

    @property
    def sizes(self) -> Mapping[BatchKind, tuple[int, ...]]:
        """The sizes of each kind so far, the latest last."""
        return dict(self._sizes)
