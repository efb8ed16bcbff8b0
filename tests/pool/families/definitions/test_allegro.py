"""Allegro, compared with its pipeline in diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler
from diffusers.schedulers import scheduling_euler_ancestral_discrete
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.components.vae.allegro_vae import AutoencoderKLAllegro
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import Encoded, Latent, VideoFrames
from modelpool.pool.values.specs.spec import Role, Stage
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import T5, WIDTH, TinyFamily, seeded
from tests.pool.families.whole_transformer import SEED, STEPS, Whole
from tests.pool.models.text.tiny_tokenizers import for_transformers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
HEADS, HEAD = 2, 96
_LEVELS = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 2}


def _model() -> Any:
    sizes = {"num_attention_heads": HEADS, "cross_attention_dim": HEADS * HEAD, "num_layers": 2}
    return diffusers.AllegroTransformer3DModel(caption_channels=WIDTH, **sizes)


def _vae() -> Any:
    return diffusers.AutoencoderKLAllegro(**_LEVELS)


def _pipeline(encoder: Any, vae: Any, model: Any) -> Any:
    scheduler = EulerAncestralDiscreteScheduler(**scheduler_facts(TRANSFORMERS["allegro"]).settings)
    return diffusers.AllegroPipeline(for_transformers("t5"), encoder, vae, model, scheduler)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    with torch.no_grad():
        found, mask, _, _ = _pipeline(modules[0], None, None).encode_prompt(prompt, False, device=torch.device("cpu"))
    return {"context": found, "context_mask": mask.bool()}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    """With the noise of the steps that the run draws."""
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    prompt, negative = (torch.from_numpy(text.others["context_mask"])[None].long() for text in texts)
    width, height = whole.sides
    noise = ImageNoise(SEED)
    first = noise.draw(noise_of(whole).shape)
    with mock.patch.object(
        scheduling_euler_ancestral_discrete, "randn_tensor", lambda shape, **_: noise.draw(tuple(shape))
    ):
        found: Tensor = _pipeline(*modules)(
            prompt_embeds=states(texts[0]), prompt_attention_mask=prompt, negative_prompt_embeds=states(texts[1]),
            negative_prompt_attention_mask=negative, height=height, width=width, num_frames=whole.frames,
            num_inference_steps=STEPS, guidance_scale=7.5, latents=first, output_type="latent", negative_prompt=None,
        ).frames  # fmt: skip
    return found


def _of_diffusers(own: Any, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> Any:
    """The autoencoder of diffusers with the weights of `own`, in these tiles."""
    theirs = diffusers.AutoencoderKLAllegro(**_LEVELS).eval().requires_grad_(False)
    theirs.load_state_dict(own.state_dict())
    theirs.enable_tiling()
    theirs.kernel, theirs.stride = kernel, stride
    return theirs


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    """As the pipeline, whose tiles fill the video: it decodes frames that it drops."""
    width, height = whole.sides
    tile = 4 * latent.shape[2], height, width
    theirs = _of_diffusers(whole.module(Role.VAE), tile, tile)
    video: Tensor = theirs.decode(latent / whole.opened.latent.scaling_factor).sample.transpose(1, 2)
    return video[:, :, : whole.frames]


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"allegro": ("transformer_blocks.0.attn1.to_q", "transformer.{}")}
CASES = {
    "allegro": Compared(
        TinyFamily("allegro", _model, dict, {"t5xxl": T5}, _vae, dict),
        diffusers.AllegroPipeline,
        _latent,
        _texts,
        LORAS["allegro"],
        decode=_decoded,
    )
}


class TestAllegro(FamilyTests):
    case = CASES["allegro"]


def test_tiles_of_the_autoencoder_are_those_of_diffusers_and_reach_the_end() -> None:
    """diffusers leaves the rest of a video black, where its tiles do not fill it."""
    ours: Any = AutoencoderKLAllegro(**_LEVELS).eval().requires_grad_(False)
    ours.load_state_dict(seeded(_vae, 2).state_dict())
    ours.kernel, ours.stride = (8, 32, 32), (4, 16, 24)
    theirs = _of_diffusers(ours, ours.kernel, ours.stride)
    generator = torch.Generator().manual_seed(5)
    latent, pixels = torch.randn(1, 4, 3, 6, 7, generator=generator), torch.randn(1, 3, 12, 48, 56, generator=generator)
    torch.testing.assert_close(ours.decode(latent).sample, theirs.decode(latent).sample, rtol=1e-4, atol=1e-5)
    found, expected = (vae.encode(pixels).latent_dist.parameters for vae in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    longer = torch.cat((latent, torch.randn(1, 4, 3, 1, 7, generator=generator)), dim=3)
    video = ours.decode(longer).sample
    assert not theirs.decode(longer).sample[..., 48:, :].any()
    torch.testing.assert_close(video[..., :16, :], ours.decode(latent).sample[..., :16, :], rtol=1e-4, atol=1e-5)
    last = ours.decode(longer[..., 3:, :]).sample
    torch.testing.assert_close(video[..., 48:, :], last[..., 24:, :], rtol=1e-4, atol=1e-5)


def test_a_dry_run_computes_one_tile() -> None:
    """A video of the published size has 75, which took 16 seconds."""
    with torch.device("meta"):
        vae: Any = AutoencoderKLAllegro(**_LEVELS).eval()
        calls: list[Tensor] = []
        vae.decoder.register_forward_hook(lambda _, __, out: calls.append(out))
        video = vae.decode(torch.empty(1, 4, 22, 90, 160)).sample
    assert (video.shape, len(calls)) == ((1, 88, 3, 720, 1280), 1)


def test_levels_are_those_of_the_published_scheduler() -> None:
    """That of its authors' script, whose settings are those of the class."""
    family = TRANSFORMERS["allegro"]
    defaults, scheduler = family.sampling.defaults, EulerAncestralDiscreteScheduler()
    assert defaults is not None
    settings = scheduler_facts(family).settings
    assert {name: scheduler.config[name] for name in settings} == settings
    for steps in (4, 100):
        scheduler.set_timesteps(steps)
        ours = make_sigmas(defaults.schedule, steps, sigma_table(family.sampling.noise))
        torch.testing.assert_close(ours, scheduler.sigmas.to(ours.dtype), rtol=1e-4, atol=1e-5)


