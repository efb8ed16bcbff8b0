"""Wan 2.2 of 14B: two diffusion models make, one after the other, what diffusers makes with both in one run, on the
same weights, texts, image and noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import flow_table, make_sigmas
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    Latent,
    Result,
    RunHooks,
    SampleParams,
    SamplerState,
    Stopped,
    VideoFrames,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.nearly import assert_nearly
from tests.pool.families.tiny_model import QUIET, Made
from tests.pool.families.tiny_pairs import TINY, TinyPair, flow_scheduler
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.input_names import results_read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, FRAMES, STEPS, SEED = 96, 64, 5, 6, 11
FIELDS: dict[str, Any] = {"frames": FRAMES, "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT}
PIPELINES = {"wan_t2v": diffusers.WanPipeline, "wan22_i2v": diffusers.WanImageToVideoPipeline}


def image() -> Image.Image:
    """Nothing in it is like anything beside it."""
    return Image.fromarray(np.random.default_rng(4).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))


SHOWN: Mapping[str, dict[str, Any]] = {"wan_t2v": {}, "wan22_i2v": {"image": image()}}


def expected(model: TinyPair, texts: dict[str, Any], scheduler: Any = None, **call: Any) -> Any:
    """What the pipeline makes of both models."""
    vae, sampling = model.module(Role.VAE), model.family.sampling
    assert sampling.low_noise is not None
    assert sampling.defaults is not None
    latent = model.engine._opened(model.model).latent
    vae.register_to_config(latents_mean=latent.means, latents_std=latent.deviations)
    parts = {
        "transformer": model.module(Role.DIFFUSION_MODEL), "transformer_2": model.module(Role.DIFFUSION_MODEL_2),
        "vae": vae, "scheduler": scheduler or flow_scheduler(sampling.noise.shift),
        "boundary_ratio": sampling.low_noise.boundary, "tokenizer": None, "text_encoder": None,
    }  # fmt: skip
    pipeline = PIPELINES[model.family.name](**parts)
    pipeline.set_progress_bar_config(disable=True)
    call = {
        "guidance_scale": sampling.defaults.cfg, "guidance_scale_2": sampling.low_noise.cfg,
        "num_inference_steps": STEPS, **SHOWN[model.family.name], **call,
    }  # fmt: skip
    noise = ImageNoise(SEED).draw((1, 16, 2, HEIGHT // 8, WIDTH // 8))
    return pipeline(**texts, **call, height=HEIGHT, width=WIDTH, num_frames=FRAMES, latents=noise).frames


def video_of(made: Made) -> Any:
    video = made.results[made.tasks[-1].task_id]
    assert isinstance(video, VideoFrames)
    return video.frames_THWC


def runs_of(made: Made) -> list[SampleParams]:
    return [work for work in (made.works[task.task_id] for task in made.tasks) if isinstance(work, SampleParams)]


@pytest.mark.parametrize("name", TINY)
def test_a_video_of_two_models_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    """Each is guided as its authors have it, and begins where they say."""
    model = TinyPair(tmp_path, TINY[name])
    assert model.family.name == name
    made = model.made(**FIELDS, **SHOWN[name])
    high, low = runs_of(made)
    assert (high.schedule.low_noise, low.schedule.low_noise) == (False, True)
    assert high.schedule.switch == low.schedule.switch
    assert 0 < high.schedule.switch < STEPS
    assert high.steps_run + low.steps_run == STEPS
    assert any(isinstance(result, SamplerState) for result in made.results.values())
    assert_equal(made.latents[0], expected(model, made.texts, output_type="latent"))
    shown = expected(model, made.texts, output_type="np")[0]
    np.testing.assert_allclose(video_of(made) / 255, shown, atol=1 / 255)
    model.close()


class PublishedSolver(diffusers.UniPCMultistepScheduler):
    """The solver that Wan was published with, at our levels; it tells models whole timesteps, and ours the levels."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """As diffusers does; then the levels are ours. Where there is noise alone it divides by nothing."""
        super().set_timesteps(*args, **kwargs)
        sigmas = make_sigmas("normal", self.num_inference_steps, flow_table(self.config.flow_shift))
        sigmas[0] -= 1e-6
        self.sigmas, self.timesteps = sigmas, sigmas[:-1] * 1000


@pytest.mark.parametrize("name", TINY)
def test_the_published_solver_looks_back_across_the_change_of_models(name: str, tmp_path: Path) -> None:
    """diffusers keeps one scheduler over both: what it guessed with the first model leads the second one's steps."""
    model = TinyPair(tmp_path, TINY[name])
    made = model.made(**FIELDS, **SHOWN[name], sampler="uni_pc_2")
    (halfway,) = [result for result in made.results.values() if isinstance(result, SamplerState)]
    assert len(halfway.levels) == 2
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    solver = PublishedSolver(**settings, flow_shift=model.family.sampling.noise.shift)
    assert_equal(made.latents[0], expected(model, made.texts, solver, output_type="latent"))
    model.close()


