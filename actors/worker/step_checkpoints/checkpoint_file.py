"""The file of one checkpoint: the `RunState` of a sampling run between two steps, as safetensors with a digest.

Rules
1. A file that is read back equals the state that was written, to the last bit, or is refused.
2. No code is stored or run: numbers and one JSON text.
3. A state continues only under the versions that computed it: others may round differently, and the result would be
   neither what one version computes nor the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from modelpool.actors.request.strict import Strict
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import read_header
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite, write_safetensors
from modelpool.pool.files.formats.strict_json import BadJson, read_object
from modelpool.pool.values.core.errors import CorruptFile, UserError
from modelpool.pool.values.core.results import FloatArray, GuidanceState, RunState, SamplerState
from modelpool.pool.values.specs.spec import TaskId

#: first value of the metadata; another number for another layout
FORMAT = "modelpool step checkpoint 1"
_DTYPE = "F32"
#: keys of the metadata; every other one is refused by the digest
_FORMAT, _FACTS, _VERSIONS, _DIGEST = "format", "run", "versions", "sha256"


class OtherVersions(UserError):
    """A valid checkpoint that other versions of modelpool or of its libraries wrote."""


class _Facts(Strict):
    """What a state has besides its tensors; `task` is the id of its task."""

    task: str
    step: int
    steps: int
    levels: tuple[float, ...] = ()
    numbers: tuple[float, ...] = ()
    draws: int = 0
    guidance_levels: int = 0
    guidance_level: float | None = None
    inputs_drawn: int = 0


def write_checkpoint(path: Path, task_id: TaskId, state: RunState, versions: Mapping[str, str]) -> int:
    """Write the state of `task_id` to `path` atomically, synced to the disk, in place of an existing file; return its
    size in bytes. Raises OutputFailed."""
    sampler, guidance = state.sampler, state.guidance
    facts = _Facts(
        task=task_id,
        step=state.step,
        steps=state.steps,
        levels=sampler.levels,
        numbers=sampler.numbers,
        draws=sampler.draws,
        guidance_levels=guidance.levels,
        guidance_level=guidance.level,
        inputs_drawn=guidance.inputs_drawn,
    )
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(state)}
    for name, array in arrays.items():
        assert array.dtype == np.float32, f"{name} of {task_id} has the type {array.dtype}"
    texts = {
        _FORMAT: FORMAT,
        _FACTS: facts.model_dump_json(),
        _VERSIONS: json.dumps(dict(versions), sort_keys=True),
    }
    tensors = [
        TensorToWrite(name, _DTYPE, array.shape, lambda array=array: (_bytes_of(array),))  # type: ignore[misc]
        for name, array in arrays.items()
    ]
    return write_safetensors(path, tensors, texts | {_DIGEST: _digest(texts, arrays)}, overwrite=True)


def read_checkpoint(path: Path, task_id: TaskId, steps: int, versions: Mapping[str, str]) -> RunState:
    """Return the state in the file at `path`, of a run of `task_id` with `steps` steps.

    Raises CorruptFile for anything but a complete file of such a run, and OtherVersions if `versions` did not write it.
    """
    header = read_header(path)
    texts = dict(header.metadata)
    digest = texts.pop(_DIGEST, None)
    if texts.get(_FORMAT) != FORMAT:
        raise CorruptFile(f"{path}: found format {texts.get(_FORMAT)!r}, expected {FORMAT!r}")
    arrays: dict[str, FloatArray] = {}
    with open_regular(path, "a checkpoint") as (file, _):
        for name, entry in header.tensors.items():
            if entry.dtype != _DTYPE:
                raise CorruptFile(f"{path}: tensor {name!r}: found type {entry.dtype}, expected {_DTYPE}")
            file.seek(entry.begin)
            content = file.read(entry.storage_bytes)
            if len(content) != entry.storage_bytes:
                raise CorruptFile(f"{path}: truncated while it was read, in tensor {name!r}")
            arrays[name] = np.frombuffer(content, np.float32).reshape(entry.shape).copy()
    if digest != _digest(texts, arrays):
        raise CorruptFile(f"{path}: found other content than its digest promises, {digest}")
    facts = _facts(path, texts)
    if (facts.task, facts.steps) != (task_id, steps) or not 0 < facts.step < steps:
        raise CorruptFile(
            f"{path}: found step {facts.step} of {facts.steps} of {facts.task}, expected one of {steps} of {task_id}"
        )
    if texts.get(_VERSIONS) != json.dumps(dict(versions), sort_keys=True):
        raise OtherVersions(f"{path}: written by {texts.get(_VERSIONS)}, expected {dict(versions)}")
    return _state(path, facts, arrays)


def _facts(path: Path, texts: Mapping[str, str]) -> _Facts:
    try:
        return _Facts(**read_object(texts.get(_FACTS, "").encode()))
    except (BadJson, UserError) as problem:
        raise CorruptFile(f"{path}: {_FACTS} {problem}") from None


def _state(path: Path, facts: _Facts, arrays: Mapping[str, FloatArray]) -> RunState:
    samples, predictions = arrays.get("samples"), arrays.get("predictions")
    expected = len(facts.levels)
    if samples is None or expected != (0 if predictions is None else len(predictions)):
        raise CorruptFile(f"{path}: found tensors {sorted(arrays)}, expected samples and {expected} predictions")
    return RunState(
        facts.step,
        facts.steps,
        SamplerState(samples, facts.levels, predictions, arrays.get("start"), facts.numbers, facts.draws),
        GuidanceState(
            facts.guidance_levels,
            facts.guidance_level,
            arrays.get("differences"),
            arrays.get("before"),
            facts.inputs_drawn,
        ),
    )


def _arrays(state: RunState) -> Iterator[tuple[str, FloatArray]]:
    """Yield the tensors of a state under their names in the file."""
    sampler, guidance = state.sampler, state.guidance
    yield "samples", sampler.samples_CHW
    if sampler.predictions_NCHW is not None:
        yield "predictions", sampler.predictions_NCHW
    if sampler.start_CHW is not None:
        yield "start", sampler.start_CHW
    if guidance.differences_CHW is not None:
        yield "differences", guidance.differences_CHW
    if guidance.before_CHW is not None:
        yield "before", guidance.before_CHW


def _digest(texts: Mapping[str, str], arrays: Mapping[str, FloatArray]) -> str:
    """Return the digest of everything in a file."""
    digest = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.shape}".encode())
        digest.update(_bytes_of(array))
    return digest.hexdigest()


def _bytes_of(array: FloatArray) -> memoryview:
    return array.data.cast("B")
