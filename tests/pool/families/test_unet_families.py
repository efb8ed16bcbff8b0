"""SD1, SD2, SDXL, its refiner, what was cut out of it, what was trained with other noise and what was trained to fill
holes run whole: equal to the pipelines of diffusers on the same weights, texts, seed and noise.

The pipelines load the folder that `save_diffusers` writes, tokenizers included; opened here, it draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from torch import Tensor

from modelpool.pool.families.definitions.stable_diffusion_1 import SD1, SD1_INPAINT
from modelpool.pool.families.definitions.stable_diffusion_2 import SD2, SD2_INPAINT
from modelpool.pool.families.definitions.stable_diffusion_xl import (
    KOALA_1B,
    KOALA_700M,
    PLAYGROUND_25,
    SDXL,
    SDXL_INPAINT,
    SDXL_REFINER,
    SSD_1B,
    VEGA,
)
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.inference.guidance.sampling_run import _initial_scale
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import SigmaTable, make_sigmas, sigma_table
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.models.loading.small_tensors import SPREAD_KEY
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from tests.pool.families.clip_tokenizers import tokenizers_of
from tests.pool.families.test_from_images import filling, image, mask
from tests.pool.families.tiny_model import TinyModel
from tests.pool.models.loading import layouts, unet_layouts
from tests.pool.models.loading.layouts import Layout

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROMPT, NEGATIVE = "a photo of a red cube", "blurry"
WIDTH, HEIGHT, STEPS, CFG, SEED = 64, 48, 4, 5.0, 11


@dataclass(frozen=True)
class Case:
    """A family, the pipeline that it is run with, and a tiny file of it.

    tensors   in the file, beside random ones
    schedule  of the run; one that diffusers' scheduler of this noise has
    given     images and numbers of a request, under the names of the pipeline
    """

    family: LocatedFamily
    pipeline: Any
    layout: Callable[[], Layout]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    schedule: str = "normal"
    given: Mapping[str, Any] = field(default_factory=dict)


VELOCITY = {"v_pred": torch.empty(0)}
ZERO_TERMINAL = {**VELOCITY, "ztsnr": torch.empty(0)}
WIDE_SPREAD = {f"model.diffusion_model.{SPREAD_KEY}": torch.tensor([0.095, -0.095]).repeat(16)}
#: numbers that are not those which a file without them would have
LATENT_MEASURES = {
    "edm_mean": torch.tensor([-1.5, 1.8, -1.25, 2.5]).reshape(1, 4, 1, 1),
    "edm_std": torch.tensor([8.5, 5.75, 6.5, 5.25]).reshape(1, 4, 1, 1),
}
ENDS_OF_NOISE = {"edm_vpred.sigma_min": torch.tensor(0.01), "edm_vpred.sigma_max": torch.tensor(60.0)}
PART, INPAINT = {"image": image(), "strength": 0.5}, {"image": image(), "mask_image": mask(), "strength": 1.0}
PART_OF_HOLE = {**INPAINT, "strength": 0.6}


def filling_sd2() -> Layout:
    """A file of SD2's model of 9 channels."""
    unet = replace(
        layouts.TINY_SDXL_UNET, depths=(1, 1), middle_depth=1, context_width=32, label_width=None, in_channels=9
    )
    return {**layouts.tiny_sd2(), **layouts.ldm_unet(unet)}


