"""Lucy Edit, compared with its pipeline in diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import DecodeParams, SampleParams, VideoFrames
from modelpool.pool.values.specs.spec import Role
from tests.pool.families import test_videos_from_images as from_images
from tests.pool.families.definitions.compared import Compared, check_lora_of_requests
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.tiny_transformers import TinyFamily
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.models.components.vae import published

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, FRAMES, STEPS, SEED, CFG = 64, 96, 5, 3, 11, 5.0
FIELDS: dict[str, Any] = {
    "frames": FRAMES, "steps": STEPS, "width": WIDTH, "height": HEIGHT, "seed": SEED, "negative": "a dog",
}  # fmt: skip


def _model(read: int = 96) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=read, out_channels=48, text_dim=TEXT_WIDTH,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=1024,
    )  # fmt: skip


PUBLISH = from_images.KEPT.publish
TINY = TinyFamily(
    "lucy_edit", _model, PUBLISH, from_images.KEPT.encoders, from_images.KEPT.vae,
    lambda state: published.wan22(from_images.louder(state)),
)  # fmt: skip


def _video(seed: int = 1, count: int = FRAMES) -> Any:
    """No frame is like another."""
    return np.random.default_rng(seed).integers(0, 256, (count, HEIGHT, WIDTH, 3), np.uint8)


def _expected(tiny: TinyModel, made: Made, output_type: str) -> Any:
    vae, latent = tiny.module(Role.VAE), tiny.engine._opened(tiny.model).latent
    vae.register_to_config(latents_mean=latent.means, latents_std=latent.deviations)
    pipeline = diffusers.LucyEditPipeline(
        None, None, vae, FlowMatchEulerDiscreteScheduler(shift=5.0), tiny.module(Role.DIFFUSION_MODEL),
        expand_timesteps=True,
    )  # fmt: skip
    (params,) = (each for each in made.works.values() if isinstance(each, SampleParams))
    return pipeline(
        [Image.fromarray(frame) for frame in _video()], **made.texts, height=HEIGHT, width=WIDTH, num_frames=FRAMES,
        num_inference_steps=STEPS, guidance_scale=CFG, output_type=output_type,
        latents=ImageNoise(SEED).draw((1, *sampled_shape(params, latent))),
    ).frames  # fmt: skip


LORAS = {"lucy_edit": ("blocks.0.self_attn.q", "diffusion_model.{}")}
CASES = {
    "lucy_edit": Compared(
        TINY, diffusers.LucyEditPipeline, lambda *_: torch.zeros(1), lambda *_: {}, LORAS["lucy_edit"]
    )
}  # fmt: skip


class TestLucyEdit:
    """The properties of every family, with the video that it requires."""

    case: ClassVar[Compared] = CASES["lucy_edit"]

    def test_latents_and_frames_are_those_of_the_pipeline(self, tmp_path: Path) -> None:
        tiny = TinyFamilyModel(tmp_path, TINY)
        assert tiny.family.name == "lucy_edit"
        made = tiny.made(video=_video(), **FIELDS)
        assert_equal(made.latents[0], _expected(tiny, made, "latent"))
        (shown,) = made.of(DecodeParams)
        assert isinstance(shown, VideoFrames)
        np.testing.assert_allclose(shown.frames_THWC / 255, _expected(tiny, made, "np")[0], atol=1 / 255)
        other = tiny.made(video=_video(2), **FIELDS)
        assert not np.allclose(other.latents[0], made.latents[0], atol=1e-2)
        tiny.close()

    def test_both_namings_are_one_model(self) -> None:
        self.case.check_namings()

    def test_files_and_folders_are_the_same_model(self, tmp_path: Path) -> None:
        self.case.check_files(tmp_path)

    def test_a_lora_gives_what_the_merged_file_gives(self, tmp_path: Path) -> None:
        check_lora_of_requests(tmp_path, TINY, LORAS["lucy_edit"], video=_video(), **FIELDS)


def test_a_video_is_required_and_no_image_is_read(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "video: missing"),
        ({"video": _video(), "image": Image.fromarray(_video()[0])}, "image: not supported"),
        ({"video": _video(), "video_mask": _video()[..., 0]}, "video_mask: not supported"),
    ]
    for fields, why in refused:
        with pytest.raises(UnusableField, match=why):
            tiny.made(**fields, **FIELDS)
    tiny.close()


def test_a_file_is_not_taken_for_the_model_without_a_video() -> None:
    """Its tensors are those of Wan 2.2 text-and-image-to-video, except for the channels of its patches."""
    for channels, name in ((96, "lucy_edit"), (48, "wan22_ti2v")):
        with torch.device("meta"):
            state: dict[str, Tensor] = _model(channels).state_dict()
        for file in (state, PUBLISH(state)):
            found = recognise_diffusion({key: tuple(value.shape) for key, value in file.items()})
            assert found is not None
            assert found.name == name


@pytest.mark.counted
def test_it_runs_within_what_was_counted(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured."""
    tiny = TinyFamilyModel(tmp_path, TINY, device="sim")
    made = tiny.made(video=_video(), **{**FIELDS, "steps": 1})
    for task, cost in zip(made.tasks, made.costs, strict=True):
        assert 0.5 * task.activation_bytes <= cost.working_bytes <= task.activation_bytes, made.works[task.task_id]
    tiny.close()
