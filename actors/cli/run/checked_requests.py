"""`CheckedRequests`: the requests of a command on their way into the pool, and what became of each: kept, refused,
accepted.

Knows recipes and outputs that exist; neither the pool nor how requests are read. The pool takes the requests and asks
for the decisions in a thread of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelpool.actors.cli.terminal.screen import counted
from modelpool.actors.graph.features.recorded_batches import output_keys
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe
    from modelpool.actors.outputs.place import KeptImage
    from modelpool.actors.request.requests import GenerateRequest


#: kinds of images with printed batch sizes
MOST_CHOSEN = 16
#: requests that the pool checks together: enough that the calls cost little
CHUNK = 256


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """A batch size that the pool chose for images of one kind."""

    model: str
    width: int
    height: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """One output to generate. `place` is its number among all, from 0; `origin` is the source of the request."""

    place: int
    request: GenerateRequest
    origin: str = ""


@dataclass(frozen=True, slots=True)
class WantedOutputs:
    """The outputs that a command wants, in chunks that are submitted together, as they are read.

    chunks         with consecutive places from 0
    expected       about how many there are, the invalid ones included; None if that is not known
    invalid_count  returns the number of lines that were invalid so far; they are not in `chunks` and were reported
    source         the file that has them as lines; "" without one
    count          of the outputs; 0 if it is not known, since there are many
    """

    chunks: Iterator[Sequence[WantedOutput]]
    expected: int | None
    invalid_count: Callable[[], int] = lambda: 0
    source: str = ""
    count: int = 0

    @classmethod
    def of(cls, wanted: Sequence[WantedOutput], invalid: int = 0) -> WantedOutputs:
        """Return all of these; `invalid` others were reported."""
        chunks = (wanted[begin : begin + CHUNK] for begin in range(0, len(wanted), CHUNK))
        return cls(chunks, len(wanted) + invalid, lambda: invalid, count=len(wanted))


class CheckedRequests:
    """Decides which outputs are generated. Any thread may read the counts."""

    def __init__(
        self,
        wanted: WantedOutputs,
        finished: Mapping[str, KeptImage],
        on_kept: Callable[[WantedOutput, KeptImage], None],
        on_refused: Callable[[WantedOutput, UserError], None],
        on_checked: Callable[[CheckedRequests], None],
        failed_before: Set[str] = frozenset(),
        batch_sizes: Sequence[int] = (),
    ) -> None:
        """`finished` are the outputs that exist, by their keys (`output_key`), and `failed_before` those that could not
        be generated. For requests with the batch size "auto", outputs with one of `batch_sizes` count, too. `on_kept`
        and `on_refused` are called for each request that has such an output, and for each that the pool cannot
        generate; `on_checked` once, after the last decision.
        """
        self._wanted = wanted
        self._finished = finished
        self._on_kept = on_kept
        self._on_refused = on_refused
        self._on_checked = on_checked
        self._failed_before = failed_before
        self._batch_sizes = tuple(batch_sizes)
        #: batch sizes that were chosen, with their reasons, and for how many accepted requests each
        self.chosen_batches: Counter[ChosenBatch] = Counter()
        self._lock = threading.Lock()
        self._undecided: dict[int, WantedOutput] = {}
        #: those that have not ended
        self._accepted: dict[int, WantedOutput] = {}
        self._nouns: set[str] = set()
        self._decided = 0
        #: the origin of the last decision, whether one of its requests was refused, and the lines so far
        self._origin: str | None = None
        self._origin_refused = False
        self._line_count = 0
        self._refused_line_count = 0
        #: requests that were accepted so far
        self.accepted_count = 0
        self.kept_count = 0
        self.refused_count = 0
        #: accepted requests that failed in an earlier run
        self.tried_again_count = 0
        #: whether every request was decided
        self.is_complete = False

    def chunks(self) -> Iterator[Sequence[GenerateRequest]]:
        """Yield the requests, for `ModelPool.submit_stream`."""
        for chunk in self._wanted.chunks:
            with self._lock:
                self._undecided |= {one.place: one for one in chunk}
            yield [one.request for one in chunk]
        self.is_complete = True
        self._on_checked(self)

    def decide(self, place: int, answer: Recipe | UserError) -> bool:
        """Return whether the request at `place` is to be generated, by its recipe or its error."""
        with self._lock:
            one = self._undecided.pop(place)
            self._decided += 1
            self._count_line(one.origin, isinstance(answer, UserError))
            if isinstance(answer, UserError):
                self.refused_count += 1
            else:
                self._nouns.add(
                    "video" if answer.frames and not answer.is_layers else "audio clip" if answer.seconds else "image"
                )
                key = self._key(one.request, answer)
                if key not in self._finished:
                    self._accepted[place] = one
                    self.accepted_count += 1
                    self.tried_again_count += key in self._failed_before
                    self._count_batch(answer)
                    return True
                self.kept_count += 1
        if isinstance(answer, UserError):
            self._on_refused(one, answer)
        else:
            self._on_kept(one, self._finished[self._key(one.request, answer)])
        return False

    def _key(self, request: GenerateRequest, recipe: Recipe) -> str:
        """Return the key of the output of a request: of one that exists, if there is one."""
        keys = output_keys(request, recipe, self._batch_sizes)
        return next((key for key in keys if key in self._finished), keys[0])

    def _count_batch(self, recipe: Recipe) -> None:
        if recipe.batch_reason:
            chosen = ChosenBatch(recipe.model, recipe.width, recipe.height, recipe.batch or 1, recipe.batch_reason)
            if chosen in self.chosen_batches or len(self.chosen_batches) < MOST_CHOSEN:
                self.chosen_batches[chosen] += 1

    def take(self, place: int) -> WantedOutput:
        """Return the accepted request at `place`, which has ended, and forget it."""
        with self._lock:
            return self._accepted.pop(place)

    def drop(self, place: int) -> None:
        """Forget the request at `place`, which was cancelled, if it was accepted."""
        with self._lock:
            self._accepted.pop(place, None)

    def _count_line(self, origin: str, is_refused: bool) -> None:
        """Count the line of a decision: a line with several requests is one, and invalid if one of them is."""
        if origin != self._origin:
            self._origin, self._origin_refused = origin, False
            self._line_count += 1
        if is_refused and not self._origin_refused:
            self._origin_refused = True
            self._refused_line_count += 1

    @property
    def invalid_lines(self) -> str:
        """The number of lines of the file that cannot be generated, so far, as text; "" if there are none."""
        count = self._refused_line_count + self._wanted.invalid_count()
        return counted(count, "invalid line") if count and self._wanted.source else ""

    @property
    def valid_line_count(self) -> int:
        """Number of lines that can be generated or exist, so far."""
        return self._line_count - self._refused_line_count

    @property
    def source(self) -> str:
        """The file of the requests; "" without one."""
        return self._wanted.source

    @property
    def failed_count(self) -> int:
        """Number of requests that are not generated because they are invalid or impossible, so far."""
        return self.refused_count + self._wanted.invalid_count()

    @property
    def expected_count(self) -> int:
        """About how many requests will be accepted in the end; at least those so far."""
        if self.is_complete or self._wanted.expected is None:
            return self.accepted_count
        return max(self.accepted_count, self._wanted.expected - self.kept_count - self.failed_count)

    @property
    def waits_for(self) -> str:
        """What the check of the first requests waits for; "" once one is decided."""
        return "" if self._decided or self.is_complete else "waiting: the catalog loads torch and reads the models"

    @property
    def words(self) -> str:
        """How far the check is: "checked 12,000 of 50,000"; "" before the first decision and once it is complete."""
        if self.is_complete or not self._decided:
            return ""
        checked, expected = self._decided + self._wanted.invalid_count(), self._wanted.expected
        of_all = "" if expected is None else f" of {max(expected, checked):,}"
        return f"checked {checked:,}{of_all}"

    @property
    def noun(self) -> str:
        """What each output is: image, video, audio clip, or file if they differ."""
        return next(iter(self._nouns)) if len(self._nouns) == 1 else "file" if self._nouns else "image"
