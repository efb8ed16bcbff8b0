"""Videos that begin with an image: equal to diffusers on the same weights, texts, image and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.sampling_facts import FirstFrameMode
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    Encoded,
    EncodeImageParams,
    GuidanceParams,
    ImageCondition,
    ImagePixels,
    Latent,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    Stopped,
    VideoBeginning,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import Role, TaskSpec
from tests.pool.families.tiny_transformers import FAMILIES, T5_WORDS, WIDTH, TinyFamily
from tests.pool.families.whole_transformer import FRAME_RATE, SEED, STEPS, Whole
from tests.pool.families.whole_transformer import HEIGHT as PIXELS_HIGH
from tests.pool.families.whole_transformer import WIDTH as PIXELS_WIDE
from tests.pool.input_names import inputs_of
from tests.pool.models.components.diffusion import video_published as video_layouts
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
_UMT5 = {"umt5_xxl": (lambda: texts.umt5(words=T5_WORDS), texts.t5_file)}


def _wan(channels: int, read: int) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=read, out_channels=channels, text_dim=WIDTH,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=1024,
    )  # fmt: skip


def _wan_22_vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=4, decoder_base_dim=6, z_dim=48, num_res_blocks=1, is_residual=True, patch_size=2, in_channels=12,
        out_channels=12, scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
    )  # fmt: skip


def louder(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a VAE of random weights, whose latents then tell images apart. Found: where all weights are as
    small as those of the other parts, behind norms, every image has the latent that the biases make."""
    factors = {name: 5.0 if x.dim() > 2 and "gamma" not in name else 1.0 for name, x in state.items()}
    factors |= dict.fromkeys((name for name in state if name.endswith("bias")), 0.1)
    return {name: x * factors[name] for name, x in state.items()}


CONCATENATED = TinyFamily(
    "wan22_i2v", lambda: _wan(16, 36), video_layouts.wan, _UMT5,
    lambda: diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1),
    lambda state: published.wan21(louder(state)),
)  # fmt: skip
KEPT = TinyFamily("wan22_ti2v", lambda: _wan(48, 48), video_layouts.wan, _UMT5, _wan_22_vae, published.wan22)


def image() -> ImagePixels:
    pixels = np.random.default_rng(4).integers(0, 256, (PIXELS_HIGH, PIXELS_WIDE, 3), np.uint8)
    return ImagePixels(pixels)


def _as_tensor(one: ImagePixels) -> Tensor:
    """Pixels as pipelines take them: 0 to 1."""
    return torch.from_numpy(one.pixels_HWC.copy()).permute(2, 0, 1)[None].float() / 255


def _noise(whole: Whole) -> Tensor:
    return ImageNoise(SEED).draw((1, *latent_shape(PIXELS_WIDE, PIXELS_HIGH, whole.frames, whole.opened.latent)))


def _call(whole: Whole, texts_read: tuple[Encoded, ...]) -> dict[str, Any]:
    defaults = whole.family.sampling.defaults
    assert defaults is not None
    contexts = [torch.from_numpy(text.context_LD)[None] for text in texts_read]
    return {
        "prompt_embeds": contexts[0], "negative_prompt_embeds": contexts[1], "guidance_scale": defaults.cfg,
        "height": PIXELS_HIGH, "width": PIXELS_WIDE, "num_frames": whole.frames, "num_inference_steps": STEPS,
        "output_type": "latent", "image": _as_tensor(image()),
    }  # fmt: skip


def _wan_pipeline(whole: Whole, texts_read: tuple[Encoded, ...]) -> Tensor:
    vae, model = whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL)
    vae.register_to_config(latents_mean=whole.opened.latent.means, latents_std=whole.opened.latent.deviations)
    pipeline = diffusers.WanImageToVideoPipeline(
        None, None, vae, FlowMatchEulerDiscreteScheduler(shift=5.0), transformer=model,
        expand_timesteps=whole.family.name == KEPT.name,
    )  # fmt: skip
    found: Tensor = pipeline(**_call(whole, texts_read), latents=_noise(whole)).frames
    return found


