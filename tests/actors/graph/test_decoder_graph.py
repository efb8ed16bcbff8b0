"""Images that two models make: the second is a task of its own that reads the first one's result, and what such
models cannot be asked for is refused by the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.stage_request import InputLatent, StageRequest
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe, RecipeDecoder
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.image_file import parameters_text
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnknownName, UserError
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeParams,
    OutputShape,
    PriorCondition,
    SampleParams,
    SamplingSchedule,
    StartCondition,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage, TaskId
from tests.actors.fakes import AUDIOS, DECODES, HANDS_ON, VIDEOS, FakeCatalog, component_key, image_of, sha

JOB = JobId("job")
PIXELS = np.zeros((128, 128, 3), np.uint8)
SIZE = {"width": 256, "height": 128}


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": HANDS_ON, "prompt": "p", "negative": "n", "seed": 7, **SIZE, **fields})


def cut(**fields: Any) -> tuple[Recipe, JobGraph]:
    sent, _ = InputImages(lambda result: result).bring(request(**fields))
    return build_graph(sent, JOB, FakeCatalog())


def sampled(job: JobGraph) -> list[SampleParams]:
    return [work for task in job.job.tasks if isinstance(work := job.works[task.task_id], SampleParams)]


def test_the_second_model_samples_what_the_first_made_and_its_vae_decodes() -> None:
    _, job = cut()
    catalog = FakeCatalog()
    first, second = (catalog.find_model(name) for name in (HANDS_ON, DECODES))
    used = [[use.component for use in task.uses] for task in job.job.tasks]
    assert used == [
        [component_key(first, Role.TEXT_ENCODER)], [component_key(first, Role.TEXT_ENCODER)],
        [component_key(first, Role.DIFFUSION_MODEL)], [component_key(second, Role.DIFFUSION_MODEL)],
        [component_key(second, Role.VAE)],
    ]  # fmt: skip
    prompt, negative, small, large, decoded = job.job.tasks
    assert small.needs == (prompt.task_id, negative.task_id)
    assert large.needs == (prompt.task_id, small.task_id)
    assert decoded.needs == (large.task_id,)
    a, b = sampled(job)
    assert (a.schedule, a.guidance.cfg) == (SamplingSchedule(20, "euler_ancestral", "simple"), 4.0)
    assert (b.schedule, b.guidance.cfg) == (SamplingSchedule(10, "euler_ancestral", "simple"), 1.0)
    assert (a.prior, b.prior) == (None, PriorCondition(3, 6))
    assert (a.seed, b.seed) == (7, 2**64 - 8)
    assert image_of(job.works, job.job.tasks).pixels_HWC.shape == (128, 256, 3)


def test_a_guided_second_model_reads_the_negative_prompt_too() -> None:
    """Found: where the first is not guided, and reads none, the second was guided away from the empty text."""
    _, job = cut(decoder=f"{DECODES}:4:1.1")
    prompt, negative, small, large, _ = job.job.tasks
    assert large.needs == (prompt.task_id, negative.task_id, small.task_id)
    assert (sampled(job)[1].schedule.steps, sampled(job)[1].guidance.cfg) == (4, 1.1)
    for negative in ("n", ""):
        _, unguided = cut(cfg=1.0, negative=negative, loras=("words:0.5",), clip_skip=1, decoder={"cfg": 1.1})
        *_, large, _ = unguided.job.tasks
        read = [unguided.works[need] for need in large.needs]
        assert [getattr(work, "text", None) for work in read] == ["p", negative, None]
        # as the prompt is read
        texts = [work for work in read if isinstance(work, EncodeParams)]
        assert [([lora.name for lora in text.loras], text.layers_skipped) for text in texts] == [(["words"], 1)] * 2
        (small,) = (task for task in unguided.job.tasks if task.task_id == large.needs[-1])
        assert small.needs == large.needs[:1]


def test_a_second_model_that_is_not_guided_reads_no_negative_prompt() -> None:
    for decoder in ({"steps": 4}, {"cfg": 1}):
        _, job = cut(cfg=1.0, decoder=decoder)
        assert [work.text for work in job.works.values() if isinstance(work, EncodeParams)] == ["p"]


def test_a_stage_asked_for_alone_guides_the_second_model_away_from_nothing_where_nothing_is_said() -> None:
    alone = StageRequest(Stage.DECODE, request(cfg=1.0, negative="", decoder={"cfg": 2.0}))
    job = build_stage_graph(alone, JOB, FakeCatalog())
    assert [work.text for work in job.works.values() if isinstance(work, EncodeParams)] == ["p", ""]


def test_jobs_that_differ_in_the_second_model_alone_share_the_first() -> None:
    (_, one), (_, other) = cut(), cut(decoder={"steps": 4})
    assert [task.task_id for task in one.job.tasks][:3] == [task.task_id for task in other.job.tasks][:3]
    assert one.job.wanted != other.job.wanted


def test_loras_are_the_first_models() -> None:
    _, job = cut(loras=("light:0.5",))
    a, b = sampled(job)
    assert [lora.name for lora in a.loras] == ["light"]
    assert b.loras == ()


def test_a_second_pass_is_made_of_the_small_latent() -> None:
    """What the first model made is scaled up and made again; the second model comes once, after it."""
    _, job = cut(hires="2:0.5")
    assert [(work.model.name, work.shape.width, work.has(StartCondition)) for work in sampled(job)] == [
        (HANDS_ON, 256, False), (HANDS_ON, 512, True), (DECODES, 512, False),
    ]  # fmt: skip
    assert sampled(job)[-1].prior == PriorCondition(6, 12)


def test_the_recipe_tells_both_models_and_is_read_again() -> None:
    recipe, _ = cut(decoder={"cfg": 1.5})
    assert recipe.decoder == RecipeDecoder(DECODES, sha(DECODES), 10, 1.5)
    assert (recipe.model, recipe.steps, recipe.cfg, recipe.seed) == (HANDS_ON, 20, 4.0, 7)
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == recipe
    assert f"Decoder: {DECODES}, Decoder hash: {sha(DECODES)[:10]}, Decoder steps: 10" in parameters_text(recipe)
    plain, _ = build_graph(GenerateRequest(model="shapes", prompt="p", seed=1), JOB, FakeCatalog())
    assert "decoder" not in plain.as_json()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": DECODES}, "model: found 'large', this model is a decoder"),
        (
            {"model": "shapes", "decoder": DECODES},
            "not supported by model 'shapes', which generates images in one stage",
        ),
        (
            {"model": VIDEOS, "decoder": DECODES},
            "decoder: found 'large', not supported by model 'films', which generates videos in",
        ),
        (
            {"model": AUDIOS, "decoder": DECODES},
            "not supported by model 'sounds', which generates audio clips in one stage",
        ),
        ({"decoder": "nobody"}, "unknown model 'nobody'"),
        ({"image": PIXELS}, "image: not supported by model 'small', which generates images from text only"),
        ({"image": PIXELS, "mask": PIXELS[..., 0] + 255}, "image: not supported"),
        ({"hires": {"via": "image"}}, "hires.via: found 'image', expected 'latent'"),
        ({"width": 200}, "width: found 200, expected a multiple of 128"),
        ({"decoder": {"cfg": 0.5}}, "decoder.cfg: found 0.5"),
        ({"decoder": {"steps": 0}}, "decoder.steps: found 0"),
        ({"decoder": ""}, "decoder: found '', expected NAME"),
    ],
)
def test_what_cannot_be_is_refused_by_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        cut(**fields)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("b", ("b", None, None)), ("b:12", ("b", 12, None)), ("b:12:1.1", ("b", 12, 1.1)), (":12", ("", 12, None)),
        ("C:/models/b.safetensors", ("C:/models/b.safetensors", None, None)),
        ("C:/models/b.safetensors:12", ("C:/models/b.safetensors", 12, None)), ({"cfg": 2}, ("", None, 2.0)),
    ],
)  # fmt: skip
def test_the_short_forms_of_a_decoder(said: Any, meant: tuple[Any, ...]) -> None:
    decoder = request(decoder=said).decoder
    assert decoder is not None
    assert (decoder.model, decoder.steps, decoder.cfg) == meant


def test_a_stage_asked_for_alone_may_name_the_second_model_to_decode_with() -> None:
    """`decode(latent, model="large")` of a latent that "small" sampled."""
    stage = StageRequest(Stage.DECODE, request(cfg=4.0))
    for model in ("", HANDS_ON, DECODES):
        job = build_stage_graph(replace(stage, vae_model=model), JOB, FakeCatalog())
        assert [work.model.name for work in sampled(job)] == [HANDS_ON, DECODES]
        assert job.works[job.job.wanted] == DecodeParams(FakeCatalog().find_model(DECODES), OutputShape(256, 128))
    with pytest.raises(UnknownName):
        build_stage_graph(replace(stage, vae_model="nobody"), JOB, FakeCatalog())


def test_a_latent_of_a_drivers_own_is_decoded_by_the_second_model_alone() -> None:
    given = StageRequest(Stage.DECODE, request(), latent=InputLatent(TaskId("mine"), (4, 6)))
    with pytest.raises(UserError, match="latent: found 'an array', expected a result of sample"):
        build_stage_graph(given, JOB, FakeCatalog())
    job = build_stage_graph(replace(given, request=request(model=DECODES)), JOB, FakeCatalog())
    assert [task.stage for task in job.job.tasks] == [Stage.DECODE]


def test_the_second_model_is_asked_for_no_latent_of_its_own() -> None:
    with pytest.raises(UserError, match=f"model: found '{DECODES}', expected a model that starts from noise"):
        build_stage_graph(StageRequest(Stage.SAMPLE, request(model=DECODES)), JOB, FakeCatalog())


def test_the_second_model_has_its_own_seed_sampler_and_schedule_if_the_request_sets_them() -> None:
    decoder = {"model": DECODES, "steps": 4, "cfg": 1.1, "seed": 12, "sampler": "DPM++ 2M", "schedule": "karras"}
    recipe, job = cut(decoder=decoder)
    first, second = sampled(job)
    assert (first.seed, second.seed) == (7, 12)
    assert second.schedule == SamplingSchedule(4, "dpmpp_2m", "karras")
    assert recipe.decoder == RecipeDecoder(DECODES, sha(DECODES), 4, 1.1, 12, "dpmpp_2m", "karras")
    again = requests_of(recipe, str)[0]
    assert cut(decoder=again.decoder)[1].job.tasks == job.job.tasks
    assert "seed" not in repr(request(decoder=f"{DECODES}:4:1.1").decoder)
    assert request(decoder=DECODES).decoder.model_dump() == {"model": DECODES, "steps": None, "cfg": None}
    with pytest.raises(UnknownName, match="magic"):
        request(decoder={"model": DECODES, "sampler": "magic"})
