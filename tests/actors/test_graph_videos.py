"""Cutting videos and audio clips: each task says how long, a video may begin with an image, and equal work stays one
task."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    SampleParams,
    StartCondition,
    batch_key,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.actors.fakes import AUDIOS, BEGINS, VIDEOS, FakeCatalog


def request(model: str, **fields: Any) -> GenerateRequest:
    asked = GenerateRequest(**{"model": model, "prompt": "a red circle", "seed": 1, **fields})
    return InputImages(lambda image: "somewhere").bring(asked)[0]


def cut(wanted: GenerateRequest):
    return build_graph(wanted, JobId("job"), FakeCatalog())


def work_of(made, kind):
    (found,) = [work for work in made.works.values() if isinstance(work, kind)]
    return found


def image(side: int = 64):
    import numpy as np

    return np.full((side, side, 3), 200, np.uint8)


def test_a_video_is_as_long_in_every_task_and_in_the_recipe() -> None:
    recipe, made = cut(request(VIDEOS, frames=9, frame_rate=12))
    sampled, decoded = work_of(made, SampleParams), work_of(made, DecodeParams)
    assert (
        (sampled.shape.frames, sampled.shape.frame_rate)
        == (decoded.shape.frames, decoded.shape.frame_rate)
        == (9, 12.0)
    )
    assert (recipe.frames, recipe.frame_rate, recipe.seconds, recipe.format) == (9, 12.0, 0.0, "mp4")
    assert recipe.ending == "mp4"


def test_what_is_left_out_is_the_models_own() -> None:
    assert (work_of(cut(request(VIDEOS))[1], SampleParams).shape.frames, cut(request(VIDEOS))[0].frame_rate) == (
        17,
        8.0,
    )
    recipe, made = cut(request(AUDIOS))
    assert (work_of(made, SampleParams).shape.seconds, work_of(made, DecodeParams).shape.seconds) == (2.0, 2.0)
    assert (recipe.width, recipe.height, recipe.seconds, recipe.ending) == (0, 0, 2.0, "wav")


def test_how_a_video_is_written_is_another_file_of_the_same_tasks() -> None:
    """So that asking for a GIF of a video that was just made runs nothing again."""
    (one, first), (other, second) = cut(request(VIDEOS)), cut(request(VIDEOS, format="gif"))
    assert one.digest != other.digest
    assert first.job.wanted == second.job.wanted


def test_other_lengths_are_other_tasks_that_share_their_texts() -> None:
    (one, first), (other, second) = cut(request(VIDEOS, frames=5)), cut(request(VIDEOS, frames=9))
    shared = {task.task_id for task in first.job.tasks} & {task.task_id for task in second.job.tasks}
    assert {first.works[task_id].__class__.__name__ for task_id in shared} == {"EncodeParams"}
    assert one.digest != other.digest
    works = [work_of(made, SampleParams) for made in (first, second)]
    assert batch_key(works[0]) != batch_key(works[1])


def test_a_kept_image_is_encoded_alone_and_read_after_the_texts() -> None:
    recipe, made = cut(request(VIDEOS, image=image()))
    sampled, read = work_of(made, SampleParams), work_of(made, EncodeImageParams)
    assert (sampled.image is not None, sampled.has(StartCondition), sampled.schedule.first_step, read.frames) == (
        True,
        False,
        0,
        0,
    )
    (task,) = [task for task in made.job.tasks if task.stage is Stage.SAMPLE]
    roles = [Role.VAE if isinstance(made.works[need], EncodeImageParams) else Role.TEXT_ENCODER for need in task.needs]
    assert roles == [Role.TEXT_ENCODER, Role.TEXT_ENCODER, Role.VAE]
    assert recipe.pictures is not None
    assert recipe.pictures.first_step == 0


def test_a_joined_image_is_encoded_as_the_first_frame_of_the_whole_video() -> None:
    _, made = cut(request(BEGINS, image=image(), frames=5))
    assert work_of(made, EncodeImageParams).frames == work_of(made, SampleParams).shape.frames == 5


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (
            "shapes",
            {"frames": 5},
            "frames: found 5, not supported by model 'shapes', which generates images, not videos",
        ),
        (
            "shapes",
            {"format": "mp4"},
            "format: found 'mp4', expected png or webp or jpg or avif: model 'shapes' generates images",
        ),
        (VIDEOS, {"frames": 6}, "frames: found 6, expected a multiple of 4 plus 1"),
        (VIDEOS, {"hires": 2}, "hires: not supported by model 'films', which generates videos"),
        (VIDEOS, {"image": image(), "strength": 0.5}, "strength: not supported by model"),
        (VIDEOS, {"image": image(), "mask": image()[:, :, 0]}, "mask: not supported by model"),
        (BEGINS, {}, "image: missing; model 'moves' requires the first frame"),
        (AUDIOS, {"image": image()}, "image: not supported by model 'sounds', which generates audio clips"),
        (AUDIOS, {"width": 64}, "width: found 64, not supported by model 'sounds', which generates audio"),
    ],
)
def test_what_a_model_cannot_make_is_refused_before_anything_is_queued(
    model: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as told:
        cut(request(model, **fields))
    assert str(told.value).startswith(message)


def test_videos_of_other_guidance_do_not_share_a_run() -> None:
    """Found: models that are told how strongly to follow were told the first one's of a batch."""
    from dataclasses import replace

    work = work_of(cut(request(VIDEOS))[1], SampleParams)
    keys = [batch_key(replace(work, guidance=replace(work.guidance, distilled=scale))) for scale in (2.0, 3.0)]
    assert keys[0] != keys[1]
    assert batch_key(replace(work, seed=2)) == batch_key(work)