CASES = {
    "sd1": Case(SD1, StableDiffusionPipeline, layouts.tiny_sd1),
    "sd1 of velocity": Case(SD1, StableDiffusionPipeline, layouts.tiny_sd1, VELOCITY),
    "sd1 to noise alone": Case(SD1, StableDiffusionPipeline, layouts.tiny_sd1, ZERO_TERMINAL),
    "sd1 in part": Case(SD1, StableDiffusionImg2ImgPipeline, layouts.tiny_sd1, given=PART),
    "sd2": Case(SD2, StableDiffusionPipeline, layouts.tiny_sd2),
    "sd2 of velocity": Case(SD2, StableDiffusionPipeline, unet_layouts.small_sd2, WIDE_SPREAD),
    "sd2 to noise alone": Case(SD2, StableDiffusionPipeline, layouts.tiny_sd2, ZERO_TERMINAL),
    "sdxl": Case(SDXL, StableDiffusionXLPipeline, layouts.tiny_sdxl),
    "sdxl of velocity": Case(SDXL, StableDiffusionXLPipeline, layouts.tiny_sdxl, VELOCITY),
    "sdxl to noise alone": Case(SDXL, StableDiffusionXLPipeline, layouts.tiny_sdxl, ZERO_TERMINAL),
    "sdxl with ends of noise": Case(SDXL, StableDiffusionXLPipeline, layouts.tiny_sdxl, ENDS_OF_NOISE, "exponential"),
    "playground_25": Case(PLAYGROUND_25, StableDiffusionXLPipeline, layouts.tiny_sdxl, LATENT_MEASURES, "karras"),
    "ssd_1b": Case(SSD_1B, StableDiffusionXLPipeline, unet_layouts.tiny_ssd_1b),
    "vega": Case(VEGA, StableDiffusionXLPipeline, unet_layouts.tiny_vega),
    "koala_700m": Case(KOALA_700M, StableDiffusionXLPipeline, unet_layouts.tiny_koala_700m),
    "koala_1b": Case(KOALA_1B, StableDiffusionXLPipeline, unet_layouts.tiny_koala_1b),
    "sdxl_refiner": Case(SDXL_REFINER, StableDiffusionXLImg2ImgPipeline, layouts.tiny_sdxl_refiner, given=PART),
    "sd1_inpaint": Case(SD1_INPAINT, StableDiffusionInpaintPipeline, lambda: filling("sd1"), given=INPAINT),
    "sd1_inpaint in part": Case(
        SD1_INPAINT, StableDiffusionInpaintPipeline, lambda: filling("sd1"), given=PART_OF_HOLE
    ),
    "sd2_inpaint": Case(SD2_INPAINT, StableDiffusionInpaintPipeline, filling_sd2, given=INPAINT),
    "sdxl_inpaint": Case(SDXL_INPAINT, StableDiffusionXLInpaintPipeline, lambda: filling("sdxl"), given=INPAINT),
    "sdxl_inpaint in part": Case(
        SDXL_INPAINT, StableDiffusionXLInpaintPipeline, lambda: filling("sdxl"), given=PART_OF_HOLE
    ),
}  # fmt: skip


class OurLevels(EulerDiscreteScheduler):  # type: ignore[misc] # diffusers is not typed
    """diffusers' Euler, whose own levels differ in the last bits and where nothing is left but noise, at ours."""

    table: SigmaTable

    @property
    def init_noise_sigma(self) -> float:
        return _initial_scale(float(self.sigmas[0]), self.table)

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        ours = make_sigmas("normal", self.num_inference_steps, self.table)
        np.testing.assert_allclose(self.sigmas[1:], ours[1:], rtol=1e-4)
        self.sigmas = ours


def pipeline_of(tiny: TinyModel, folder: Path, case: Case) -> Any:
    """The pipeline of the folder that the model is saved to."""
    save_diffusers(open_checkpoint(tiny.model.source), folder)
    pipeline = case.pipeline.from_pretrained(folder, local_files_only=True, **tokenizers_of(folder))
    pipeline.set_progress_bar_config(disable=True)
    if not isinstance(pipeline.scheduler, EDMEulerScheduler):
        pipeline.scheduler = OurLevels.from_config(pipeline.scheduler.config, timestep_spacing="linspace")
        pipeline.scheduler.table = sigma_table(tiny.family.sampling.noise)
    return pipeline


