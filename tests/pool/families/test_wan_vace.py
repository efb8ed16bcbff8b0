"""Wan VACE makes of a video that it follows, of parts of it, and of images that it works from, what diffusers makes:
on the same weights, texts and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    EncodeImageParams,
    Latent,
    OutputShape,
    SampleParams,
    VideoFrames,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_model import Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.tiny_transformers import TinyFamily
from tests.pool.inference.conditioning.test_image_concat import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, FRAMES, STEPS, SEED = 96, 64, 9, 3, 11
FIELDS: dict[str, Any] = {"frames": FRAMES, "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT}


def _model() -> Any:
    return diffusers.WanVACETransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=TEXT_WIDTH,
        freq_dim=16, ffn_dim=32, num_layers=4, vace_layers=[0, 2], vace_in_channels=96, rope_max_seq_len=1024,
    )  # fmt: skip


VACE = TinyFamily(
    "wan_vace", _model, CONCATENATED.publish, CONCATENATED.encoders, CONCATENATED.vae, CONCATENATED.vae_file
)


def frames(seed: int, count: int = FRAMES) -> Any:
    """No frame is like another."""
    return np.random.default_rng(seed).integers(0, 256, (count, HEIGHT, WIDTH, 3), np.uint8)


def image(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def masks() -> Any:
    """Kept in the first frames, made anew in a part that moves in the others."""
    found = np.zeros((FRAMES, HEIGHT, WIDTH), bool)
    for frame in range(2, FRAMES):
        found[frame, 8 : 8 + 4 * frame, frame:-frame] = True
    return found


def _expected(model: TinyFamilyModel, made: Made, output_type: str = "latent", **call: Any) -> Any:
    vae, defaults = model.module(Role.VAE), model.family.sampling.defaults
    assert defaults is not None
    latent = model.engine._opened(model.model).latent
    vae.register_to_config(latents_mean=latent.means, latents_std=latent.deviations)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=model.family.sampling.noise.shift)
    pipeline = diffusers.WanVACEPipeline(None, None, vae, scheduler, model.module(Role.DIFFUSION_MODEL))
    pipeline.set_progress_bar_config(disable=True)
    (work,) = [one for one in made.works.values() if isinstance(one, SampleParams)]
    noise = ImageNoise(SEED).draw((1, *sampled_shape(work, latent)))
    found = pipeline(
        **made.texts, **call, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS, latents=noise,
        guidance_scale=defaults.cfg, output_type=output_type,
    ).frames  # fmt: skip
    return found[:, :, work.shape.leading :] if output_type == "latent" else found[0]


def _video(made: Made) -> Any:
    video = made.results[made.tasks[-1].task_id]
    assert isinstance(video, VideoFrames)
    return video.frames_THWC


def _images(found: Any) -> list[Image.Image]:
    """As pipelines take them."""
    return [Image.fromarray(one.astype(np.uint8) * 255 if one.dtype == bool else one) for one in found]


VIDEO, MASKS, FIRST, SECOND = frames(1), masks(), image(2, 96, 64), image(3, 48, 80)
_PADDED = np.concatenate([VIDEO[:3], np.full_like(VIDEO[3:], 128)])
_REST = np.arange(FRAMES)[:, None, None] >= 3
#: what is asked of ours, and of the pipeline
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text alone": ({}, {}),
    "a video": ({"video": VIDEO}, {"video": _images(VIDEO)}),
    "parts of it": ({"video": VIDEO, "video_mask": MASKS}, {"video": _images(VIDEO), "mask": _images(MASKS)}),
    "pictures": ({"reference": [FIRST, SECOND]}, {"reference_images": [FIRST, SECOND]}),
    "all": (
        {"video": list(_images(VIDEO)), "video_mask": MASKS, "reference": SECOND},
        {"video": _images(VIDEO), "mask": _images(MASKS), "reference_images": [SECOND]},
    ),
}
PIPELINES = {"wan_vace": diffusers.WanVACEPipeline}


@pytest.mark.parametrize("name", CALLS)
def test_a_video_that_follows_another_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    ours, theirs = CALLS[name]
    model = TinyFamilyModel(tmp_path, VACE)
    assert model.family.name == "wan_vace"
    made = model.made(**ours, **FIELDS)
    expected = _expected(model, made, **theirs)
    assert expected.shape[2] == 1 + (FRAMES - 1) // 4
    assert_equal(made.latents[0], expected)
    np.testing.assert_allclose(_video(made) / 255, _expected(model, made, "np", **theirs), atol=1 / 255)
    model.close()


def test_what_it_is_told_matters(tmp_path: Path) -> None:
    """Each of these makes another video."""
    model = TinyFamilyModel(tmp_path, VACE)
    made = [model.made(**ours, **FIELDS).latents[0] for ours, _ in CALLS.values()]
    for place, one in enumerate(made):
        assert not any(torch.allclose(one, other, atol=1e-3) for other in made[:place])
    model.close()


def test_after_a_shorter_video_all_is_made_anew(tmp_path: Path) -> None:
    """A video is gone on with: what is given is kept, and what is not is grey that nothing keeps."""
    model = TinyFamilyModel(tmp_path, VACE)
    kept = np.zeros((HEIGHT, WIDTH), bool)
    shorter = model.made(video=VIDEO[:3], video_mask=kept, **FIELDS).of(EncodeImageParams)[0]
    whole = model.made(video=_PADDED, video_mask=_REST & np.ones_like(MASKS), **FIELDS).of(EncodeImageParams)[0]
    assert isinstance(shorter, Latent)
    assert isinstance(whole, Latent)
    np.testing.assert_array_equal(shorter.samples_CHW[:16], whole.samples_CHW[:16])
    np.testing.assert_array_equal(shorter.samples_CHW[32:], whole.samples_CHW[32:])
    # bytes have no grey in the middle
    np.testing.assert_allclose(shorter.samples_CHW[16:32], whole.samples_CHW[16:32], atol=0.1)
    model.close()


def test_sizes_left_out_are_those_of_the_video(tmp_path: Path) -> None:
    """In whole steps of the model; of more frames the first are followed."""
    model = TinyFamilyModel(tmp_path, VACE)
    wide = np.random.default_rng(0).integers(0, 256, (7, 72, 100, 3), np.uint8)
    (work,) = [one for one in model.made(video=wide, steps=1).works.values() if isinstance(one, SampleParams)]
    assert work.shape == OutputShape(96, 64, 5, work.shape.frame_rate)
    model.close()


#: weights of the blocks that read the video and of the others, under published names
LORAS = {"wan_vace": ("vace_blocks.1.self_attn.q", "vace_blocks.0.before_proj", "blocks.3.self_attn.q")}


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_draws_what_the_merged_file_draws(name: str, tmp_path: Path) -> None:
    plain, loras, merged = tmp_path / "plain", tmp_path / "loras", tmp_path / "merged"
    for folder in (plain, loras, merged):
        folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    factors = {
        f"diffusion_model.{weight}.lora_{side}.weight": torch.randn(shape, generator=generator) * scale
        for weight in LORAS[name]
        for side, shape, scale in (("A", (2, 128), 1.0), ("B", (128, 2), 0.05))
    }
    save_file(factors, loras / "some.safetensors")
    model, asked = TinyFamilyModel(plain, VACE, loras=(loras,)), {**CALLS["all"][0], **FIELDS}
    assert model.catalog.lora_warning(model.model, model.catalog.find_lora("some", 0.8)) is None
    without, drawn = (model.made(**asked, loras=with_it).latents[0] for with_it in ((), ("some:0.8",)))
    lora = model.catalog.find_lora("some", 0.8)
    save_checkpoint(model.engine._opened(model.model), merged / "tiny.safetensors", loras=(lora,))
    model.close()
    for path in plain.glob("tokenizer_*"):
        path.rename(merged / path.name)
    other = TinyFamilyModel.of_folder(merged)
    expected = other.made(**asked).latents[0]
    other.close()
    assert not torch.allclose(without, expected, atol=1e-3)
    assert_equal(drawn, expected)


@pytest.mark.parametrize("name", ["text alone", "all"])
@pytest.mark.counted
def test_what_runs_hold_is_estimated(name: str, tmp_path: Path) -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyFamilyModel(tmp_path, VACE, "sim")
    made = model.made(**CALLS[name][0], **FIELDS)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams | EncodeImageParams):
            assert cost.division is None
            assert cost.working_bytes <= task.activation_bytes <= 1.15 * cost.working_bytes
    model.close()


def test_a_file_and_its_folder_draw_the_same(tmp_path: Path) -> None:
    """Saved again it is the same file, tensor for tensor; as a folder of diffusers the same model."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    for folder in (first, second, third):
        folder.mkdir()
    model = TinyFamilyModel(first, VACE)
    asked = {**CALLS["all"][0], **FIELDS}
    latent = model.made(**asked).latents[0]
    save_checkpoint(model.engine._opened(model.model), second / "tiny.safetensors")
    model.close()
    before, after = load_file(first / "tiny.safetensors"), load_file(second / "tiny.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for path in first.glob("tokenizer_*"):
        path.rename(second / path.name)
    assert save_diffusers(open_checkpoint(second / "tiny.safetensors"), third / "tiny").missing == ()
    for folder in (second, third):
        again = TinyFamilyModel.of_folder(folder)
        assert again.family.name == "wan_vace"
        assert torch.equal(again.made(**asked).latents[0], latent)
        again.close()


@pytest.mark.parametrize(
    ("tiny", "fields", "message"),
    [
        (VACE, {"image": FIRST}, "image: not supported by model 'tiny', which accepts images as reference"),
        (
            CONCATENATED,
            {"image": FIRST, "video": VIDEO},
            "video: not supported by model 'tiny', which accepts no",
        ),
        (
            VACE,
            {"video": VIDEO, "video_mask": MASKS[:4]},
            "video_mask: found '4 frames', expected 1 frame, or 9 like the video",
        ),
        (VACE, {"video": VIDEO, "video_mask": MASKS[:, 8:]}, "video_mask: found '96x56', expected 96x64 pixels"),
        (VACE, {"video_mask": MASKS}, "video_mask requires video"),
    ],
    ids=["image", "no follower", "frames", "size", "mask alone"],
)
def test_what_does_not_go_together_is_told_by_name(
    tiny: TinyFamily, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = TinyFamilyModel(tmp_path, tiny)
    with pytest.raises(UnusableField, match=message):
        model.made(**FIELDS, **fields)
    model.close()
