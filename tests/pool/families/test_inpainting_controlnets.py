"""Images with ControlNets of UNets that are told a hole are those of diffusers' pipelines on the same weights and
noise; and how a request says which ControlNets are such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionControlNetInpaintPipeline, StableDiffusionXLControlNetUnionInpaintPipeline
from PIL import Image
from safetensors.torch import save_file

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.controlnets.config import controlnet_config
from modelpool.pool.inference.controlnets.open_controlnet import plan_controlnet
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import BatchMember, ControlMaskMode, Latent
from modelpool.pool.values.specs.spec import Role, Stage
from tests.pool.families.test_controlnets import CFG, FIELDS, HEIGHT, SEED, SIZE, STEPS, WIDTH, assert_equal
from tests.pool.families.test_controlnets import diffusers_latent as controlled_latent
from tests.pool.families.test_from_images import image, mask
from tests.pool.families.test_needs_from_images import check
from tests.pool.families.tiny_model import QUIET, TinyModel, euler
from tests.pool.families.tiny_transformers import seeded
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.input_names import results_read
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STRENGTH = 0.75
INPAINT = "control_v11p_sd15_inpaint"


@pytest.fixture(autouse=True)
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    for pipeline in ("inpaint", "union_inpaint_sd_xl"):
        place = f"diffusers.pipelines.controlnet.pipeline_controlnet_{pipeline}.retrieve_latents"
        monkeypatch.setattr(place, lambda encoded, **_: encoded.latent_dist.mode())


def without_hole(hidden: Image.Image | None = None) -> torch.Tensor:
    """The image from 0 to 1, -1 where it is hidden: as the card of lllyasviel/control_v11p_sd15_inpaint makes it."""
    pixels = np.asarray(image()).astype(np.float32) / 255.0
    pixels[np.asarray(hidden or mask()).astype(np.float32) / 255.0 > 0.5] = -1.0
    return torch.from_numpy(pixels[None].transpose(0, 3, 1, 2).copy())


def soft_mask() -> Image.Image:
    """With every brightness, in no whole cells."""
    pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
    pixels[11:37] = np.linspace(0, 255, WIDTH).astype(np.uint8)
    return Image.fromarray(pixels)


def with_inpainting(folder: Path, *names: str, device: str = "cpu", layout: Any = None) -> TinyModel:
    """A tiny Stable Diffusion 1 with ControlNets of these names."""
    (folder / "controlnet").mkdir()
    for place, name in enumerate(names):
        path = folder / "controlnet" / f"{name}.safetensors"
        own = layout or ldm_controlnet(layouts.TINY_UNET)
        write_tiny_checkpoint(path, seed=place, dtype=torch.float32, layout=own)
    return TinyModel(folder, layouts.tiny_sd1(), device=device)


@pytest.mark.parametrize("hidden", [mask(), soft_mask()], ids=["cells", "soft"])
def test_one_that_reads_a_hole_in_pixels_is_that_of_diffusers(hidden: Image.Image, tmp_path: Path) -> None:
    """By an image and a mask of its own, beside which nothing is kept."""
    tiny = with_inpainting(tmp_path, INPAINT)
    control = {"model": INPAINT, "image": image(), "mask": hidden, "strength": 0.8}
    made = tiny.made(controls=[control], **SIZE, **FIELDS)
    expected = controlled_latent(
        tiny, made, diffusers.StableDiffusionControlNetPipeline, (INPAINT,), image=without_hole(hidden),
        controlnet_conditioning_scale=0.8, **SIZE,
    )  # fmt: skip
    assert_equal(made.latents[0], expected)
    plain = tiny.made(controls=[{"model": f"{INPAINT}", "mode": "plain", "image": image()}], **SIZE, **FIELDS)
    assert not torch.allclose(made.latents[0], plain.latents[0], atol=0.01)
    tiny.close()


def test_beside_a_hole_that_is_filled_it_reads_the_same_image_and_mask(tmp_path: Path) -> None:
    """As people use it: the image and the mask are said once."""
    tiny = with_inpainting(tmp_path, INPAINT)
    fields = {"image": image(), "mask": mask(), "strength": STRENGTH, **FIELDS}
    made = tiny.made(controls=[INPAINT], **fields)
    expected = controlled_latent(
        tiny, made, StableDiffusionControlNetInpaintPipeline, (INPAINT,), image=image(), mask_image=mask(),
        control_image=without_hole(), controlnet_conditioning_scale=1.0, strength=STRENGTH, height=HEIGHT, width=WIDTH,
    )  # fmt: skip
    assert_equal(made.latents[0], expected)
    assert not torch.allclose(made.latents[0], tiny.made(**fields).latents[0], atol=0.01)
    kept = np.asarray(mask()) == 0
    assert (made.pixels[kept] == np.asarray(image())[kept]).all()
    tiny.close()


def test_a_request_says_it_where_the_name_does_not(tmp_path: Path) -> None:
    tiny = with_inpainting(tmp_path, INPAINT, "copy")
    find = tiny.catalog.controls.find
    assert find(INPAINT, 1.0, 0.0, 1.0).mask_mode is ControlMaskMode.ALWAYS
    assert find(INPAINT, 1.0, 0.0, 1.0, "plain").mask_mode is None
    assert find("copy", 1.0, 0.0, 1.0).mask_mode is None
    assert find("copy", 1.0, 0.0, 1.0, "inpaint").mask_mode is ControlMaskMode.ALWAYS
    assert find("copy", 1.0, 0.0, 1.0, "inpaint").mode is None
    with pytest.raises(
        UnusableField, match=r"controls.mode: found 'canny', expected 'inpaint', 'plain' or no mode: Contr"
    ):
        find("copy", 1.0, 0.0, 1.0, "canny")
    with pytest.raises(UnusableField, match=rf"controls.mask: missing; ControlNet '{INPAINT}'"):
        tiny.made(controls=[{"model": INPAINT, "image": image()}], **SIZE, **FIELDS)
    tiny.close()


def test_a_name_says_nothing_of_one_for_sdxl(tmp_path: Path) -> None:
    """Nothing says that all that are called so read a hole alike."""
    tiny = with_inpainting(tmp_path, "inpaint_xl", layout=ldm_controlnet(layouts.TINY_SDXL_UNET))
    assert tiny.catalog.controls.find("inpaint_xl", 1.0, 0.0, 1.0).mask_mode is None
    assert tiny.catalog.controls.find("inpaint_xl", 1.0, 0.0, 1.0, "inpaint").mask_mode is ControlMaskMode.ALWAYS
    tiny.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.counted
def test_runs_hold_what_was_estimated(count: int, tmp_path: Path) -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    names = [f"inpaint{place}" for place in range(count)]
    tiny = with_inpainting(tmp_path, *names, device="sim")
    try:
        check(tiny.made(image=image(), mask=mask(), controls=names, **FIELDS))
    finally:
        tiny.close()


def test_several_images_with_holes_of_their_own_are_made_at_once(tmp_path: Path) -> None:
    tiny = with_inpainting(tmp_path, INPAINT)
    controls = [{"model": INPAINT, "image": image(), "mask": hidden} for hidden in (mask(), soft_mask())]
    made = [tiny.made(controls=[one], **SIZE, **FIELDS) for one in controls]
    members = []
    for one in made:
        (task,) = [task for task in one.tasks if task.stage is Stage.SAMPLE]
        members.append(BatchMember(task, one.works[task.task_id], results_read(task, one.results), QUIET))
    assert len({member.task.together for member in members}) == 1
    for outcome, one in zip(tiny.engine.run_batch(members), made, strict=True):
        assert isinstance(outcome, tuple)
        assert isinstance(outcome[0], Latent)
        assert outcome[1].batched == 2
        assert_equal(torch.from_numpy(outcome[0].samples_CHW)[None], one.latents[0])
    tiny.close()


def promax() -> Any:
    """Of the sizes of the tiny SDXL, trained for eight kinds of images."""
    plain = plan_controlnet(ldm_controlnet(layouts.TINY_SDXL_UNET, ""))
    sizes = controlnet_config(plan_controlnet(dict(plain.key_map.shapes)).key_map.shapes)
    del sizes["mid_block_type"]
    channels = sizes["block_out_channels"][0]
    return diffusers.ControlNetUnionModel(
        **sizes, num_control_type=8, num_trans_channel=channels, num_trans_head=1, num_proj_channel=channels
    )


def test_the_mode_of_a_union_that_fills_holes_is_that_of_diffusers(tmp_path: Path) -> None:
    """Its image has a black hole, made already or by the mask."""
    (tmp_path / "controlnet").mkdir()
    module = seeded(promax, 4)
    save_file(module.state_dict(), tmp_path / "controlnet" / "union.safetensors")
    tiny = TinyModel(tmp_path, layouts.tiny_sdxl())
    fields = {"image": image(), "mask": mask(), "strength": STRENGTH, **FIELDS}
    made = tiny.made(controls=["union@repaint:0.8"], **fields)
    black = np.asarray(image()).copy()
    black[np.asarray(mask()) > 0] = 0
    vae, unet = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor)
    unet.register_to_config(sample_size=64)
    pipeline = StableDiffusionXLControlNetUnionInpaintPipeline(
        vae=vae, text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        controlnet=module, scheduler=euler(), add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        **made.texts, image=image(), mask_image=mask(), control_image=[Image.fromarray(black)], control_mode=[7],
        strength=STRENGTH, controlnet_conditioning_scale=0.8, num_inference_steps=STEPS, guidance_scale=CFG,
        height=HEIGHT, width=WIDTH, generator=torch.Generator().manual_seed(SEED), output_type="latent",
    ).images  # fmt: skip
    assert_equal(made.latents[0], expected)
    already = {"model": "union", "mode": "repaint", "image": Image.fromarray(black), "strength": 0.8}
    assert torch.equal(tiny.made(controls=[already], **fields).latents[0], made.latents[0])
    # nothing is hidden from it where nothing is to be made anew
    alone, hole = tiny.made(controls=[already], **SIZE, **FIELDS), {**already, "image": image(), "mask": mask()}
    assert torch.equal(tiny.made(controls=[hole], **SIZE, **FIELDS).latents[0], alone.latents[0])
    tiny.close()