def test_published_sizes_are_told_from_relatives() -> None:
    """The image-to-video model has further convolutions of patches, and does not run."""
    with torch.device("meta"):
        state = diffusers.AllegroTransformer3DModel(num_layers=1).state_dict()
        plain = diffusers.PixArtTransformer2DModel(num_layers=1, sample_size=64, out_channels=4).state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    published = plan_diffusion_model(shapes)
    assert published.recognised.name == "allegro"
    assert published.config["num_attention_heads"] == 24
    reading = {**shapes, "pos_embed_masked_video.1.weight": (2304, 2304)}
    found = recognise_diffusion(reading)
    assert found is not None
    assert (found.name, found.runs) == ("allegro_ti2v", "")
    with pytest.raises(UnknownArchitecture, match="Allegro image-to-video"):
        plan_diffusion_model(reading)
    relative = recognise_diffusion({key: tuple(value.shape) for key, value in plain.items()})
    assert relative is not None
    assert relative.name == "pixart_sigma"


@pytest.mark.counted
def test_requests_make_videos_and_decoding_needs_what_was_estimated(tmp_path: Path) -> None:
    sim.install()
    sim.configure(0, 1 << 29)
    sim.recover(0)
    case = CASES["allegro"]
    save_file(case.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, case.tiny)
    tiny = TinyModel.of_folder(tmp_path, device="sim")
    made = tiny.made(width=96, height=64, steps=1, frames=9)
    tiny.close()
    results = list(made.results.values())
    (latent,) = (each for each in results if isinstance(each, Latent))
    (video,) = (each for each in results if isinstance(each, VideoFrames))
    assert (latent.samples_CHW.shape, video.frames_THWC.shape) == ((4, 3, 8, 12), (9, 64, 96, 3))
    ((task, cost),) = (pair for pair in zip(made.tasks, made.costs, strict=True) if pair[0].stage is Stage.DECODE)
    assert 0.9 * task.activation_bytes <= cost.working_bytes <= task.activation_bytes