def _ltx_pipeline(whole: Whole, texts_read: tuple[Encoded, ...]) -> Tensor:
    """Its encoder draws from what it says of an image; here, as in ours, it is the mean."""
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    vae, model = whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL)
    pipeline = diffusers.LTXImageToVideoPipeline(scheduler, vae, None, None, model)
    noise = _noise(whole)
    mean = vae.encode(_as_tensor(image()).unsqueeze(2) * 2 - 1).latent_dist.mode()
    noise[:, :, :1] = pipeline._normalize_latents(mean, vae.latents_mean, vae.latents_std)
    given = _call(whole, texts_read)
    for side, text in zip(("", "negative_"), texts_read, strict=True):
        mask = text.others.get("context_mask", np.ones(len(text.context_LD), bool))
        given[f"{side}prompt_attention_mask"] = torch.from_numpy(mask)[None]
    found = pipeline(**given, latents=pipeline._pack_latents(noise, 1, 1), frame_rate=FRAME_RATE).frames
    unpacked: Tensor = pipeline._unpack_latents(found, *noise.shape[2:], 1, 1)
    return unpacked


CASES: Mapping[str, tuple[TinyFamily, Callable[[Whole, tuple[Encoded, ...]], Tensor]]] = {
    "wan22_i2v": (CONCATENATED, _wan_pipeline),
    "wan22_ti2v": (KEPT, _wan_pipeline),
    "ltxv": (FAMILIES["ltxv"], _ltx_pipeline),
}


@pytest.mark.parametrize("name", CASES)
def test_a_video_from_a_image_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    tiny, pipeline = CASES[name]
    whole = Whole(tmp_path, tiny)
    assert whole.family.name == name
    read, begins = whole.texts(), whole.family.sampling.video
    assert begins is not None
    frames = whole.frames if begins.begins is FirstFrameMode.CONCATENATED else 0
    first = whole.run(
        EncodeImageParams(whole.model, PIXELS_WIDE, PIXELS_HIGH, video=VideoBeginning(frames) if frames else None),
        image(),
    )
    assert isinstance(first, Latent)
    latent = whole.latent(read, beginning=first)
    with torch.no_grad():
        expected = pipeline(whole, read)
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    video = whole.pixels(latent)
    assert video.shape == (whole.frames, PIXELS_HIGH, PIXELS_WIDE, 3)
    whole.engine.close()


@pytest.mark.parametrize("name", ["wan22_ti2v", "ltxv"])
def test_a_kept_image_is_the_first_cell_of_the_video(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, CASES[name][0])
    read = whole.texts()
    first = whole.run(EncodeImageParams(whole.model, PIXELS_WIDE, PIXELS_HIGH), image())
    assert isinstance(first, Latent)
    with_it, without = whole.latent(read, beginning=first).samples_CHW, whole.latent(read).samples_CHW
    np.testing.assert_allclose(with_it[:, 0], first.samples_CHW, atol=1e-4)
    assert not np.allclose(with_it[:, 1:], without[:, 1:], atol=1e-2)
    whole.engine.close()


def test_a_video_stops_at_a_step(tmp_path: Path) -> None:
    """As images do: what is asked to stop makes no step more."""
    whole = Whole(tmp_path, FAMILIES["wan_t2v"])
    read, done = whole.texts(), [0]

    def on_step(step: int, steps: int) -> None:
        done[0] = step

    width, height, duration = whole.extent
    work = SampleParams(
        whole.model,
        (),
        OutputShape(width, height, **duration),
        SamplingSchedule(20, "euler", "normal"),
        GuidanceParams(5.0),
        SEED,
    )
    use = whole.catalog.use(whole.model, Role.DIFFUSION_MODEL, ())
    needed = whole.catalog.figures.activation_bytes(whole.model, work)
    task = TaskSpec(task_id(work, {}), stage_of(work), (use,), needed, 0.1)
    with pytest.raises(Stopped):
        whole.engine.run(task, work, inputs_of(work, *read), RunHooks(on_step, lambda: done[0] >= 2))
    assert done[0] == 2
    whole.engine.close()


@pytest.mark.counted
def test_more_frames_are_counted_and_expected_to_take_longer(tmp_path: Path) -> None:
    """Of sampling, decoding and encoding what a video begins with; a GPU's memory is planned by it."""
    whole = Whole(tmp_path, CONCATENATED)
    width, height, _ = whole.extent

    def figures(frames: int) -> list[tuple[int, float]]:
        works = (
            SampleParams(
                whole.model,
                (),
                OutputShape(width, height, frames, 8.0),
                SamplingSchedule(4, "euler", "normal"),
                GuidanceParams(5.0),
                1,
                (ImageCondition(),),
            ),
            DecodeParams(whole.model, OutputShape(width, height, frames, 8.0)),
            EncodeImageParams(whole.model, width, height, video=VideoBeginning(frames)),
        )
        asked = whole.catalog
        return [(asked.figures.activation_bytes(whole.model, w), asked.run_seconds(whole.model, w)) for w in works]

    for short, long in zip(figures(5), figures(33), strict=True):
        assert short[0] < long[0]
        assert short[1] < long[1]
    whole.engine.close()
