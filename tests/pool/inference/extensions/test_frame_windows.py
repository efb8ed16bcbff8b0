"""Windows of frames: which frames each has, what each frame counts, and what runs of whole models make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.gang_support import gang_obstacle
from modelpool.pool.inference.extensions import frame_windows
from modelpool.pool.inference.extensions.frame_windows import (
    WindowedCalls,
    halved,
    repeated,
    window_weights,
    windows_of,
)
from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.run_options import FrameWindows, RunOptions
from modelpool.pool.values.core.stage_params import RunState, SampleParams, SamplingSchedule
from modelpool.pool.values.specs.spec import JobId, Stage
from tests.each_case import each_case
from tests.pool.families.test_from_images import image
from tests.pool.families.test_needs_shown import on_sim
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import CONCATENATED
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import Whole
from tests.pool.inference.extensions.test_cache_memory import MOST_OVER
from tests.pool.input_names import results_read
from tests.pool.pipeline import QUIET

SCHEDULES = ("standard_static", "standard_uniform", "looped_uniform", "batched")
FUSES = ("pyramid", "relative", "flat", "overlap-linear")
#: of a latent
CHANNELS = 2


def starts(found: list[tuple[int, ...]]) -> list[int]:
    """The first frames of windows of frames side by side."""
    assert all(window == tuple(range(window[0], window[0] + len(window))) for window in found)
    return [window[0] for window in found]


def test_static_windows_have_equal_distances_and_the_last_one_ends_with_the_video() -> None:
    option = FrameWindows(length=8, overlap=3)
    assert starts(windows_of(option, 18, 0)) == [0, 5, 10]
    assert starts(windows_of(option, 20, 5)) == [0, 5, 10, 12]
    assert windows_of(replace(option, schedule="batched"), 18, 0)[-1] == (16, 17)
    assert starts(windows_of(replace(option, schedule="batched"), 18, 0)) == [0, 8, 16]


def test_uniform_windows_are_shifted_in_each_step() -> None:
    """By 0, 1/2, 1/4, 3/4 of the video and so on; looped ones go on at its beginning."""
    assert [halved(step) for step in range(6)] == [0, 0.5, 0.25, 0.75, 0.125, 0.625]
    looped = FrameWindows(length=8, overlap=2, schedule="looped_uniform")
    assert windows_of(looped, 16, 0) == [tuple(range(8)), tuple(range(6, 14)), (12, 13, 14, 15, 0, 1, 2, 3)]
    assert [window[0] for window in windows_of(looped, 16, 1)] == [8, 14, 4]
    assert [window[0] for window in windows_of(replace(looped, overlap=4), 16, 0)] == [0, 4, 8]
    assert [window[0] for window in windows_of(replace(looped, overlap=4, closed=1), 16, 0)] == [0, 4, 8, 12]
    standard = replace(looped, schedule="standard_uniform")
    assert starts(windows_of(standard, 16, 1)) == [0, 8, 4]


def test_a_stride_has_windows_of_each_second_frame_too() -> None:
    option = FrameWindows(length=4, overlap=1, schedule="looped_uniform", stride=2)
    found = windows_of(option, 12, 0)
    assert found == [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9), (9, 10, 11, 0), (0, 2, 4, 6), (7, 9, 11, 1)]
    inside = windows_of(replace(option, schedule="standard_uniform"), 12, 0)
    assert inside == [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9), (8, 9, 10, 11), (0, 2, 4, 6), (5, 7, 9, 11)]


@each_case("schedule", SCHEDULES)
def test_each_frame_is_in_a_window_of_each_step(schedule: str) -> None:
    for length, overlap, stride in ((1, 0, 1), (5, 0, 1), (5, 4, 3), (8, 3, 2), (16, 7, 4)):
        option = FrameWindows(length, overlap, schedule, stride=stride if schedule.endswith("uniform") else 1)
        for cells in (1, 4, 9, 17, 33, 40):
            for step in range(9):
                found = windows_of(option, cells, step)
                assert {place for window in found for place in window} == set(range(cells))
                if cells <= length:
                    assert found == [tuple(range(cells))]


def test_weights_follow_their_formulas() -> None:
    def weights(fuse: str, first: int = 4, count: int = 6, overlap: int = 2) -> list[float]:
        option = FrameWindows(count, overlap, fuse=fuse)
        return window_weights(option, tuple(range(first, first + count)), 20)

    assert weights("flat") == [1.0] * 6
    assert weights("pyramid") == [1, 2, 3, 3, 2, 1]
    assert weights("pyramid", count=5) == [1, 2, 3, 2, 1]
    np.testing.assert_allclose(weights("relative", count=5), [0.01, 0.501247, 1, 0.501247, 0.01], atol=1e-6)
    np.testing.assert_allclose(weights("overlap-linear", overlap=3), [0, 0.5, 1, 1, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(weights("overlap-linear", first=0, overlap=3), [1, 1, 1, 1, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(weights("overlap-linear", first=14, overlap=3), [0, 0.5, 1, 1, 1, 1], atol=1e-6)
    assert all(weight > 0 for fuse in FUSES for overlap in range(6) for weight in weights(fuse, overlap=overlap))


class Framewise(nn.Module):
    """A model that treats frames by themselves; or, with `counts`, adds the place of each in what it reads."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.config, self.counts = SimpleNamespace(out_channels=CHANNELS), counts
        self.read: list[Tensor] = []

    def forward(self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        self.read.append(hidden_states)
        out = torch.sin(hidden_states[:, :CHANNELS]) + timestep.reshape(-1, 1, 1, 1, 1)
        places = torch.arange(hidden_states.shape[2], dtype=out.dtype)[:, None, None]
        return (out + places if self.counts else out,)


def called(option: FrameWindows, module: Framewise, x: Tensor, step: int = 0) -> Tensor:
    clock = StepClock(SamplingSchedule(20, "euler", "simple"), PartialRun())
    clock.part.done = step
    calls = WindowedCalls.of(option, clock, module)
    (found,) = calls.around_call(module, hidden_states=x, timestep=torch.tensor([0.25, 0.5]), return_dict=False)
    assert isinstance(found, Tensor)
    return found


@each_case("schedule", SCHEDULES)
def test_windows_change_nothing_in_a_model_that_treats_frames_by_themselves(schedule: str) -> None:
    x = torch.randn(2, CHANNELS + 1, 13, 3, 2, generator=torch.Generator().manual_seed(1))
    module = Framewise()
    expected = torch.sin(x[:, :CHANNELS]) + torch.tensor([0.25, 0.5]).reshape(2, 1, 1, 1, 1)
    for fuse in FUSES:
        for anchor in (0, 1):
            for step in range(4):
                option = FrameWindows(6, 2, schedule, fuse, anchor=anchor)
                torch.testing.assert_close(called(option, module, x, step), expected, atol=1e-6, rtol=0)


def test_a_window_reads_the_frame_before_it_and_the_image_if_it_is_asked_to() -> None:
    x = torch.randn(2, CHANNELS + 1, 10, 1, 1, generator=torch.Generator().manual_seed(1))
    module = Framewise()
    called(FrameWindows(6, 2, retain=1), module, x)
    first, second = module.read
    assert torch.equal(first, x[:, :, :6])
    assert torch.equal(second[:, :CHANNELS], x[:, :CHANNELS, 3:10])
    assert torch.equal(second[:, CHANNELS:, 0], x[:, CHANNELS:, 0])
    assert torch.equal(second[:, CHANNELS:, 1:], x[:, CHANNELS:, 4:10])
    module.read.clear()
    called(FrameWindows(6, 2, anchor=0), module, x)
    assert torch.equal(module.read[1], x[:, :, 4:10])


def test_predictions_are_averaged_by_their_weights() -> None:
    """Windows 0..5 and 4..9 of a model that adds places: frame 4 has the places 4 and 0, with the weights 2 and 1."""
    x = torch.zeros(2, CHANNELS, 10, 1, 1)
    places = called(FrameWindows(6, 2, anchor=0), Framewise(counts=True), x)[0, 0, :, 0, 0] - 0.25
    expected = [0, 1, 2, 3, (2 * 4 + 0) / 3, (5 + 2 * 1) / 3, 2, 3, 4, 5]
    torch.testing.assert_close(places, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0)


def test_noise_of_a_window_is_that_of_the_one_before_it_in_another_order() -> None:
    noise = torch.randn(2, 3, 19, 2, 2, generator=torch.Generator().manual_seed(1))
    option = FrameWindows(length=8, overlap=3)
    found = repeated(option, noise, (1, 2))
    assert torch.equal(found[:, :, :8], noise[:, :, :8])
    for row in range(2):
        for start, count in ((8, 5), (13, 5), (18, 1)):
            before = found[row, :, start - 8 : start - 8 + count]
            new = found[row, :, start : start + count]
            assert {tuple(each.flatten().tolist()) for each in new.unbind(1)} == {
                tuple(each.flatten().tolist()) for each in before.unbind(1)
            }
    assert torch.equal(repeated(option, noise[1:], (2,))[0], found[1]), "an image's order depends on its seed alone"
    assert torch.equal(repeated(replace(option, length=19, overlap=4), noise, (1, 2)), noise)


VIDEO: dict[str, Any] = {"width": 32, "height": 32, "steps": 3, "seed": 11, "cfg": 3.0, "frames": 13}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
    made = TinyFamilyModel(tmp_path_factory.mktemp("wan"), FAMILIES["wan_t2v"])
    yield made
    made.close()


@pytest.mark.parametrize("name", ["wan_t2v", "hunyuan_video"])
def test_a_video_that_is_no_longer_than_a_window_is_that_of_a_run_without_them(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES[name])
    texts = whole.texts()
    plain = whole.latent(texts, steps=1)
    cells = plain.samples_CHW.shape[1]
    assert cells == 2
    for option in (FrameWindows(cells, 0), FrameWindows(cells + 1, 1, "looped_uniform")):
        made = whole.latent(texts, steps=1, options=RunOptions(windows=option))
        assert np.array_equal(made.samples_CHW, plain.samples_CHW)
    parted = whole.latent(texts, steps=1, options=RunOptions(windows=FrameWindows(1, 0)))
    assert np.abs(parted.samples_CHW - plain.samples_CHW).max() > 1e-3
    whole.engine.close()


def test_a_run_is_that_of_its_windows_by_hand(wan: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of Euler: the video is the noise plus a step along the average of the predictions for both windows."""
    calls: list[tuple[Tensor, Tensor]] = []
    own = frame_windows.sample_of

    def noted(result: Any) -> Tensor:
        found = own(result)
        calls.append(found)
        return found

    monkeypatch.setattr(frame_windows, "sample_of", noted)
    option = {"length": 3, "overlap": 2, "freenoise": 0, "anchor": 0}
    made = wan.made(**{**VIDEO, "steps": 1, "cfg": 1.0}, options={"windows": option})
    first, second = (call for call in calls if not call.is_meta)
    assert first.shape[2] == second.shape[2] == 3
    weights = torch.tensor([1.0, 2.0, 1.0])[:, None, None]
    total = torch.zeros(*first.shape[:2], 4, *first.shape[3:])
    total[:, :, :3] += first * weights
    total[:, :, 1:] += second * weights
    mean = total / torch.tensor([1.0, 3.0, 3.0, 1.0])[:, None, None]
    drawn = torch.randn(mean.shape, generator=torch.Generator().manual_seed(11))
    np.testing.assert_allclose(made.latents[0], drawn - mean, atol=1e-4)


def _task(tiny: TinyModel, **fields: Any) -> Any:
    made = tiny.made(**{**VIDEO, **fields})
    (task,) = [task for task in made.tasks if task.stage is Stage.SAMPLE]
    return made, task, made.works[task.task_id], results_read(task, made.results)


def test_a_run_that_continues_makes_the_same_bytes(wan: TinyModel) -> None:
    windows = {"length": 3, "overlap": 1, "schedule": "looped_uniform"}
    made, task, work, inputs = _task(wan, options={"windows": windows})
    states: list[RunState] = []

    def checkpoint(found: Callable[[], Sequence[RunState]]) -> None:
        states.extend(found())

    wan.engine.run(task, work, inputs, replace(QUIET, checkpoint=checkpoint))
    assert [state.step for state in states] == [1, 2]
    for state in states:
        found, _ = wan.engine.run(task, work, inputs, QUIET, resume=state)
        assert np.array_equal(found.samples_CHW[None], made.latents[0])


def test_runs_hold_what_was_estimated_which_is_less_than_without_windows(tmp_path: Path) -> None:
    tiny, estimated = on_sim(tmp_path, "wan_t2v"), []
    try:
        for options in ({"windows": {"length": 2, "overlap": 1}}, {}):
            made = tiny.made(**{**VIDEO, "steps": 1, "width": 64, "height": 64, "frames": 17}, options=options)
            (place,) = [place for place, task in enumerate(made.tasks) if task.stage is Stage.SAMPLE]
            task, working_bytes = made.tasks[place], made.costs[place].working_bytes
            assert working_bytes <= task.activation_bytes <= (1 + MOST_OVER) * working_bytes
            estimated.append(task.activation_bytes)
    finally:
        tiny.close()
    assert estimated[0] < estimated[1]


def test_a_video_of_an_image_has_it_in_the_first_window_alone_unless_each_retains_it(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, CONCATENATED)
    shown = {**VIDEO, "steps": 1, "frames": 17, "image": image(32, 32)}
    windows = {"length": 3, "overlap": 1}
    once, each = (tiny.made(**shown, options={"windows": {**windows, "retain": retain}}) for retain in (0, 1))
    tiny.close()
    changed = (once.latents[0] - each.latents[0]).abs().amax((0, 1, 3, 4))
    assert float(changed[0]) < 1e-5, "the first window is the same"
    assert float(changed[-1]) > 1e-4


@each_case(
    "settings",
    (
        {"length": 4, "overlap": 4},
        {"stride": 2},
        {"closed": 1, "schedule": "standard_uniform"},
        {"fuse": "mean"},
    ),
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"options\.windows\."):
        GenerateRequest(model="tiny", prompt="p", options={"windows": settings})


def test_what_windows_cannot_have_is_refused(wan: TinyModel) -> None:
    request = GenerateRequest(model="tiny", prompt="p", **VIDEO, options={"windows": 8, "fbcache": 0.1})
    with pytest.raises(UnusableField, match=r"options\.windows: found together with fbcache"):
        build_graph(request, JobId("job"), wan.catalog)
    _, _, work, _ = _task(wan, options={"windows": {"length": 2, "overlap": 1}})
    assert isinstance(work, SampleParams)
    assert "windows calls the model for a part" in gang_obstacle(wan.family.sampling, replace(work), 4)
