"""Models that are shown an image make of it what diffusers' pipelines make of it, on the same weights and noise: they
change it as a text says, make it larger, fill a hole, follow its edges, or work from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor

from modelpool.pool.inference.pixels.image_ops import covering
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.values.core.stage_params import EncodeImageParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_from_images import image, mask
from tests.pool.families.tiny_model import Made, TinyModel, euler
from tests.pool.families.tiny_shown import SHOWN_FAMILIES, SHOWN_LAYOUTS, TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES, TinyFamily

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

#: what each family is compared with
PIPELINES: Mapping[str, type] = {
    "sd1_ip2p": diffusers.StableDiffusionInstructPix2PixPipeline,
    "sdxl_ip2p": diffusers.StableDiffusionXLInstructPix2PixPipeline,
    "sd_x4": diffusers.StableDiffusionUpscalePipeline,
    "sd2_depth": diffusers.StableDiffusionDepth2ImgPipeline,
    "flux_fill": diffusers.FluxFillPipeline,
    "flux_control": diffusers.FluxControlPipeline,
    "flux_dev": diffusers.FluxKontextPipeline,
    "flux2_klein": diffusers.Flux2KleinPipeline,
}
WIDTH, HEIGHT, STEPS, SEED = 64, 48, 4, 11
UNET_FIELDS: dict[str, Any] = {"steps": STEPS, "cfg": 5.0, "sampler": "euler", "schedule": "normal"}


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Random weights make latents wider than trained ones."""
    assert float(expected.std()) > 0
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))


def unet_pipeline(tiny: TinyModel, kind: type, scheduler: Any, **parts: Any) -> Any:
    vae, unet = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor)
    given: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": scheduler, "text_encoder": None, "tokenizer": None}
    pipeline = kind(**given, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("fields", [{}, {"image_cfg": 1.2}, {"image_cfg": 1.0}], ids=["usual", "weaker", "by itself"])
@pytest.mark.parametrize("name", ["sd1_ip2p", "sdxl_ip2p"])
def test_a_image_is_changed_as_a_text_says_as_diffusers_does(
    name: str, fields: dict[str, float], tmp_path: Path
) -> None:
    tiny = TinyModel(tmp_path, SHOWN_LAYOUTS[name]())
    assert tiny.family.name == name
    made = tiny.made(image=image(), negative="blurry", **UNET_FIELDS, **fields)
    if name == "sd1_ip2p":
        parts: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        sizes = {}
    else:
        parts = {"text_encoder_2": None, "tokenizer_2": None}
        sizes = {"height": HEIGHT, "width": WIDTH}
    pipeline = unet_pipeline(tiny, PIPELINES[name], euler(), **parts)
    expected = pipeline(
        **made.texts, **sizes, image=image(), num_inference_steps=STEPS, guidance_scale=5.0,
        image_guidance_scale=fields.get("image_cfg", 1.5), generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
    ).images  # fmt: skip
    assert_equal(made.latents[0], expected)
    assert made.pixels.shape == (HEIGHT, WIDTH, 3)
    tiny.close()


def test_a_depth_map_is_followed_as_diffusers_does(tmp_path: Path) -> None:
    """Its pipeline begins with an image, of which nothing is left at full strength: here with noise alone. A map that
    is larger than the output, and in color."""
    tiny = TinyModel(tmp_path, SHOWN_LAYOUTS["sd2_depth"]())
    assert tiny.family.name == "sd2_depth"
    tiny.module(Role.DIFFUSION_MODEL).register_to_config(sample_size=64)  # the pipeline compares it
    pipeline = unet_pipeline(tiny, PIPELINES["sd2_depth"], euler(), depth_estimator=None, feature_extractor=None)
    pipeline.prepare_latents = lambda *_: (
        ImageNoise(SEED).draw((1, 4, HEIGHT // 8, WIDTH // 8)) * (pipeline.scheduler.init_noise_sigma)
    )
    for given in (image(), image(2 * WIDTH, 2 * HEIGHT), image().convert("L")):
        made = tiny.made(image=given, width=WIDTH, height=HEIGHT, negative="blurry", **UNET_FIELDS)
        grey = Image.fromarray(covering(np.asarray(given.convert("RGB")), WIDTH, HEIGHT)).convert("L")
        expected = pipeline(
            **made.texts, image=image(), depth_map=torch.from_numpy(np.asarray(grey).astype(np.float32))[None],
            strength=1.0, num_inference_steps=STEPS, guidance_scale=5.0, output_type="latent",
        ).images  # fmt: skip
        assert_equal(made.latents[0], expected)
        assert made.pixels.shape == (HEIGHT, WIDTH, 3)
    flat = tiny.made(image=Image.new("L", (WIDTH, HEIGHT), 9), negative="blurry", **UNET_FIELDS)
    assert bool(flat.latents[0].isfinite().all())
    assert not torch.allclose(flat.latents[0], made.latents[0], atol=1e-2)
    tiny.close()


class _OurUpscalerLevels(EulerDiscreteScheduler):  # type: ignore[misc] # diffusers is not typed
    """diffusers' Euler at our levels, which differ in the last bits."""

    @property
    def init_noise_sigma(self) -> float:
        return float((float(self.sigmas.max()) ** 2 + 1) ** 0.5)

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        self.sigmas = self.levels


@pytest.mark.parametrize("level", [None, 150])
def test_a_image_is_made_four_times_as_large_as_diffusers_does(level: int | None, tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, SHOWN_LAYOUTS["sd_x4"]())
    assert tiny.family.name == "sd_x4"
    small = image(24, 16)
    made = tiny.made(image=small, negative="blurry", noise_level=level, **UNET_FIELDS)
    betas = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "scaled_linear"}
    scheduler = _OurUpscalerLevels(**betas, steps_offset=1, prediction_type="v_prediction")
    scheduler.levels = make_sigmas("normal", STEPS, sigma_table(tiny.family.sampling.noise))
    pipeline = unet_pipeline(
        tiny, PIPELINES["sd_x4"], scheduler, low_res_scheduler=diffusers.DDPMScheduler(**betas),
        safety_checker=None, feature_extractor=None, watermarker=None,
    )  # fmt: skip
    expected = pipeline(
        **made.texts, image=small, num_inference_steps=STEPS, guidance_scale=5.0, output_type="latent",
        noise_level=20 if level is None else level, latents=ImageNoise(SEED).draw((1, 4, 16, 24)),
        generator=torch.Generator().manual_seed(2**64 - 1 - SEED),
    ).images  # fmt: skip
    assert_equal(made.latents[0], expected)
    assert made.pixels.shape == (64, 96, 3)
    tiny.close()


def _flux_pipeline(tiny: TinyModel, kind: type) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
    vae = tiny.module(Role.VAE)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor, shift_factor=tiny.family.latent_shift)
    pipeline = kind(scheduler, vae, None, None, None, None, tiny.module(Role.DIFFUSION_MODEL))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _flux_call(tiny: TinyModel, made: Made, pipeline: Any) -> dict[str, Any]:
    noise = _noise(tiny)
    return {
        **made.texts, "height": HEIGHT, "width": WIDTH, "num_inference_steps": STEPS, "output_type": "latent",
        "latents": pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]), "guidance_scale": 3.0,
    }  # fmt: skip


