"""Texts with a batch size: the bytes of a text depend on the size of its pass, and on none of the other texts.

Texts that are read as the empty text is have equal numbers of rows and tokens. A longer text, or one with weights,
would have rows of its own in the pass, or padding, and change its size: such texts have no batch size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.values.core.stage_params import (
    BatchMember,
    Encoded,
    EncodeParams,
    Outcome,
    batch_key,
    encoders_run,
    stage_of,
    task_id,
    why_alone,
)
from modelpool.pool.values.specs.spec import TaskSpec
from tests.pool.families.tiny_relatives import ALL_FAMILIES as FAMILIES
from tests.pool.families.whole_transformer import Whole
from tests.pool.pipeline import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SIZE = 4
TEXTS = (
    "a small red cat on the moon",
    "",
    "a dog",
    "two blue squares, a star and a long road that leads to them",
    "red " * 90,
    "a (red:1.3) cat",
    'a sign with "open"',
)


def members_of(whole: Whole) -> list[BatchMember]:
    """Of the texts that have a batch size."""
    found = []
    roles = encoders_run(EncodeParams(whole.model, (), ""), whole.family.text_encoders, whole.family.sampling)
    uses = tuple(whole.catalog.use(whole.model, role, ()) for role in roles)
    for text in TEXTS:
        work = EncodeParams(whole.model, (), text)
        tokenized = whole.catalog.tokenize(work)
        if not tokenized.is_usual or why_alone(work):
            continue
        work = replace(work, tokens=tokenized.tokens, batch_size=SIZE)
        needed_bytes = SIZE * whole.catalog.figures.activation_bytes(whole.model, work)
        task = TaskSpec(task_id(work, {}), stage_of(work), uses, needed_bytes, 0.1, batch_size=SIZE)
        found.append(BatchMember(task, work, {}, QUIET))
    return found


def encoded(outcome: Outcome) -> tuple[np.ndarray, ...]:
    assert isinstance(outcome, tuple), outcome
    assert outcome[1].batched == SIZE
    assert isinstance(outcome[0], Encoded)
    return outcome[0].arrays


@pytest.mark.counted
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_bytes_of_a_text_depend_on_no_other_text_of_its_pass(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES[name])
    if not whole.family.sampling.reads_text:
        pytest.skip("it reads no text")
    members = members_of(whole)
    assert len({batch_key(member.work) for member in members}) == 1, "they share passes"
    alone = [encoded(whole.engine.run_batch([member])[0]) for member in members]
    for shift in range(1, len(members)):
        turned = [*members[shift:], *members[:shift]][:SIZE]
        for member, outcome in zip(turned, whole.engine.run_batch(turned), strict=True):
            expected = alone[members.index(member)]
            assert all(map(np.array_equal, encoded(outcome), expected)), (member.work, shift)
    whole.engine.close()
    assert any(member.work.text == "" for member in members if isinstance(member.work, EncodeParams))
