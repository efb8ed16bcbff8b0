"""Images with ControlNets are those of diffusers' pipelines on the same weights and noise: for SD1 and SDXL, one and
two at once, in a share of the steps, in an image made anew in part; and on a device that is too small for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    MultiControlNetModel,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)
from PIL import Image

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from tests.pool.families.tiny_model import Made, TinyModel, euler
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, STEPS, CFG, SEED = 64, 48, 4, 5.0, 11
FIELDS: dict[str, Any] = {"steps": STEPS, "cfg": CFG, "sampler": "euler", "schedule": "normal", "negative": "blurry"}
UNETS = {"sd1": layouts.TINY_UNET, "sdxl": layouts.TINY_SDXL_UNET}
PLAIN = {"sd1": layouts.tiny_sd1, "sdxl": layouts.tiny_sdxl}
CONTROLS = ("canny", "depth")


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))


IMAGES = {"canny": image(1), "depth": image(2)}


def controlled(folder: Path, name: str) -> TinyModel:
    """A model, with two ControlNets in a folder beside it."""
    (folder / "controlnet").mkdir()
    for place, control in enumerate(CONTROLS):
        write_tiny_checkpoint(
            folder / "controlnet" / f"{control}.safetensors",
            seed=place,
            dtype=torch.float32,
            layout=ldm_controlnet(UNETS[name]),
        )
    return TinyModel(folder, PLAIN[name]())


def diffusers_latent(tiny: TinyModel, made: Made, kind: type, names: tuple[str, ...], **arguments: Any) -> torch.Tensor:
    """What a pipeline of diffusers comes to, with these ControlNets."""
    vae, unet = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor)
    unet.register_to_config(sample_size=64)
    modules = [OpenControlNet(tiny.catalog.controls.find(name, 1.0, 0.0, 1.0), "cpu").module for name in names]
    parts: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": euler(), "text_encoder": None, "tokenizer": None}
    parts["controlnet"] = modules[0] if len(modules) == 1 else MultiControlNetModel(modules)
    if "XL" in kind.__name__:
        parts |= {"text_encoder_2": None, "tokenizer_2": None, "add_watermarker": False}
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipeline = kind(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        **made.texts,
        **arguments,
        num_inference_steps=STEPS,
        guidance_scale=CFG,
        generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
    ).images


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Random weights make latents wider than trained ones."""
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))


SIZE = {"width": WIDTH, "height": HEIGHT}


@pytest.mark.parametrize("name", PLAIN)
def test_a_controlnet_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    tiny = controlled(tmp_path, name)
    kind = {"sd1": StableDiffusionControlNetPipeline, "sdxl": StableDiffusionXLControlNetPipeline}[name]
    for share in ((0.0, 1.0), (0.25, 0.75)):
        control = {"model": "canny", "image": IMAGES["canny"], "strength": 0.8, "start": share[0], "end": share[1]}
        made = tiny.made(controls=[control], **SIZE, **FIELDS)
        expected = diffusers_latent(
            tiny, made, kind, ("canny",), image=IMAGES["canny"], controlnet_conditioning_scale=0.8,
            control_guidance_start=share[0], control_guidance_end=share[1], **SIZE,
        )  # fmt: skip
        assert_equal(made.latents[0], expected)
        assert not torch.allclose(made.latents[0], tiny.made(**SIZE, **FIELDS).latents[0], atol=0.1)
    tiny.close()


def test_two_at_once_are_those_of_diffusers(tmp_path: Path) -> None:
    tiny = controlled(tmp_path, "sd1")
    strengths = {"canny": 0.5, "depth": 1.2}
    controls = [{"model": name, "image": IMAGES[name], "strength": strengths[name]} for name in CONTROLS]
    made = tiny.made(controls=controls, **SIZE, **FIELDS)
    expected = diffusers_latent(
        tiny, made, StableDiffusionControlNetPipeline, CONTROLS, image=[IMAGES[name] for name in CONTROLS],
        controlnet_conditioning_scale=list(strengths.values()), **SIZE,
    )  # fmt: skip
    assert_equal(made.latents[0], expected)
    tiny.close()


