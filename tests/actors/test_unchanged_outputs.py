"""Images, videos and audio are those recorded in `tests/golden/unchanged_outputs.json`, request by request.

A refactoring must leave them as they are. With MODELPOOL_EXACT=1, every digest must be equal; this holds on the
processor of the record only. Without it, outputs may differ by rounding.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelpool.actors.worker.gpu_worker import WorkerEngine
from tests.actors.interrupting import Interrupting
from tests.actors.unchanged_outputs import (
    apart,
    differences,
    digest_of,
    digests,
    fingerprint,
    load_record,
    run_requests,
    write_inputs,
    write_models,
)

#: in which the requests of the record are divided; one of them runs at a time
PARTS = 3


@dataclass(frozen=True)
class Made:
    """Outputs of the requests of `record`, with the models and inputs in `folder`."""

    folder: Path
    record: dict[str, Any]
    _made: dict[int, dict[str, np.ndarray | str]] = field(default_factory=dict)

    def wanted(self, part: int) -> list[dict[str, Any]]:
        """The recorded outputs of a part."""
        return self.record["outputs"][part::PARTS]

    def outputs(self, part: int) -> dict[str, np.ndarray | str]:
        """What the requests of a part make, by id of the output, run as usual."""
        if part not in self._made:
            self._made[part] = dict(run_requests(self.folder, self.wanted(part)))
        return self._made[part]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("outputs")
    write_models(folder / "models")
    write_inputs(folder / "inputs")
    return Made(folder, load_record())


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_outputs_are_those_recorded(part: int, made: Made) -> None:
    """All samplers, models, inputs, batches and divisions."""
    exact, record = os.environ.get("MODELPOOL_EXACT") == "1", {**made.record, "outputs": made.wanted(part)}
    found = differences(record, digests(made.folder / "models"), made.outputs(part), exact=exact)
    assert not found, "\n".join([f"{len(found)} differences:", *found])


@pytest.mark.slow
@pytest.mark.nightly(usually="tests/actors/test_stop_and_resume.py")
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
def test_outputs_are_the_same_if_every_run_stops_and_resumes_at_every_step(made: Made) -> None:
    """The engine stops each run after each step and resumes it from bytes."""
    outputs = made.record["outputs"]
    engines: list[Interrupting] = []

    def wrap(engine: WorkerEngine) -> WorkerEngine:
        engines.append(Interrupting(engine, every=1))
        return engines[-1]  # type: ignore[return-value]

    resumed = dict(run_requests(made.folder, outputs, wrap))
    usual = {name: output for part in range(PARTS) for name, output in made.outputs(part).items()}
    other = {name for name, output in usual.items() if not _equal(resumed[name], output)}
    # those recorded as depending on what shared a run with them may share it with others here
    assert other <= {output["id"] for output in outputs if not output["exact"]}
    stops = [stop for engine in engines for stop in engine.stops]
    works = [work for engine in engines for work in engine.tasks]
    assert len(stops) == sum(work.steps_run - 1 for work in works) > len(outputs)


def _equal(one: np.ndarray | str, other: np.ndarray | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return digest_of(one) == digest_of(other)


def test_the_record_has_many_outputs_of_all_kinds() -> None:
    outputs = load_record()["outputs"]
    assert len({output["id"] for output in outputs}) == len(outputs) >= 40
    assert {len(output["shape"]) for output in outputs} == {2, 3, 4}, "audio, images, videos"
    assert len({output["request"]["model"] for output in outputs}) >= 8


def test_a_changed_output_is_found() -> None:
    image = np.random.default_rng(1).integers(0, 256, (16, 24, 3), np.uint8)
    output = {"id": "a", "dtype": "uint8", "shape": [16, 24, 3], "exact": True}
    output |= {"pixels_sha256": digest_of(image), "fingerprint": fingerprint(image)}
    record = {"files": {"m": "1"}, "outputs": [output]}
    rounded, other = image.copy(), image.copy()
    rounded[0, 0, 0] ^= 1
    other[:8, :8] = 255 - other[:8, :8]
    for exact in (False, True):
        assert differences(record, {"m": "1"}, {"a": image}, exact) == []
        assert bool(differences(record, {"m": "1"}, {"a": rounded}, exact)) == exact
        assert len(differences(record, {"m": "2"}, {"a": other}, exact)) == 2
        assert differences(record, {"m": "1"}, {"a": image[:8]}, exact)
        assert differences(record, {"m": "1"}, {"a": "refused"}, exact) == ["a: refused"]
        assert differences(record, {"m": "1"}, {}, exact)


def test_a_changed_audio_is_found() -> None:
    audio = np.random.default_rng(1).uniform(-1, 1, (800, 2)).astype(np.float32)
    assert apart(fingerprint(audio), fingerprint(audio * np.float32(1 - 1e-6))) <= 1
    for other in (0.9 * audio, -audio, audio[::-1], audio[:, ::-1], audio[:, :1]):
        assert apart(fingerprint(audio), fingerprint(other)) > 1
