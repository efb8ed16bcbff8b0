"""`build_requests`: converts requests to task graphs by a catalog that others use at the same time.

A request of a new size costs some tenths of a second. The catalog answers one question at a time, and so converts only
some requests for each question: other callers get their turn in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from modelpool.actors.control.catalog_questions import BUILD_SOME
from modelpool.actors.control.catalog_service import CatalogQueries
from modelpool.actors.control.graph_shapes import BuiltRequest, GraphShapes
from modelpool.actors.control.question_turns import Asker, QuestionTurns
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS, BatchTerms
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId

#: requests of one question: more would not be converted in the time that one may take
MOST_ASKED = 16
#: requests after which the event loop gets its turn
_YIELD_AFTER = 8


async def build_requests(
    catalog: CatalogQueries,
    wanted: Sequence[tuple[JobId, GenerateRequest]],
    capacity_bytes: int | None,
    until_error: bool = False,
    turns: QuestionTurns | None = None,
    user: str = "",
    batches: BatchTerms = USUAL_TERMS,
) -> list[BuiltRequest | UserError]:
    """Convert each request to a task graph, or return its error; `until_error`: those up to the first error. Requests
    that differ only in their seed are converted once. `turns` has the questions of all callers in turns;
    requests without a user ask as `user`. `batches` decide about batch sizes."""
    turns, asker = turns or QuestionTurns(), Asker(user)
    shapes = GraphShapes()
    numbers: list[int | None] = []
    for _, request in wanted:
        numbers.append(shapes.number(request))
        await _yield_after(len(numbers))
    built: list[BuiltRequest | UserError] = []
    ready: dict[int, BuiltRequest | UserError] = {}
    while (index := len(built)) < len(wanted):
        job_id, request = wanted[index]
        found = ready.pop(index, None) or shapes.derived(numbers[index], request, job_id)
        if found is None:
            asked = shapes.to_build(numbers, index, MOST_ASKED, ready)
            asker.user = request.user or user
            async with turns.turn(asker, _characters(request)):
                some = [wanted[each] for each in asked]
                answers = await catalog.ask(BUILD_SOME, some, capacity_bytes, until_error, batches)
            for each, answer in zip(asked, answers, strict=False):
                ready[each] = answer
                shapes.note(numbers[each], answer)
            continue
        built.append(found)
        if until_error and isinstance(found, UserError):
            break
        await _yield_after(len(built))
    return built


def _characters(request: GenerateRequest) -> int:
    """Return the length of the texts of a request, the first one of a question. After a long one, which takes longer
    than a question may, no other one is converted."""
    return sum(len(text) for _, text in request.texts())


async def _yield_after(count: int) -> None:
    if count % _YIELD_AFTER == 0:
        await asyncio.sleep(0)
