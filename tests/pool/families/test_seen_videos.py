"""Videos of an image that the model sees through a vision encoder: equal to diffusers on the same weights, image and
noise, and without diffusers where it has no pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.estimates.typical_run import typical_call
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.guidance.guiders import frame_guidance_scales
from modelpool.pool.inference.pixels.latent_pixels import to_vae_scale
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import Guidance
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    EncodeImageParams,
    ImageEmbeds,
    Latent,
    SampleParams,
    VideoFrames,
    VisionEncodeParams,
)
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.tracing.module_flops import module_work
from tests.pool.families.tiny_model import QUIET, Made, TinyModel
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.tiny_videos import GROUPS, SIDE, VIDEOS, TinyVideoModel, image_vae, temporal_vae
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.input_names import results_read
from tests.pool.models.components.vae import published

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PIPELINES = {"svd": diffusers.StableVideoDiffusionPipeline}
#: those without a pipeline in diffusers, and what they are told
CASES: Mapping[str, Mapping[str, Any]] = {"sv3d_u": {}, "sv3d_p": {"elevation": 30.0}}
CPU = torch.device("cpu")
WIDTH, HEIGHT, FRAMES, STEPS, SEED = 128, 64, 3, 3, 11
FIELDS: dict[str, Any] = {"prompt": "", "frames": FRAMES, "steps": STEPS}


def image(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Nothing in it is like anything beside it."""
    return Image.fromarray(np.random.default_rng(4).integers(0, 256, (height, width, 3), np.uint8))


class _OurLevels(diffusers.EulerDiscreteScheduler):  # type: ignore[misc] # diffusers is not typed
    """diffusers' Euler at our levels, which differ in the last bits."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        assert torch.allclose(self.sigmas, self.levels, rtol=1e-4)
        self.sigmas = self.levels
        self.timesteps = 0.25 * self.levels[:-1].log()


def _scheduler(tiny: TinyModel) -> Any:
    scheduler = _OurLevels(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
        sigma_min=0.002, sigma_max=700.0, steps_offset=1, timestep_spacing="leading", timestep_type="continuous",
        use_karras_sigmas=True,
    )  # fmt: skip
    scheduler.levels = make_sigmas("karras", STEPS, sigma_table(tiny.family.sampling.noise))
    return scheduler


def _processor() -> Any:
    """What diffusers normalises with; it resizes by itself."""
    sides = {"height": SIDE, "width": SIDE}
    return transformers.CLIPImageProcessorPil(size=sides, crop_size=sides)


def _pipeline(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the pixels that the vision encoder of the tiny model is shown, and our noise on the image."""
    from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion as module

    resize = module._resize_with_antialiasing
    monkeypatch.setattr(module, "_resize_with_antialiasing", lambda image, _: resize(image, (SIDE, SIDE)))
    monkeypatch.setattr(
        module, "randn_tensor", lambda shape, **_: ImageNoise(image_noise_seed(SEED)).draw(tuple(shape))
    )
    vae = tiny.module(Role.VAE)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor, force_upcast=False)
    found = PIPELINES["svd"](
        vae, tiny.module(Role.VISION_ENCODER), tiny.module(Role.DIFFUSION_MODEL), _scheduler(tiny), _processor()
    )
    found.set_progress_bar_config(disable=True)
    return found


