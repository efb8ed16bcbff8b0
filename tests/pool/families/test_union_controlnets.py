"""Images of SDXL with a ControlNet of several modes are those of diffusers on the same weights and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.controlnets.config import controlnet_config
from modelpool.pool.inference.controlnets.open_controlnet import plan_controlnet
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_controlnets import CFG, FIELDS, IMAGES, SEED, SIZE, STEPS, assert_equal
from tests.pool.families.test_needs_from_images import check as check_working
from tests.pool.families.tiny_model import Made, TinyModel, euler
from tests.pool.families.tiny_transformers import seeded
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
MODES = 6
PIPELINES = {"sdxl": diffusers.StableDiffusionXLControlNetUnionPipeline}


def tiny_union() -> Any:
    """Of the sizes of the tiny SDXL, trained for six kinds of images."""
    plain = plan_controlnet(ldm_controlnet(layouts.TINY_SDXL_UNET, ""))
    sizes = controlnet_config(plan_controlnet(dict(plain.key_map.shapes)).key_map.shapes)
    del sizes["mid_block_type"]
    channels = sizes["block_out_channels"][0]
    return diffusers.ControlNetUnionModel(
        **sizes, num_control_type=MODES, num_trans_channel=channels, num_trans_head=1, num_proj_channel=channels
    )


def with_union(folder: Path) -> tuple[TinyModel, Any]:
    (folder / "controlnet").mkdir()
    module = seeded(tiny_union, 4)
    save_file(module.state_dict(), folder / "controlnet" / "union.safetensors")
    return TinyModel(folder, layouts.tiny_sdxl()), module


def expected_of(tiny: TinyModel, made: Made, module: Any, image: Image.Image, mode: int, strength: float) -> Any:
    vae, unet = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor)
    unet.register_to_config(sample_size=64)
    pipeline = PIPELINES["sdxl"](
        vae=vae, text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        controlnet=module, scheduler=euler(), add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        **made.texts, **SIZE, control_image=[image], control_mode=[mode], controlnet_conditioning_scale=strength,
        num_inference_steps=STEPS, guidance_scale=CFG, generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
    ).images  # fmt: skip


def test_each_mode_is_that_of_diffusers(tmp_path: Path) -> None:
    tiny, module = with_union(tmp_path)
    found = []
    for said, number, strength in (("canny", 3, 0.8), (0, 0, 0.4)):
        control = {"model": "union", "image": IMAGES["canny"], "mode": said, "strength": strength}
        made = tiny.made(controls=[control], **SIZE, **FIELDS)
        found.append(made.latents[0])
        assert_equal(found[-1], expected_of(tiny, made, module, IMAGES["canny"], number, strength))
    assert not torch.allclose(found[0], found[1], atol=0.01)
    tiny.close()


def test_it_is_built_of_its_shapes_and_saved_as_it_was(tmp_path: Path) -> None:
    tiny, module = with_union(tmp_path)
    tensors = load_file(tmp_path / "controlnet" / "union.safetensors")
    plan = plan_controlnet({key: tuple(value.shape) for key, value in tensors.items()})
    assert plan.kind.title == "Stable Diffusion XL, with several modes"
    given = {name: module.config[name] for name in plan.config}
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in plan.config.items()} == {
        name: list(v) if isinstance(v, tuple) else v for name, v in given.items()
    }
    saved = plan.save(plan.build(tensors), tensors)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[key], tensors[key]) for key in tensors)
    tiny.close()


def test_a_mode_that_it_has_not_is_refused_by_name(tmp_path: Path) -> None:
    tiny, _ = with_union(tmp_path)
    expected = r"a mode of ControlNet 'union': pose, depth, scribble, canny, normal, segment, or a number"
    for said in ("tile", 6, None):
        with pytest.raises(
            UnusableField, match=rf"controls.mode: (found .*expected|missing; set it to) {expected} from 0 to 5"
        ):
            tiny.made(controls=[{"model": "union", "image": IMAGES["canny"], "mode": said}], **SIZE, **FIELDS)
    tiny.close()


@pytest.mark.counted
def test_it_streams_and_holds_what_was_estimated(tmp_path: Path) -> None:
    """In half precision, as it is published; its attention among images reads weights of layers that nobody calls."""
    tiny, _ = with_union(tmp_path)
    path = tmp_path / "controlnet" / "union.safetensors"
    tiny.close()
    save_file({key: tensor.half() for key, tensor in load_file(path).items()}, path)
    tiny = TinyModel(tmp_path, layouts.tiny_sdxl())
    controls = [{"model": "union", "image": IMAGES["canny"], "mode": "depth"}]
    whole = tiny.made(controls=controls, **SIZE, **FIELDS)
    tiny.close()
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=1 << 28))
    made = tiny.made(controls=controls, **SIZE, **FIELDS)
    check_working(made)
    np.testing.assert_array_equal(made.pixels, whole.pixels)
    tiny.close()
    streaming = EngineSettings("sim", budget_bytes=1 << 28, vram_policy=VramPolicy.NONE)
    tiny.engine = Engine.open(streaming)
    streamed = tiny.made(controls=controls, **SIZE, **FIELDS)
    assert any(cost.streamed_bytes for cost in streamed.costs)
    np.testing.assert_array_equal(streamed.pixels, whole.pixels)
    tiny.close()
