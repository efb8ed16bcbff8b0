"""Cutting films and sounds: each task says how long, a film may begin with a picture, and equal work stays one task."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.graph.build_graph import cut_request
from modelpool.actors.inputs.input_images import GivenPictures
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import DecodeWork, EncodePictureWork, SampleWork, together_key
from modelpool.pool.specs.spec import JobId, Role, Stage
from tests.actors.fakes import BEGINS, FILMS, SOUNDS, FakeCatalog


def request(model: str, **fields: Any) -> GenerateRequest:
    asked = GenerateRequest(**{"model": model, "prompt": "a red circle", "seed": 1, **fields})
    return GivenPictures(lambda picture: "somewhere").bring(asked)[0]


def cut(wanted: GenerateRequest):
    return cut_request(wanted, JobId("job"), FakeCatalog())


def work_of(made, kind):
    (found,) = [work for work in made.works.values() if isinstance(work, kind)]
    return found


def picture(side: int = 64):
    import numpy as np

    return np.full((side, side, 3), 200, np.uint8)


def test_a_film_is_as_long_in_every_task_and_in_the_recipe() -> None:
    recipe, made = cut(request(FILMS, frames=9, frame_rate=12))
    sampled, decoded = work_of(made, SampleWork), work_of(made, DecodeWork)
    assert (sampled.frames, sampled.frame_rate) == (decoded.frames, decoded.frame_rate) == (9, 12.0)
    assert (recipe.frames, recipe.frame_rate, recipe.seconds, recipe.format) == (9, 12.0, 0.0, "mp4")
    assert recipe.ending == "mp4"


def test_what_is_left_out_is_the_models_own() -> None:
    assert (work_of(cut(request(FILMS))[1], SampleWork).frames, cut(request(FILMS))[0].frame_rate) == (17, 8.0)
    recipe, made = cut(request(SOUNDS))
    assert (work_of(made, SampleWork).seconds, work_of(made, DecodeWork).seconds) == (2.0, 2.0)
    assert (recipe.width, recipe.height, recipe.seconds, recipe.ending) == (0, 0, 2.0, "wav")


def test_how_a_film_is_written_is_another_file_of_the_same_tasks() -> None:
    """So that asking for a GIF of a film that was just made runs nothing again."""
    (one, first), (other, second) = cut(request(FILMS)), cut(request(FILMS, format="gif"))
    assert one.digest != other.digest
    assert first.job.wanted == second.job.wanted


def test_other_lengths_are_other_tasks_that_share_their_texts() -> None:
    (one, first), (other, second) = cut(request(FILMS, frames=5)), cut(request(FILMS, frames=9))
    shared = {task.task_id for task in first.job.tasks} & {task.task_id for task in second.job.tasks}
    assert {first.works[task_id].__class__.__name__ for task_id in shared} == {"EncodeWork"}
    assert one.digest != other.digest
    works = [work_of(made, SampleWork) for made in (first, second)]
    assert together_key(works[0]) != together_key(works[1])


def test_a_kept_picture_is_encoded_alone_and_read_after_the_texts() -> None:
    recipe, made = cut(request(FILMS, image=picture()))
    sampled, read = work_of(made, SampleWork), work_of(made, EncodePictureWork)
    assert (sampled.pictured, sampled.starts, sampled.first_step, read.frames) == (True, False, 0, 0)
    (task,) = [task for task in made.job.tasks if task.stage is Stage.SAMPLE]
    roles = [Role.VAE if isinstance(made.works[need], EncodePictureWork) else Role.TEXT_ENCODER for need in task.needs]
    assert roles == [Role.TEXT_ENCODER, Role.TEXT_ENCODER, Role.VAE]
    assert recipe.pictures is not None
    assert recipe.pictures.first_step == 0


def test_a_joined_picture_is_encoded_as_the_first_frame_of_the_whole_film() -> None:
    _, made = cut(request(BEGINS, image=picture(), frames=5))
    assert work_of(made, EncodePictureWork).frames == work_of(made, SampleWork).frames == 5


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("shapes", {"frames": 5}, "frames: found 5, expected none: model 'shapes' makes pictures, and no films"),
        ("shapes", {"format": "mp4"}, "format: found 'mp4', expected png: model 'shapes' makes pictures"),
        (FILMS, {"frames": 6}, "frames: found 6, expected a multiple of 4 and one more"),
        (FILMS, {"hires": 2}, "hires: found 'one', expected none: model 'films' makes films"),
        (FILMS, {"image": picture(), "strength": 0.5}, "strength: found 'one', expected none"),
        (FILMS, {"image": picture(), "mask": picture()[:, :, 0]}, "mask: found 'one', expected none"),
        (BEGINS, {}, "image: found 'nothing', expected a picture: the films of model 'moves' begin with one"),
        (SOUNDS, {"image": picture()}, "image: found 'one', expected none: model 'sounds' makes sounds"),
        (SOUNDS, {"width": 64}, "width: found 64, expected none: model 'sounds' makes sound"),
    ],
)
def test_what_a_model_cannot_make_is_refused_before_anything_is_queued(
    model: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as told:
        cut(request(model, **fields))
    assert str(told.value).startswith(message)


def test_films_of_other_guidance_do_not_share_a_run() -> None:
    """Found: models that are told how strongly to follow were told the first one's of a batch."""
    from dataclasses import replace

    work = work_of(cut(request(FILMS))[1], SampleWork)
    assert together_key(replace(work, guidance=2.0)) != together_key(replace(work, guidance=3.0))
    assert together_key(replace(work, seed=2)) == together_key(work)
