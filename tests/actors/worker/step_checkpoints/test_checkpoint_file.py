"""A state that was written to a file and read back continues its run with the same bytes; other files are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.worker.step_checkpoints.checkpoint_file import (
    FORMAT,
    OtherVersions,
    read_checkpoint,
    write_checkpoint,
)
from modelpool.pool.inference.sampling.partial_run import partial_run_of
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.results import GuidanceState, RunState, SamplerState
from modelpool.pool.values.core.stage_params import RunHooks
from modelpool.pool.values.specs.spec import TaskId
from tests.pool.changed_work import changed_work
from tests.pool.inference.sampling.test_partial_run import CPU, KINDS, NOTHING, STEPS, WORK, run

TASK = TaskId("sample-0123456789abcdef0123")
VERSIONS = {"modelpool": "1", "torch": "2"}
floats = st.floats(allow_nan=False, allow_infinity=False)


def state(step: int = 3, steps: int = 9, seed: int = 0) -> RunState:
    """A state with all its parts."""
    random = np.random.default_rng(seed)
    parts = [random.standard_normal((4, 2, 3), np.float32) for _ in range(6)]
    sampler = SamplerState(parts[0], (2.5, 0.1), np.stack(parts[1:3]), parts[3], (0.5, 2.0), 7)
    return RunState(step, steps, sampler, GuidanceState(2, 1.0 / 3.0, parts[4], parts[5], 7))


def fields_of(value: object) -> Iterator[tuple[str, object]]:
    """Every field of a state, and of the states in it; arrays as type, shape and bytes."""
    assert dataclasses.is_dataclass(value)
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if dataclasses.is_dataclass(found):
            yield from fields_of(found)
        elif isinstance(found, np.ndarray):
            yield field.name, (found.dtype, found.shape, found.tobytes())
        else:
            yield field.name, found


def assert_equal(found: RunState, expected: RunState) -> None:
    assert list(fields_of(found)) == list(fields_of(expected))


def test_every_field_of_a_state_is_in_the_file(tmp_path: Path) -> None:
    """One that is added to a state, and not to the file, would change pixels silently."""
    defaults = dict(fields_of(RunState(0, 0, SamplerState(np.zeros(0, np.float32)))))
    assert not [name for name, value in fields_of(state()) if value == defaults[name]], "a field that this cannot see"
    write_checkpoint(tmp_path / "x", TASK, state(), VERSIONS)
    assert_equal(read_checkpoint(tmp_path / "x", TASK, 9, VERSIONS), state())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "uni_pc", "lms", "dpmpp_3m_sde", "sa_solver"])
def test_a_run_resumes_from_the_file_of_any_of_its_steps_with_the_same_bytes(
    sampler: str, kind: str, tmp_path: Path
) -> None:
    work = changed_work(WORK, sampler=sampler)
    tasks = [TaskId(f"sample-{place}") for place in range(2)]

    def save(states: Callable[[], Sequence[RunState]]) -> None:
        for task, one in zip(tasks, states(), strict=True):
            write_checkpoint(tmp_path / f"{task}.{one.step}", task, one, VERSIONS)

    whole = partial_run_of((work,) * 2, (NOTHING,) * 2, CPU)
    expected = run(work, whole, kind, hooks=RunHooks(lambda *step: None, lambda: False, checkpoint=save))
    for step in range(1, STEPS):
        found = [read_checkpoint(tmp_path / f"{task}.{step}", task, STEPS, VERSIONS) for task in tasks]
        assert [each.step for each in found] == [step, step]
        assert torch.equal(run(work, partial_run_of((work,) * 2, (NOTHING,) * 2, CPU, found), kind), expected), step


@given(levels=st.lists(floats, max_size=3), level=st.none() | floats, parts=st.integers(0, 7), drawn=st.integers(0, 99))
def test_what_is_read_is_what_was_written(
    levels: list[float], level: float | None, parts: int, drawn: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    latent = np.array([[[-0.0, np.float32(1e-45)]], [[np.float32(3.4e38), 0.1]]], np.float32)
    some = [latent + index if parts >> index & 1 else None for index in range(3)]
    predictions = np.stack([latent / (n + 1) for n in range(len(levels))]) if levels else None
    expected = RunState(
        1,
        2,
        SamplerState(latent, tuple(levels), predictions, some[0]),
        GuidanceState(3, level, some[1], some[2], drawn),
    )
    path = tmp_path_factory.getbasetemp() / "any.checkpoint"
    file_bytes = write_checkpoint(path, TASK, expected, VERSIONS)
    assert path.stat().st_size == file_bytes
    assert_equal(read_checkpoint(path, TASK, 2, VERSIONS), expected)


def test_a_state_from_a_view_of_another_array_is_written_in_order(tmp_path: Path) -> None:
    """Also from one that nobody may write to, as those in Ray's object store."""
    turned = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    for samples in (turned, np.ascontiguousarray(turned)):
        samples.setflags(write=False)
        write_checkpoint(tmp_path / "x", TASK, RunState(1, 2, SamplerState(samples)), VERSIONS)
        found = read_checkpoint(tmp_path / "x", TASK, 2, VERSIONS)
        assert np.array_equal(found.sampler.samples_CHW, turned)
        found.sampler.samples_CHW[0] = 1.0  # its own memory


def test_a_file_that_is_cut_changed_or_longer_is_refused(tmp_path: Path) -> None:
    """Each byte counts: every length, and a change of any byte."""
    path = tmp_path / "x"
    write_checkpoint(path, TASK, RunState(1, 3, SamplerState(np.ones((1, 1, 2), np.float32))), VERSIONS)
    content = path.read_bytes()
    damaged = [content[:length] for length in range(len(content))] + [content + b"\0"]
    places = range(len(content))
    damaged += [content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in places]
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(CorruptFile):
            read_checkpoint(path, TASK, 3, VERSIONS)


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_checkpoint(path, TASK, state(step=3, steps=9), VERSIONS)
    assert_equal(read_checkpoint(path, TASK, 9, VERSIONS), state())
    with pytest.raises(CorruptFile, match=r"found step 3 of 9 of sample-.*, expected one of 10"):
        read_checkpoint(path, TASK, 10, VERSIONS)
    with pytest.raises(CorruptFile, match="expected one of 9 of sample-other"):
        read_checkpoint(path, TaskId("sample-other"), 9, VERSIONS)
    with pytest.raises(OtherVersions, match=r"'torch': '3'"):
        read_checkpoint(path, TASK, 9, {**VERSIONS, "torch": "3"})
    with pytest.raises(CorruptFile, match="no such file"):
        read_checkpoint(tmp_path / "y", TASK, 9, VERSIONS)


def test_another_format_is_refused_before_its_content_is_read(tmp_path: Path) -> None:
    from modelpool.pool.files.formats.safetensors_writer import write_safetensors

    write_safetensors(tmp_path / "x", [], {"format": FORMAT + "0"})
    with pytest.raises(CorruptFile, match="found format 'modelpool step checkpoint 10', expected"):
        read_checkpoint(tmp_path / "x", TASK, 9, VERSIONS)
    write_safetensors(tmp_path / "x", [], {"format": FORMAT, "run": json.dumps({"task": 1})}, overwrite=True)
    with pytest.raises(CorruptFile, match="other content than its digest promises"):
        read_checkpoint(tmp_path / "x", TASK, 9, VERSIONS)
