"""A model that is two diffusion models makes a video in two tasks of one job: the second reads what the first left, and
each has the strength, the texts and the LoRAs that are for it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe, RecipeLowNoise
from modelpool.actors.outputs.image_file import parameters_text
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.guidance.call_model import tokens_of
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize
from modelpool.pool.values.core.stage_params import DecodeParams, EncodeParams, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.actors.fakes import LORAS, PAIR, SAMPLING, FakeCatalog, component_key
from tests.pool.changed_work import changed_work

JOB = JobId("job")
SIZE = {"width": 64, "height": 64, "frames": 5, "steps": 8}


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": PAIR, "prompt": "p", "negative": "n", "seed": 7, **SIZE, **fields})


def cut(**fields: Any) -> tuple[Recipe, JobGraph]:
    return build_graph(request(**fields), JOB, FakeCatalog())


def sampled(job: JobGraph) -> list[SampleParams]:
    return [work for task in job.job.tasks if isinstance(work := job.works[task.task_id], SampleParams)]


def test_the_second_model_goes_on_from_what_the_first_left() -> None:
    recipe, job = cut()
    model = FakeCatalog().find_model(PAIR)
    prompt, negative, first, second, decoded = job.job.tasks
    assert [task.stage for task in job.job.tasks] == [Stage.ENCODE] * 2 + [Stage.SAMPLE] * 2 + [Stage.DECODE]
    assert first.needs == (prompt.task_id, negative.task_id)
    assert second.needs == (prompt.task_id, negative.task_id, first.task_id)
    assert decoded.needs == (second.task_id,)
    assert [use.component for use in first.uses] == [component_key(model, Role.DIFFUSION_MODEL)]
    assert [use.component for use in second.uses] == [component_key(model, Role.DIFFUSION_MODEL_2)]
    high, low = sampled(job)
    assert (high.guidance.cfg, low.guidance.cfg) == (4.0, 3.0)
    assert 0 < high.schedule.switch == low.schedule.switch < 8
    assert (first.uses[0].passes, second.uses[0].passes) == (high.schedule.switch, 8 - high.schedule.switch)
    assert changed_work(low, cfg=high.guidance.cfg, low_noise=False) == high
    work = job.works[job.job.wanted]
    assert isinstance(work, DecodeParams)
    assert work.shape.frames == 5
    assert (recipe.cfg, recipe.low_noise) == (4.0, RecipeLowNoise(0.875, 3.0))


@pytest.mark.parametrize(
    ("said", "strengths"),
    [
        ({}, (4.0, 3.0)),
        ({"cfg": 2.0}, (2.0, 2.0)),
        ({"cfg": 2.0, "low_noise": 6}, (2.0, 6.0)),
        ({"low_noise": 6}, (4.0, 6.0)),
        ({"low_noise": ":0.9"}, (4.0, 3.0)),
    ],
)
def test_the_second_model_is_as_strong_as_the_first_where_that_is_said(
    said: dict[str, Any], strengths: tuple[float, float]
) -> None:
    """Left open, both have their own. Source: `guidance_scale_2` of diffusers' WanPipeline."""
    high, low = sampled(cut(**said)[1])
    assert (high.guidance.cfg, low.guidance.cfg) == strengths


@pytest.mark.parametrize(("cfg", "low_cfg", "texts"), [(1, 3, (1, 2)), (4, 1, (2, 1)), (1, 1, (1, 1))])
def test_each_reads_the_texts_that_it_is_guided_by(cfg: float, low_cfg: float, texts: tuple[int, int]) -> None:
    _, job = cut(cfg=cfg, low_noise=low_cfg)
    tasks = [task for task in job.job.tasks if task.stage is Stage.SAMPLE]
    assert tuple(sum(need.startswith("encode") for need in task.needs) for task in tasks) == texts
    told = ("negative: ignored without guidance: cfg is 1; with any other it is read",)
    assert job.warnings == (told if texts == (1, 1) else ()), "what one of them does not read is not left out"


def test_the_boundary_decides_who_makes_which_steps() -> None:
    """At its lower end the first model makes all of them; nothing is handed on then."""
    switches = []
    for boundary in (0.95, 0.9, 0.5):
        high, low = sampled(cut(low_noise=f":{boundary}")[1])
        assert high.steps_run + low.steps_run == 8
        switches.append(high.schedule.switch)
    assert switches == sorted(set(switches))
    (alone,) = sampled(cut(low_noise="2:0")[1])
    assert (alone.schedule.low_noise, alone.schedule.switch, alone.guidance.cfg) == (False, 0, 4.0)


def test_steps_that_are_all_of_much_noise_are_made_by_one_model() -> None:
    (high,) = sampled(cut(steps=1)[1])
    assert (high.schedule.low_noise, high.schedule.switch) == (False, 0)


def test_a_boundary_of_all_noise_leaves_the_first_level_to_the_first_model() -> None:
    """A schedule begins with noise alone, which is no less than all."""
    high, low = sampled(cut(low_noise=":1")[1])
    assert (high.schedule.switch, high.steps_run, low.steps_run) == (1, 1, 7)


def test_videos_that_differ_in_the_second_model_share_what_the_first_made() -> None:
    ids = [[task.task_id for task in cut(**said)[1].job.tasks] for said in ({}, {"low_noise": 5})]
    assert ids[0][:3] == ids[1][:3]
    assert ids[0][3] != ids[1][3]