def drawn_by(pipeline: Any, case: Case) -> tuple[dict[str, Tensor], Tensor, np.ndarray[Any, Any]]:
    """The texts, the latent and the pixels that it comes to."""
    read = pipeline.encode_prompt(
        PROMPT, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True, negative_prompt=NEGATIVE
    )
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    latents: list[Tensor] = []

    def keep(_: Any, __: int, ___: Any, now: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(now["latents"].clone())
        return now

    call: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "generator": torch.Generator().manual_seed(SEED)}
    if "Img2Img" in case.pipeline.__name__:
        del call["height"], call["width"]
    if not case.given:
        call["latents"] = ImageNoise(SEED).draw((1, 4, HEIGHT // 8, WIDTH // 8))
    pixels = pipeline(
        PROMPT, negative_prompt=NEGATIVE, num_inference_steps=STEPS, guidance_scale=CFG, output_type="np",
        callback_on_step_end=keep, **call, **case.given,
    ).images[0]  # fmt: skip
    return dict(zip(names, read, strict=False)), latents[-1], pixels


@pytest.fixture
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    for module in ("stable_diffusion.pipeline_stable_diffusion", "stable_diffusion_xl.pipeline_stable_diffusion_xl"):
        for kind in ("img2img", "inpaint"):
            place = f"diffusers.pipelines.{module}_{kind}.retrieve_latents"
            monkeypatch.setattr(place, lambda encoded, generator=None: encoded.latent_dist.mode())


def fields_of(case: Case) -> dict[str, Any]:
    """The same as fields of a request."""
    fields = {"mask" if key == "mask_image" else key: value for key, value in case.given.items()}
    if not case.given:
        fields |= {"width": WIDTH, "height": HEIGHT}
    run = {"steps": STEPS, "cfg": CFG, "sampler": "euler", "schedule": case.schedule, "paste": False}
    return {**fields, **run, "prompt": PROMPT, "negative": NEGATIVE, "seed": SEED}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("mean_latents")
def test_a_image_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    """Text, latent and pixels."""
    case = CASES[name]
    (tmp_path / "file").mkdir()
    tiny = TinyModel(tmp_path / "file", case.layout(), tensors=case.tensors)
    assert tiny.family.name == case.family.name
    made = tiny.made(**fields_of(case))
    pipeline = pipeline_of(tiny, tmp_path / "folder", case)
    with torch.no_grad():
        texts, latent, pixels = drawn_by(pipeline, case)
    for told, states in made.texts.items():
        np.testing.assert_allclose(states, texts.pop(told), atol=1e-5)
    assert all(states is None for states in texts.values())
    # random weights make latents many times as wide as trained ones; a step down from noise alone, 4519 times as wide
    # as the latent, rounds to the last bit of that
    last_bit = sigma_table(tiny.family.sampling.noise).sigma_max * float(np.finfo(np.float32).eps)
    near = max(1e-4 * max(1.0, float(latent.std())), last_bit)
    np.testing.assert_allclose(made.latents[0], latent, atol=near)
    assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255
    tiny.close()


@pytest.mark.parametrize("name", ["sd1_inpaint", "sd2_inpaint", "sdxl_inpaint", "sdxl_refiner"])
def test_the_folder_that_it_is_saved_to_draws_the_same(name: str, tmp_path: Path) -> None:
    """A folder says in its scheduler what was trained, and not what the model is shown: that it keeps."""
    case = CASES[name]
    for place in ("file", "again"):
        (tmp_path / place).mkdir()
    tiny = TinyModel(tmp_path / "file", case.layout(), tensors=case.tensors)
    save_diffusers(open_checkpoint(tiny.model.source), tmp_path / "again" / "tiny")
    folder = TinyModel.of_folder(tmp_path / "again")
    assert folder.family.name == name
    assert folder.family.sampling == tiny.family.sampling
    made, again = tiny.made(**fields_of(case)), folder.made(**fields_of(case))
    np.testing.assert_allclose(again.latents[0], made.latents[0], atol=1e-4 * max(1.0, float(made.latents[0].std())))
    tiny.close()
    folder.close()


@pytest.mark.parametrize(("name", "pixels"), [("sd2", 512), ("sd2 of velocity", 768), ("sd2 to noise alone", 768)])
def test_sd2_of_velocity_was_trained_for_larger_images(name: str, pixels: int, tmp_path: Path) -> None:
    """Whether a key says so or nothing but the spread of a norm's biases."""
    tiny = TinyModel(tmp_path, CASES[name].layout(), tensors=CASES[name].tensors)
    info = describe(tiny.model.source)
    assert (info.width, info.height) == (pixels, pixels)
    tiny.close()