def _expected(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, **call: Any) -> Any:
    noise_BTCHW = ImageNoise(SEED).draw((1, 4, FRAMES, HEIGHT // 8, WIDTH // 8)).transpose(1, 2)
    return _pipeline(tiny, monkeypatch)(
        image(), height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS, latents=noise_BTCHW, **call
    ).frames


def _video(made: Made) -> VideoFrames:
    video = made.results[made.tasks[-1].task_id]
    assert isinstance(video, VideoFrames)
    return video


@pytest.mark.parametrize(
    ("fields", "call"),
    [
        ({}, {}),
        (
            {"motion": 20, "image_noise": 0.3, "cfg": 2.0, "frame_rate": 12.0},
            {"motion_bucket_id": 20, "noise_aug_strength": 0.3, "max_guidance_scale": 2.0, "fps": 12},
        ),
        ({"cfg": 1.0}, {"max_guidance_scale": 1.0}),
    ],
    ids=["usual", "told", "without guidance"],
)
def test_a_video_of_a_image_is_that_of_diffusers(
    fields: dict[str, float], call: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyVideoModel(tmp_path, VIDEOS["svd"])
    assert tiny.family.name == "svd"
    made = tiny.made(image=image(), **FIELDS, **fields)
    expected = _expected(tiny, monkeypatch, output_type="latent", **call)
    assert_equal(made.latents[0].transpose(1, 2), expected)
    shown = _expected(tiny, monkeypatch, output_type="np", **call)[0]
    video = _video(made)
    assert video.frames_THWC.shape == (FRAMES, HEIGHT, WIDTH, 3)
    np.testing.assert_allclose(video.frames_THWC / 255, shown, atol=1 / 255)
    assert video.frame_rate == fields.get("frame_rate", 7.0)
    tiny.close()


def test_the_file_of_the_training_code_has_nothing_between_encoder_and_latent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the published file is; folders of diffusers have a convolution there."""
    bare = replace(VIDEOS["svd"], vae_file=published.temporal_without_convolution)
    tiny = TinyVideoModel(tmp_path, bare)
    made = tiny.made(image=image(), **FIELDS)
    assert_equal(made.latents[0].transpose(1, 2), _expected(tiny, monkeypatch, output_type="latent"))
    tiny.close()


def test_videos_that_are_made_together_are_those_made_alone(tmp_path: Path) -> None:
    """Each has the noise on its image, and its states, beside it."""
    tiny = TinyVideoModel(tmp_path, VIDEOS["svd"])
    alone = [tiny.made(image=image(), **FIELDS, seed=seed) for seed in (1, 2)]
    members = []
    for made in alone:
        (task,) = [task for task in made.tasks if isinstance(made.works[task.task_id], SampleParams)]
        inputs = results_read(task, made.results)
        members.append(BatchMember(task, made.works[task.task_id], inputs, QUIET))
    outcomes = tiny.engine.run_batch(members)
    for outcome, made in zip(outcomes, alone, strict=True):
        assert isinstance(outcome, tuple), outcome
        latent, cost = outcome
        assert isinstance(latent, Latent)
        assert cost.batched == len(members)
        np.testing.assert_allclose(latent.samples_CHW, made.latents[0][0], atol=1e-4)
    assert not torch.allclose(alone[0].latents[0], alone[1].latents[0], atol=0.1)
    tiny.close()


def test_a_video_on_a_simulated_gpu_is_that_of_the_cpu(tmp_path: Path) -> None:
    """Each of its runs holds what was estimated; and it is the same where all weights stream."""
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    made = {}
    for device in ("cpu", "sim"):
        (tmp_path / device).mkdir()
        tiny = TinyVideoModel(tmp_path / device, VIDEOS["svd"], device)
        made[device] = tiny.made(image=image(), **FIELDS)
        for task, cost in zip(made[device].tasks, made[device].costs, strict=True):
            assert device == "cpu" or cost.working_bytes <= task.activation_bytes <= 1.05 * cost.working_bytes
        tiny.close()
    tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=1 << 28, vram_policy=VramPolicy.NONE))
    made["streamed"] = tiny.made(image=image(), **FIELDS)
    assert all(cost.streamed_bytes > 0 for cost in made["streamed"].costs)
    tiny.close()
    for kind in ("sim", "streamed"):
        np.testing.assert_allclose(made[kind].latents[0], made["cpu"].latents[0], atol=1e-4)
        assert np.abs(_video(made[kind]).frames_THWC.astype(int) - _video(made["cpu"]).frames_THWC).max() <= 1


@pytest.mark.parametrize("name", VIDEOS)
def test_the_usual_run_of_every_component_can_be_looked_at(name: str, tmp_path: Path) -> None:
    """What stays resident where not all can is planned by it."""
    tiny = TinyVideoModel(tmp_path, VIDEOS[name])
    opened = tiny.engine._opened(tiny.model)
    for role in tiny.family.prefixes:
        component = opened.component(role)
        found = module_work(component.built.module, component.form.compute_dtype, typical_call(opened, role))
        assert sum(found.values()) > 0, role
    tiny.close()


def test_seeds_share_what_is_seen_of_a_image_and_not_its_noise(tmp_path: Path) -> None:
    """The vision encoder sees the image without noise: its work is one task, whoever asks."""
    tiny = TinyVideoModel(tmp_path, VIDEOS["svd"])
    one, other = (tiny.made(image=image(), **FIELDS, seed=seed) for seed in (1, 2))

    def tasks(made: Made, kind: type) -> set[Any]:
        return {task for task, work in made.works.items() if isinstance(work, kind)}

    assert tasks(one, VisionEncodeParams) == tasks(other, VisionEncodeParams)
    assert not tasks(one, EncodeImageParams) & tasks(other, EncodeImageParams)
    still, calm = (tiny.made(image=image(), **FIELDS, seed=seed, image_noise=0.0) for seed in (1, 2))
    assert tasks(still, EncodeImageParams) == tasks(calm, EncodeImageParams)
    tiny.close()


@pytest.mark.parametrize("name", CASES)
def test_a_way_around_a_thing_is_what_its_unet_makes_in_the_loop_of_svd(name: str, tmp_path: Path) -> None:
    """diffusers has no pipeline of it: its UNet in a loop by hand, told of noise and, p, of the view of each frame."""
    tiny = TinyVideoModel(tmp_path, VIDEOS[name])
    assert tiny.family.name == name
    made = tiny.made(image=image(64, 64), **FIELDS, **CASES[name])
    (seen,), (first,) = made.of(VisionEncodeParams), made.of(EncodeImageParams)
    assert isinstance(seen, ImageEmbeds)
    assert isinstance(first, Latent)
    height = math.radians(60.0)
    views = [[1e-5, height, way] for way in (2 * math.pi / 3, 4 * math.pi / 3, 0.0)]
    numbers = torch.tensor([[1e-5]]) if name == "sv3d_u" else torch.tensor([views])
    expected = _by_hand(
        tiny, torch.from_numpy(seen.states_LD)[None], torch.from_numpy(first.samples_CHW)[None], numbers
    )
    assert_equal(made.latents[0], expected)
    pixels = _frames(tiny, expected[0].transpose(0, 1) / tiny.family.scaling_factor)
    shown = (pixels.permute(0, 2, 3, 1) / 2 + 0.5).clamp(0, 1)
    np.testing.assert_allclose(_video(made).frames_THWC / 255, shown.numpy(), atol=1 / 255)
    tiny.close()


def _frames(tiny: TinyModel, latents_TCHW: Tensor) -> Tensor:
    """What the decoder makes that the family was published with: p's sees all frames at once, u's each by itself."""
    vae = tiny.module(Role.VAE)
    if tiny.family.name == "sv3d_u":
        assert isinstance(vae, diffusers.AutoencoderKL)
        return torch.stack([vae.decode(latent[None]).sample[0] for latent in latents_TCHW])
    made: Tensor = seeded(temporal_vae, 4).decoder(latents_TCHW, torch.zeros(1, FRAMES), FRAMES)
    assert isinstance(vae, diffusers.AutoencoderKLTemporalDecoder)
    white = torch.ones(1, 3, 32, 32)
    own, published_one = (each.encode(white).latent_dist.mean for each in (vae, seeded(lambda: image_vae(GROUPS), 2)))
    torch.testing.assert_close(own, published_one)
    return made


def _by_hand(tiny: TinyModel, seen_B1D: Tensor, first_BCHW: Tensor, numbers: Tensor) -> Tensor:
    """Euler's steps with velocity, guided by from 1 to 2.5 in the middle and back to 1."""
    unet, sigmas = (
        tiny.module(Role.DIFFUSION_MODEL),
        make_sigmas("karras", STEPS, sigma_table(tiny.family.sampling.noise)),
    )
    image = to_vae_scale(first_BCHW, tiny.engine._opened(tiny.model).latent)[:, None].expand(-1, FRAMES, -1, -1, -1)
    strengths = torch.tensor([1.0, 2.5, 1.0]).reshape(1, FRAMES, 1, 1, 1)
    x = ImageNoise(SEED).draw((1, 4, FRAMES, 8, 8)).transpose(1, 2) * math.sqrt(1 + float(sigmas[0]) ** 2)
    for sigma, after in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        scaled = x / math.sqrt(1 + sigma**2)
        answers = [
            unet(
                torch.cat([scaled, shown], dim=2), torch.tensor(0.25 * math.log(sigma)), states,
                added_time_ids=numbers, return_dict=False,
            )[0]
            for shown, states in ((torch.zeros_like(image), torch.zeros_like(seen_B1D)), (image, seen_B1D))
        ]  # fmt: skip
        velocity = answers[0] + strengths * (answers[1] - answers[0])
        clean = x / (1 + sigma**2) - velocity * sigma / math.sqrt(1 + sigma**2)
        x = clean + (x - clean) / sigma * after
    return x.transpose(1, 2)


@pytest.mark.parametrize("name", VIDEOS)
def test_a_file_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    """Every tensor, those of no component included."""
    tiny = TinyVideoModel(tmp_path, VIDEOS[name])
    opened = tiny.engine._opened(tiny.model)
    save_checkpoint(opened, tmp_path / "again.safetensors")
    before, after = load_file(tmp_path / "tiny.safetensors"), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    tensors = opened.checkpoint.mapped.tensors()
    for role in tiny.family.prefixes:
        key_map, module = opened.checkpoint.key_map(role), tiny.module(role)
        saved = key_map.save(module.state_dict())
        assert saved, f"{role} has no tensors"
        assert all(torch.equal(saved[key], tensors[key]) for key in saved)
    tiny.close()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "svd",
            {"image": None},
            "image: missing; model 'tiny' requires the first frame",
        ),
        (
            "svd",
            {"elevation": 3.0},
            "elevation: found 3.0, not supported by model 'tiny', which accepts no camera elevation",
        ),
        ("sv3d_u", {"motion": 3}, "motion: found 3, not supported by model 'tiny', which accepts no amount of motion"),
        ("sv3d_u", {"mask": image(64, 64)}, "mask: not supported by model 'tiny', which generates videos"),
        ("svd", {"width": 72}, "width: found 72, expected a multiple of 64"),
    ],
)
def test_what_a_model_cannot_be_asked_for_is_refused_by_name(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny = TinyVideoModel(tmp_path, VIDEOS[name])
    with pytest.raises(UnusableField, match=message):
        tiny.made(**{"image": image(64, 64), **FIELDS, **fields})
    tiny.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"motion": 1024}, "motion: found 1024, expected a whole number from 0 to 1023"),
        ({"motion": 1.5}, "motion: found 1.5, expected a whole number"),
        ({"motion": True}, "motion: found True"),
        ({"image_noise": -0.1}, "image_noise: found -0.1, expected a number from 0 to 1"),
        ({"image_noise": "nan"}, "image_noise: found 'nan'"),
        ({"elevation": 91}, "elevation: found 91, expected a number from -90 to 90"),
    ],
)
def test_numbers_of_videos_have_limits(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableField, match=message):
        GenerateRequest(model="m", prompt="", **fields)