def test_one_that_speaks_of_two_images_is_loaded_once(tmp_path: Path) -> None:
    tiny = controlled(tmp_path, "sd1")
    controls = [{"model": "canny", "image": IMAGES[name], "strength": 0.5} for name in CONTROLS]
    made = tiny.made(controls=controls, **SIZE, **FIELDS)
    (sample,) = [task for task in made.tasks if len(task.uses) > 1]
    assert len(sample.uses) == 2
    module = OpenControlNet(tiny.catalog.controls.find("canny", 1.0, 0.0, 1.0), "cpu").module
    assert sample.uses[1].component in {c.key for c in made.components if c.role is Role.CONTROLNET}
    assert module is not None
    expected = diffusers_latent(
        tiny, made, StableDiffusionControlNetPipeline, ("canny", "canny"),
        image=[IMAGES[name] for name in CONTROLS], controlnet_conditioning_scale=[0.5, 0.5], **SIZE,
    )  # fmt: skip
    assert_equal(made.latents[0], expected)
    tiny.close()


def test_in_an_image_made_anew_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    place = "diffusers.pipelines.controlnet.pipeline_controlnet_img2img.retrieve_latents"
    monkeypatch.setattr(place, lambda encoded, generator=None: encoded.latent_dist.mode())
    tiny = controlled(tmp_path, "sd1")
    start = image(5)
    control = {"model": "canny", "image": IMAGES["canny"], "strength": 0.8}
    made = tiny.made(image=start, strength=0.5, controls=[control], **FIELDS)
    expected = diffusers_latent(
        tiny, made, StableDiffusionControlNetImg2ImgPipeline, ("canny",), image=start, strength=0.5,
        control_image=IMAGES["canny"], controlnet_conditioning_scale=0.8,
    )  # fmt: skip
    assert_equal(made.latents[0], expected)
    tiny.close()


def test_what_streams_gives_the_same_image(tmp_path: Path) -> None:
    """In the least memory that the cutter says is enough: not all of the UNet and the ControlNets fits at once."""
    tiny = controlled(tmp_path, "sd1")
    controls = [{"model": name, "image": IMAGES[name]} for name in CONTROLS]
    whole = tiny.made(controls=controls, **SIZE, **FIELDS)
    tiny.close()
    least_bytes = max(needed_bytes(task.uses, task.activation_bytes) for task in whole.tasks)
    sizes = {component.key: component.weight_bytes for component in whole.components}
    most_bytes = max(sum(sizes[use.component] for use in task.uses) for task in whole.tasks)
    budget_bytes = least_bytes + (1 << 20)
    assert budget_bytes < most_bytes + least_bytes
    sim.install()
    sim.configure(0, budget_bytes)
    sim.recover(0)
    sim.reset_peak(0)
    tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=budget_bytes))
    streamed = tiny.made(controls=controls, **SIZE, **FIELDS)
    assert any(cost.streamed_bytes for cost in streamed.costs)
    assert max(cost.peak_bytes for cost in streamed.costs) <= budget_bytes
    np.testing.assert_array_equal(streamed.pixels, whole.pixels)
    tiny.close()


def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    tiny = controlled(tmp_path, "sd1")
    write_tiny_checkpoint(tmp_path / "controlnet" / "xl.safetensors", layout=ldm_controlnet(layouts.TINY_SDXL_UNET))
    with pytest.raises(
        UnusableField, match=r"controls: found .*ControlNet 'xl' .*expected .*a ControlNet for models like 'tiny'"
    ):
        tiny.made(controls=[{"model": "xl", "image": IMAGES["canny"]}], **SIZE, **FIELDS)
    with pytest.raises(UnknownName, match=r"unknown ControlNet 'cany'; did you mean 'canny'"):
        tiny.made(controls=[{"model": "cany", "image": IMAGES["canny"]}], **SIZE, **FIELDS)
    tiny.close()


@pytest.mark.parametrize(
    ("key", "channels", "named"),
    [("input_blocks.0.0.weight", 9, "latent channels 9"), ("input_hint_block.0.weight", 4, "image channels 4")],
)
def test_one_that_reads_other_channels_is_refused_by_name(key: str, channels: int, named: str, tmp_path: Path) -> None:
    """Such as one that is shown an image with a hole: it would fail in its first layer, in the middle of a job."""
    tiny = controlled(tmp_path, "sd1")
    layout = ldm_controlnet(layouts.TINY_UNET)
    shape = layout[f"control_model.{key}"]
    layout[f"control_model.{key}"] = (shape[0], channels, *shape[2:])
    write_tiny_checkpoint(tmp_path / "controlnet" / "odd.safetensors", layout=layout)
    with pytest.raises(UnusableField, match=rf"controls: found .*ControlNet 'odd' .*{named}.* expected .*channels"):
        tiny.made(controls=[{"model": "odd", "image": IMAGES["canny"]}], **SIZE, **FIELDS)
    tiny.close()