def _noise(tiny: TinyModel) -> Tensor:
    return ImageNoise(SEED).draw((1, *latent_shape(WIDTH, HEIGHT, 0, tiny.engine._opened(tiny.model).latent)))


def _unpacked(pipeline: Any, packed: Tensor) -> Tensor:
    found: Tensor = pipeline._unpack_latents(packed, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return found


@pytest.fixture
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    for name in ("fill", "kontext"):
        place = f"diffusers.pipelines.flux.pipeline_flux_{name}.retrieve_latents"
        monkeypatch.setattr(place, lambda encoded, **_: encoded.latent_dist.mode())
    place = "diffusers.models.autoencoders.vae.DiagonalGaussianDistribution.sample"
    monkeypatch.setattr(place, lambda latents, generator=None: latents.mode())


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.usefixtures("mean_latents")
def test_flux_fill_fills_a_hole_as_diffusers_does(strength: float, tmp_path: Path) -> None:
    """By a mask that ends within cells; what is not in it is left, to the bit."""
    tiny = TinyFamilyModel(tmp_path, SHOWN_FAMILIES["flux_fill"])
    assert tiny.family.name == "flux_fill"
    hole = np.asarray(mask()).copy()
    hole[13:21, 5:50] = 255
    made = tiny.made(image=image(), mask=hole, strength=strength, steps=STEPS, cfg=3.0)
    pipeline = _flux_pipeline(tiny, PIPELINES["flux_fill"])
    call = _flux_call(tiny, made, pipeline)
    if strength < 1:
        call |= {"latents": None, "generator": torch.Generator().manual_seed(SEED)}
    expected = pipeline(**call, image=image(), mask_image=Image.fromarray(hole), strength=strength).images
    assert_equal(made.latents[0], _unpacked(pipeline, expected))
    assert (made.pixels[hole == 0] == np.asarray(image())[hole == 0]).all()
    tiny.close()


@pytest.mark.parametrize(
    "family", [SHOWN_FAMILIES["flux_fill"], FAMILIES["flux_dev"]], ids=lambda family: str(family.name)
)
def test_a_image_beyond_whole_steps_is_as_one_that_covers_them(family: TinyFamily, tmp_path: Path) -> None:
    """With its mask, whether the model is told of that or not: eight pixels of each side are in no step."""
    tiny = TinyFamilyModel(tmp_path, family)
    large = image(WIDTH + 8, HEIGHT + 8)
    hole = np.zeros((HEIGHT + 8, WIDTH + 8), np.uint8)
    hole[13:21, 5:50] = 255
    fields: dict[str, Any] = {"strength": 0.5, "steps": 2, "cfg": 3.0}
    made = tiny.made(image=large, mask=hole, **fields)
    covers = [covering(pixels, WIDTH, HEIGHT) for pixels in (np.asarray(large), hole)]
    expected = tiny.made(image=covers[0], mask=covers[1], **fields)
    assert made.pixels.shape == (HEIGHT, WIDTH, 3)
    np.testing.assert_array_equal(made.latents[0], expected.latents[0])
    np.testing.assert_array_equal(made.pixels, expected.pixels)
    tiny.close()


@pytest.mark.usefixtures("mean_latents")
def test_flux_control_follows_a_image_as_diffusers_does(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, SHOWN_FAMILIES["flux_control"])
    assert tiny.family.name == "flux_control"
    made = tiny.made(image=image(), steps=STEPS, cfg=3.0)
    pipeline = _flux_pipeline(tiny, PIPELINES["flux_control"])
    expected = pipeline(**_flux_call(tiny, made, pipeline), control_image=image()).images
    assert_equal(made.latents[0], _unpacked(pipeline, expected))
    tiny.close()


def _kontext(tiny: TinyModel, made: Made, reference: Image.Image) -> Tensor:
    pipeline = _flux_pipeline(tiny, PIPELINES["flux_dev"])
    expected = pipeline(
        **_flux_call(tiny, made, pipeline), image=reference, max_area=WIDTH * HEIGHT, _auto_resize=False
    ).images
    return _unpacked(pipeline, expected)


def _klein(tiny: TinyModel, made: Made, reference: Image.Image | list[Image.Image]) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    vae, model = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    pipeline: Any = PIPELINES["flux2_klein"](scheduler, vae, None, None, model, True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.image_processor.check_image_input = lambda image: image  # that it is not smaller than 64x64
    found = pipeline(
        **made.texts, image=reference, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS, output_type="latent",
        latents=_noise(tiny), guidance_scale=1.0,
    ).images  # fmt: skip
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    patches: Tensor = (pipeline._patchify_latents(found) - vae.bn.running_mean.view(1, -1, 1, 1)) / deviation
    return patches


@pytest.mark.parametrize(("name", "pipeline"), [("flux_dev", _kontext), ("flux2_klein", _klein)])
@pytest.mark.usefixtures("mean_latents")
def test_a_image_to_work_from_is_told_as_diffusers_does(
    name: str, pipeline: Callable[[TinyModel, Made, Image.Image], Tensor], tmp_path: Path
) -> None:
    """At its own proportions, whatever those of the image that is made: here it is high, and that is wide."""
    tiny = TinyFamilyModel(tmp_path, FAMILIES[name])
    reference = image(32, 96)
    made = tiny.made(reference=reference, width=WIDTH, height=HEIGHT, steps=STEPS, cfg=3.0)
    (work,) = [work for work in made.works.values() if isinstance(work, EncodeImageParams)]
    assert (work.width, work.height) == (32, 96)
    assert_equal(made.latents[0], pipeline(tiny, made, reference))
    tiny.close()


@pytest.mark.usefixtures("mean_latents")
def test_several_images_to_work_from_are_told_in_their_order_as_diffusers_does(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux2_klein"])
    references = [image(32, 96), image(96, 32)]
    made, turned = (
        tiny.made(reference=given, width=WIDTH, height=HEIGHT, steps=STEPS, cfg=3.0)
        for given in (references, references[::-1])
    )
    assert_equal(made.latents[0], _klein(tiny, made, references))
    assert not torch.allclose(made.latents[0], turned.latents[0], atol=1e-3)
    tiny.close()
