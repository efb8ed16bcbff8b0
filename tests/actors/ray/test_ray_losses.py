"""Workers that end in all ways on a real Ray: the pool names the cause, and every image is rendered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError

from modelpool.actors.control.losses import Death
from modelpool.actors.ray.ray_losses import death_by_error, one_line
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.fakes import start_fake_pool
from tests.actors.ray.crashing_engine import ENDS, CrashingEngine

SENTENCES = {
    "SEGMENTATION-FAULT": ("crash", "its process crashed: Segmentation fault in "),
    "ABORT": ("crash", "its process crashed: Aborted in crashing_engine.py"),
    "NATIVE-EXIT": ("crash", "its process ended itself: a library called exit"),
    "SIGKILL": ("killed", "another process killed it"),
}


def losses(record: Path) -> list[tuple[str, str]]:
    """Cause and reason of the lost workers in an event log, in order."""
    events = [json.loads(line).get("event", {}) for line in record.read_text().splitlines()]
    return [(e["WorkerDown"].get("cause", "crash"), e["WorkerDown"]["reason"]) for e in events if "WorkerDown" in e]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_the_cause_of_each_loss_is_found_and_the_image_rendered(tmp_path) -> None:
    assert SENTENCES.keys() == ENDS.keys()
    record = tmp_path / "record.jsonl"
    with start_fake_pool("losses", workers=2, record=record, folder=tmp_path, engine=CrashingEngine) as pool:
        pool.wait_ready(120)
        for name in ENDS:
            (image,) = pool.submit(GenerateRequest(model="shapes", prompt=name, seed=1, steps=2)).images()
            assert image.pixels.size
        pool.wait_ready(120)
        troubles = [worker.trouble for worker in pool.status().workers if worker.trouble]
    assert troubles
    found = losses(record)
    assert [cause for cause, _ in found] == [cause for cause, _ in SENTENCES.values()], found
    for (_, reason), (_, sentence) in zip(found, SENTENCES.values(), strict=True):
        assert reason.startswith(sentence), found


def test_errors_of_ray_that_explain_themselves() -> None:
    cases = {
        OutOfMemoryError("Task was killed due to the node running low on memory."): Death.MEMORY_MONITOR,
        NodeDiedError("the node died"): Death.NODE_DIED,
        ActorDiedError(): Death.PROCESS_ENDED,
    }
    for error, death in cases.items():
        assert death_by_error(error).death is death


def test_messages_of_ray_become_one_line_without_ids() -> None:
    text = "The actor died.\n\tclass_name: W\n\tactor_id: 3f\n\tpid: 7\n\tip: 127.0.0.1\nThe actor is dead."
    assert one_line(text) == "The actor died. The actor is dead."
    assert len(one_line("x" * 5000)) < 500
