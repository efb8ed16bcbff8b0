"""Failed outputs are remembered next to the manifest of any place until they are listed, and one time each."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from modelpool.actors.outputs.failures import FAILURES_NAME, FailedOutput, parse_failure
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout, declare_layout
from modelpool.actors.outputs.open_outputs import existing_outputs, open_outputs
from modelpool.actors.outputs.output_file import FinishedOutput
from modelpool.actors.request.labels import Labels
from modelpool.pool.values.core.errors import UserError
from tests.actors.outputs.test_folder import image


def failure(of: FinishedOutput, message: str = "no memory", at: float = 1.0) -> FailedOutput:
    return FailedOutput.of(of.recipe, of.labels, of.index, of.job_id, "internal", message, at)


def labelled(seed: int, label_id: str) -> FinishedOutput:
    made = image(seed=seed, index=seed)
    return FinishedOutput(
        made.recipe, made.output, made.index, made.job_id, made.worker, made.seconds, made.tasks, Labels(label_id)
    )


def test_a_failure_is_named_until_its_output_is_listed(tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    declare_layout(sharded, OutputLayout(LayoutKind.WEBDATASET, 10))
    for address in (tmp_path / "folder", f"memory://{uuid.uuid4().hex}/outputs", sharded):
        place = open_outputs(address)
        assert place.failures() == ()
        first, second = labelled(1, "cat-1"), labelled(2, "")
        place.note_failures([failure(first, "no memory"), failure(second, at=2.0)])
        place.note_failures([failure(first, "no memory again", at=3.0)])
        found = {each.key: each for each in existing_outputs(address).failures()}
        assert {key: each.message for key, each in found.items()} == {
            first.key: "no memory again",
            second.key: "no memory",
        }
        one = found[first.key]
        assert one == failure(first, "no memory again", at=3.0)
        assert one.title == "job job-1 (id cat-1)"
        assert one.words == f"internal: no memory again ({first.recipe.model}, 'a red circle', seed 1)"
        place.write(first)
        for again in (place, existing_outputs(address)):
            assert [each.key for each in again.failures()] == [second.key]
        place.finish()


def test_the_list_of_a_folder_drops_what_is_over_and_skips_what_is_damaged(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    for count in range(20):
        out.note_failures([failure(image(seed=1), f"attempt {count}"), failure(image(seed=2))])
    path = tmp_path / FAILURES_NAME
    path.write_bytes(b'no JSON\n{"key": 3}\n' + path.read_bytes() + b'{"torn')
    out.write(image(seed=2))
    (left,) = OutputFolder(tmp_path).failures()
    assert left.message == "attempt 19"
    assert path.read_bytes() == left.as_line(), "opening a place for writing keeps one line for each"
    out.write(image(seed=1))
    assert OutputFolder(tmp_path).failures() == ()
    untouched = tmp_path / "untouched"
    OutputFolder(untouched)
    assert not (untouched / FAILURES_NAME).exists()


def test_a_failure_is_bounded_and_checked() -> None:
    long = FailedOutput.of(image(prompt="x" * 9000).recipe, Labels(), 0, "j", "internal", "y" * 90_000, 1.0)
    assert len(long.as_line()) < 4000
    assert parse_failure(json.loads(long.as_line())) == long
    whole = failure(image()).as_json()
    for name, wrong in (("key", 1), ("index", "0"), ("at", "now"), ("seed", None), ("at", True)):
        with pytest.raises(UserError, match=name):
            parse_failure({**whole, name: wrong})
    with pytest.raises(UserError, match="list"):
        parse_failure([])