def test_a_lora_changes_the_model_that_it_is_for() -> None:
    recipe, job = cut(loras=["light:0.5:high", "thick:1:low", "odd"])
    high, low = sampled(job)
    texts = [work for work in job.works.values() if isinstance(work, EncodeParams)]
    assert [[lora.name for lora in work.loras] for work in texts] == [["odd"], ["odd"]], "texts are read by both"
    assert [lora.name for lora in high.loras] == ["light", "odd"]
    assert [lora.name for lora in low.loras] == ["thick", "odd"]
    assert [(lora.name, lora.noise) for lora in recipe.loras] == [("light", "high"), ("thick", "low"), ("odd", "")]
    text = parameters_text(recipe)
    assert "Low noise CFG scale: 3, Low noise below: 0.875" in text
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == recipe


def test_a_lora_whose_name_suggests_one_expert_gives_a_warning_if_it_is_applied_to_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LORAS, "x_low_noise", (Role.DIFFUSION_MODEL,))
    _, job = cut(loras=["x_low_noise:0.5"])
    assert job.warnings == (
        "LoRA 'x_low_noise' is applied to both experts; 'x_low_noise:0.5:low' applies it to one, for low noise",
    )
    assert cut(loras=["x_low_noise:0.5:low"])[1].warnings == ()


@pytest.mark.parametrize(
    ("lora", "warnings"),
    [
        ("x_low_noise:0.5:low", ()),
        (
            "x_low_noise:0.5:high",
            (
                "LoRA 'x_low_noise' is applied to the high-noise expert, but its name suggests the other one "
                "('x_low_noise:0.5:low')",
            ),
        ),
        ("x_low_noise:0:high", ()),
        ("light:0.5:high", ()),
    ],
)
def test_a_lora_whose_name_suggests_the_other_expert_gives_a_warning(
    lora: str, warnings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LORAS, "x_low_noise", (Role.DIFFUSION_MODEL,))
    assert cut(loras=[lora])[1].warnings == warnings


@pytest.mark.parametrize(("boundary", "idle"), [(0.0, "low"), (0.875, "")])
@pytest.mark.parametrize("half", ["high", "low"])
def test_a_lora_for_an_expert_that_runs_no_step_gives_a_warning(boundary: float, idle: str, half: str) -> None:
    told = f"LoRA 'light' is for the {half}-noise expert, which runs none of the 8 steps"
    _, job = cut(loras=[f"light:0.5:{half}"], low_noise=f":{boundary}")
    assert job.warnings == ((told,) if half == idle else ())
    assert sum(bool(work.loras) for work in sampled(job)) == (half != idle)


def test_where_the_shift_depends_on_the_size_so_does_who_makes_which_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: every request for such a folder of diffusers died of an assertion. The switch is where the
    levels that the run itself looks up fall below the boundary."""
    noise = NoiseFacts(NoiseKind.FLOW, shift_by_size=ShiftBySize((32, 512), (0.5, 4.0)))
    facts = replace(SAMPLING[PAIR], noise=noise)
    monkeypatch.setitem(SAMPLING, PAIR, facts)
    switches = []
    for side in (64, 128, 256):
        high, low = sampled(cut(width=side, height=side)[1])
        for work in (high, low):
            levels = make_sigmas(
                work.schedule.noise_schedule,
                work.schedule.steps,
                sigma_table(noise, tokens_of(facts, work), work.schedule.steps),
            )
            assert work.schedule.switch == sum(level >= 0.875 for level in levels.tolist()[:-1])
        switches.append(high.schedule.switch)
    assert switches == sorted(set(switches))


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.SAMPLE, Stage.DECODE])
def test_a_stage_of_a_model_that_is_one_is_asked_nothing_of_a_second(stage: Stage) -> None:
    """Found in a review: a driver that composes stages itself was not told, and its LoRA was left out."""
    wanted = StageRequest(stage, GenerateRequest(model="shapes", prompt="p", seed=1, loras=["light:1:low"]))
    with pytest.raises(
        UserError, match=r"^loras\.noise: found 'low', not supported by model 'shapes', which has a single"
    ):
        build_stage_graph(wanted, JOB, FakeCatalog())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"low_noise": "3:0.9"},
            "low_noise: found 'cfg 3, boundary 0.9', not supported by model 'shapes', which has a",
        ),
        ({"loras": ["light:0.5:low"]}, "loras.noise: found 'low', not supported by model 'shapes', which has a single"),
    ],
)
def test_a_model_that_is_one_is_asked_nothing_of_a_second(said: dict[str, Any], message: str) -> None:
    sent = GenerateRequest(model="shapes", prompt="p", seed=7, **said)
    with pytest.raises(UserError, match=message):
        build_graph(sent, JOB, FakeCatalog())


def test_a_stage_that_is_asked_for_alone_is_made_by_both_models() -> None:
    """`sample` of a driver that composes stages itself: it ends with the second one's latent, and is as strong as it
    says in both."""
    stage = StageRequest(Stage.SAMPLE, request(cfg=4.0))
    assert stage.request.low_noise is None
    job = build_stage_graph(stage, JOB, FakeCatalog())
    high, low = sampled(job)
    assert (high.guidance.cfg, low.guidance.cfg, low.schedule.low_noise) == (4.0, 4.0, True)
    assert isinstance(job.works[job.job.wanted], SampleParams)
    assert job.works[job.job.wanted] == low
    said = StageRequest(Stage.SAMPLE, request(cfg=4.0, low_noise="2:0.5"))
    assert sampled(build_stage_graph(said, JOB, FakeCatalog()))[1].guidance.cfg == 2.0