def test_both_models_matter(tmp_path: Path) -> None:
    """With another second model's strength or another boundary it is another video."""
    model = TinyPair(tmp_path, TINY["wan_t2v"])
    plain = model.made(**FIELDS).latents[0]
    for said in ("1.5", ":0.6"):
        other = model.made(**FIELDS, low_noise=said).latents[0]
        assert not torch.allclose(plain, other, atol=1e-3), said
    model.close()


def test_one_of_the_two_runs_alone(tmp_path: Path) -> None:
    """As the file that it is: a person says which belong together."""
    model = TinyPair(tmp_path, TINY["wan_t2v"])
    made = model.made(**FIELDS, model="wan_high_noise")
    (work,) = runs_of(made)
    assert (work.schedule.switch, work.schedule.low_noise) == (0, False)
    with pytest.raises(UserError, match=r"low_noise: found 'cfg 3', .* is one .* `modelpool models assemble"):
        model.made(**FIELDS, model="wan_high_noise", low_noise=3)
    model.close()


def test_videos_are_made_together_by_each_model(tmp_path: Path) -> None:
    """Two that are halfway go on in one run: each is what it is alone, but for the last bits."""
    model = TinyPair(tmp_path, TINY["wan_t2v"])
    alone = [model.made(**FIELDS, seed=seed, sampler="uni_pc") for seed in (1, 2)]
    for place in (2, 3):  # the first model's run, and the second one's
        members = [
            BatchMember(made.tasks[place], made.works[made.tasks[place].task_id], inputs_of(made, place), QUIET)
            for made in alone
        ]
        assert len({member.task.together for member in members}) == 1
        outcomes = model.engine.run_batch(members)
        for made, outcome in zip(alone, outcomes, strict=True):
            assert not isinstance(outcome, Exception)
            found, cost = outcome
            assert cost.batched == 2
            one = made.results[made.tasks[place].task_id]
            for ours, own in zip(arrays_of(found), arrays_of(one), strict=True):
                assert_nearly(torch.from_numpy(ours), torch.from_numpy(own))
    assert alone[0].tasks[2].together != alone[0].tasks[3].together
    model.close()


def inputs_of(made: Made, place: int) -> tuple[Result, ...]:
    return results_read(made.tasks[place], made.results)


def arrays_of(result: Result) -> tuple[Any, ...]:
    assert isinstance(result, SamplerState | Latent)
    return result.arrays if isinstance(result, SamplerState) else (result.samples_CHW,)


@pytest.mark.parametrize("place", [2, 3])
def test_a_run_of_either_model_stops_at_a_step(place: int, tmp_path: Path) -> None:
    model = TinyPair(tmp_path, TINY["wan_t2v"])
    made, done = model.made(**FIELDS), list[tuple[int, int]]()
    task = made.tasks[place]
    hooks = RunHooks(lambda *step: done.append(step), lambda: len(done) >= 1)
    with pytest.raises(Stopped):
        model.engine.run(task, made.works[task.task_id], inputs_of(made, place), hooks)
    assert done == [(1, runs_of(made)[place - 2].steps_run)]
    model.close()


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[TinyPair]:
    """A pair on a simulated GPU with plenty of memory."""
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyPair(tmp_path, TINY["wan_t2v"], "sim")
    yield model
    model.close()


@pytest.mark.parametrize("sampler", ["euler", "uni_pc", "lms", "sa_solver", "heunpp2"])
@pytest.mark.counted
def test_what_either_run_holds_is_estimated(sampler: str, simulated: TinyPair) -> None:
    """As much as a run of one model for all steps: what a sampler looks back to is there in both."""
    fields = {**FIELDS, "steps": 5, "sampler": sampler}
    made = simulated.made(**fields)
    sent = GenerateRequest(model="wan_high_noise", prompt="p", seed=1, **fields)
    _, cut = build_graph(sent, JobId("one"), simulated.catalog)
    (alone,) = (task for task in cut.job.tasks if task.stage is Stage.SAMPLE)
    sampled = [(t, cost) for t, cost in zip(made.tasks, made.costs, strict=True) if t.stage is Stage.SAMPLE]
    assert len(sampled) == 2
    for task, cost in sampled:
        assert task.activation_bytes == alone.activation_bytes
        assert 0 < cost.working_bytes <= task.activation_bytes <= 1.2 * cost.working_bytes


def test_where_no_weights_stay_on_the_device_the_video_is_the_same(simulated: TinyPair) -> None:
    plenty = simulated.made(**FIELDS, sampler="uni_pc")
    simulated.close()
    simulated.engine = Engine.open(EngineSettings("sim", budget_bytes=1 << 28, vram_policy=VramPolicy.NONE))
    tight = simulated.made(**FIELDS, sampler="uni_pc")
    streamed = [
        cost.streamed_bytes for task, cost in zip(tight.tasks, tight.costs, strict=True) if task.stage is Stage.SAMPLE
    ]
    assert len(streamed) == 2
    assert all(streamed)
    np.testing.assert_allclose(plenty.latents[0], tight.latents[0], atol=1e-4)