def test_a_prompt_is_left_out_with_a_warning(tmp_path: Path) -> None:
    from modelpool.actors.control.inputs.input_images import InputImages
    from modelpool.actors.graph.build_graph import build_graph
    from modelpool.pool.values.specs.spec import JobId

    tiny = TinyVideoModel(tmp_path, VIDEOS["svd"])

    def cut(prompt: str) -> Any:
        request = GenerateRequest(model="tiny", seed=1, image=image(), **{**FIELDS, "prompt": prompt})
        given, _ = InputImages(lambda result: result).bring(request)
        return build_graph(given, JobId("j"), tiny.catalog)

    (recipe, with_it), (_, without) = cut("a cat"), cut("")
    assert recipe.warnings == ("prompt: ignored, model 'tiny' reads no prompt",)
    assert not without.warnings
    assert with_it.works == without.works
    assert not any(type(work).__name__ == "EncodeParams" for work in with_it.works.values())
    assert any(isinstance(work, SampleParams) for work in with_it.works.values())
    tiny.close()


@pytest.mark.parametrize("most", [1.0, 2.5, 3.0])
@pytest.mark.parametrize("cells", [1, 2, 14, 21, 25])
def test_strengths_begin_at_one_and_reach_the_strongest(most: float, cells: int) -> None:
    """Rising: at the last frame. Rising and falling: half way, and weakest again at the end."""
    rising = frame_guidance_scales(Guidance.RISING_WITH_FRAMES, most, cells, CPU)
    both = frame_guidance_scales(Guidance.RISING_AND_FALLING, most, cells, CPU)
    assert rising.shape == both.shape == (1, 1, cells, 1, 1)
    assert float(rising.flatten()[0]) == float(both.flatten()[0]) == 1.0
    assert bool((rising.flatten().diff() >= 0).all())
    torch.testing.assert_close(both, both.flip(2))
    if cells > 1:
        assert float(rising.max()) == most
        assert float(both.flatten()[-1]) == pytest.approx(1.0)
    if cells % 2 and cells > 1:
        assert float(both.max()) == pytest.approx(most)
