"""Images of transformers with ControlNets that are told a hole beside their image are those of diffusers' pipelines
on the same weights, texts and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.stage_params import BatchMember, EncodeImageParams, Latent
from modelpool.pool.values.specs.spec import Stage
from tests.pool.families.test_from_images import image, mask
from tests.pool.families.test_inpainting_controlnets import soft_mask
from tests.pool.families.test_needs_shown import check
from tests.pool.families.test_transformer_controlnets import (
    CFG,
    FIELDS,
    HEIGHT,
    SEED,
    STEPS,
    WIDTH,
    assert_equal,
    in_its_share,
)
from tests.pool.families.tiny_model import QUIET, Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.told_pipelines import parts_of, texts_of
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.input_names import results_read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def other_image() -> Image.Image:
    return Image.fromarray(np.asarray(image())[::-1].copy())


#: what is told a hole, by the models that it speaks to
CONTROLS: Mapping[str, Callable[[], Any]] = {
    "sd3": lambda: tiny_controls.sd3(extra_conditioning_channels=1),
    "qwen_image": lambda: tiny_controls.qwen_image(extra_condition_channels=4),
    "z_image": lambda: tiny_controls.z_image("2.1"),
}
#: those that must be told one
ALWAYS = ("sd3", "qwen_image")
#: those that are told it of an image beside their own: beside an image which all is made anew of
BESIDE: Mapping[str, dict[str, Any]] = {"z_image": {"image": other_image(), "strength": 1.0}}
#: of tiny models a sample of a ControlNet is large beside what its blocks hold at once
MOST_OVER = 0.08


@pytest.fixture(autouse=True)
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    place = "diffusers.models.autoencoders.vae.DiagonalGaussianDistribution.sample"
    monkeypatch.setattr(place, lambda latents, generator=None: latents.mode())


def model_with(folder: Path, family: str, device: str = "cpu") -> tuple[TinyFamilyModel, Any]:
    """The model, with a ControlNet called "hole" in a folder beside it, and that as diffusers has it."""
    module = tiny_controls.write(folder / "controlnet" / "hole.safetensors", CONTROLS[family], 5)
    return TinyFamilyModel(folder, FAMILIES[family], device=device), module


def control(**fields: Any) -> dict[str, Any]:
    return {"model": "hole", "image": image(), "mask": soft_mask(), "strength": 0.7, **fields}


def sd3_latent(tiny: TinyFamilyModel, made: Made, module: Any, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    pipeline = diffusers.StableDiffusion3ControlNetInpaintingPipeline(
        model, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, None, None, None, None, module
    )
    found: Tensor = pipeline(**texts_of(made), **call, guidance_scale=CFG).images
    return found


def qwen_latent(tiny: TinyFamilyModel, made: Made, module: Any, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    pipeline = diffusers.QwenImageControlNetInpaintPipeline(scheduler, vae, None, None, model, module)
    found = pipeline(**texts_of(made, "prompt_embeds_mask"), **call, true_cfg_scale=CFG).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked[:, :, 0]


def z_image_latent(tiny: TinyFamilyModel, made: Made, module: Any, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    own = in_its_share(diffusers.ZImageControlNetModel.from_transformer(module, model), call)
    pipeline = diffusers.ZImageControlNetInpaintPipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, model, own
    )
    context, hidden = texts_of(made)["prompt_embeds"], call.pop("control_mask")
    given = {**call, "image": other_image(), "mask_image": hidden}
    found: Tensor = pipeline(prompt_embeds=[context[0]], **given, guidance_scale=0.0).images
    return found


PIPELINES: Mapping[str, Callable[[TinyFamilyModel, Made, Any, dict[str, Any]], Tensor]] = {
    "sd3": sd3_latent,
    "qwen_image": qwen_latent,
    "z_image": z_image_latent,
}


def expected_of(tiny: TinyFamilyModel, made: Made, module: Any, own: dict[str, Any]) -> Tensor:
    """What the pipeline of diffusers comes to with the ControlNet `own`."""
    call = {
        "control_image": own["image"], "control_mask": own["mask"], "controlnet_conditioning_scale": own["strength"],
        "control_guidance_start": own.get("start", 0.0), "control_guidance_end": own.get("end", 1.0),
        "height": HEIGHT, "width": WIDTH, "num_inference_steps": STEPS, "output_type": "latent",
        "generator": torch.Generator().manual_seed(SEED),
    }  # fmt: skip
    with torch.no_grad():
        return PIPELINES[tiny.family.name](tiny, made, module, call)


@pytest.mark.parametrize("family", CONTROLS)
def test_one_that_is_told_a_hole_is_that_of_diffusers(family: str, tmp_path: Path) -> None:
    """At two strengths, and in the middle of the steps alone; by a mask with every brightness."""
    tiny, module = model_with(tmp_path, family)
    whole = {**FIELDS, **BESIDE.get(family, {})}
    plain = tiny.made(**whole).latents[0]
    for fields in ({}, {"strength": 0.3}, {"start": 0.25, "end": 0.75}):
        own = control(**fields)
        made = tiny.made(controls=[own], **whole)
        assert_equal(made.latents[0], expected_of(tiny, made, module, own))
        assert float((made.latents[0] - plain).abs().max()) > 0.01 * float(plain.std())
    other = tiny.made(controls=[control(mask=Image.fromarray(255 - np.asarray(soft_mask())))], **whole)
    assert not torch.allclose(other.latents[0], tiny.made(controls=[control()], **whole).latents[0], atol=1e-3)
    tiny.close()


def test_of_stable_diffusion_3_it_is_told_no_pooled_text_whatever_its_folder_says(tmp_path: Path) -> None:
    """As diffusers' pipeline has it, which does not look."""
    path = tmp_path / "controlnet" / "hole" / "diffusion_pytorch_model.safetensors"
    module = tiny_controls.write(path, CONTROLS["sd3"], 5)
    (path.parent / "config.json").write_text('{"force_zeros_for_pooled_projection": false}')
    tiny = TinyFamilyModel(tmp_path, FAMILIES["sd3"])
    own = control(model=str(path))
    made = tiny.made(controls=[own], **FIELDS)
    assert_equal(made.latents[0], expected_of(tiny, made, module, own))
    tiny.close()


@pytest.mark.parametrize("family", ALWAYS)
def test_the_image_and_the_mask_of_the_request_are_those_that_it_is_told(family: str, tmp_path: Path) -> None:
    """One image and one mask, said once: outside of the hole all is kept, to the bit."""
    tiny, _ = model_with(tmp_path, family)
    fields = {**FIELDS, "image": image(), "mask": soft_mask()}
    made = tiny.made(controls=["hole:0.7"], **fields)
    said = tiny.made(controls=[control()], **fields)
    assert torch.equal(made.latents[0], said.latents[0])
    assert not torch.allclose(made.latents[0], tiny.made(**fields).latents[0], atol=1e-3)
    kept = np.asarray(soft_mask()) == 0
    assert (made.pixels[kept] == np.asarray(image())[kept]).all()
    hidden = [work for work in made.works.values() if isinstance(work, EncodeImageParams)]
    assert sorted((work.hides, work.black) for work in hidden) == [(False, False), (True, True)]
    tiny.close()


def test_one_that_may_be_told_a_hole_is_told_that_of_the_request(tmp_path: Path) -> None:
    """Beside the image that it speaks of; without a mask it is told none."""
    tiny, _ = model_with(tmp_path, "z_image")
    fields = {**FIELDS, "image": other_image(), "mask": soft_mask()}
    own = {name: value for name, value in control().items() if name != "mask"}
    made = tiny.made(controls=[own], **fields)
    assert torch.equal(made.latents[0], tiny.made(controls=[control()], **fields).latents[0])
    encoded = [work for work in made.works.values() if isinstance(work, EncodeImageParams)]
    assert [(work.hides, work.black) for work in encoded].count((True, False)) == 1
    plain = tiny.made(controls=[own], **{**fields, "mask": None, "strength": 1.0})
    assert not any(work.hides for work in plain.works.values() if isinstance(work, EncodeImageParams))
    told = tiny.made(controls=[control()], **{**fields, "mask": None, "strength": 1.0})
    assert not torch.allclose(plain.latents[0], told.latents[0], atol=1e-3)
    tiny.close()


@pytest.mark.parametrize("family", ALWAYS)
def test_one_without_a_mask_is_refused_by_name(family: str, tmp_path: Path) -> None:
    tiny, _ = model_with(tmp_path, family)
    with pytest.raises(UnusableField, match=r"controls.mask: missing; ControlNet 'hole' requires a mask"):
        tiny.made(controls=[control(mask=None)], **FIELDS)
    with pytest.raises(UnusableField, match=r"controls.image: missing; set it to the path of an image"):
        tiny.made(controls=[control(image=None, mask=None)], **FIELDS)
    tiny.close()


@pytest.mark.parametrize(
    ("family", "make", "complaint"),
    [
        ("sd3", lambda: tiny_controls.sd3(extra_conditioning_channels=2), "2.*expected .*mask channels 1"),
        ("qwen_image", lambda: tiny_controls.qwen_image(extra_condition_channels=8), "8.*expected .*mask channels 4"),
        ("qwen_image", lambda: tiny_controls.qwen_image(extra_condition_channels=3), "3.*expected .*mask channels 4"),
    ],
)
def test_one_that_is_told_other_things_than_a_mask_is_refused_by_name(
    family: str, make: Callable[[], Any], complaint: str, tmp_path: Path
) -> None:
    tiny_controls.write(tmp_path / "controlnet" / "hole.safetensors", make)
    tiny = TinyFamilyModel(tmp_path, FAMILIES[family])
    with pytest.raises(UnusableField, match=rf"controls: found .*mask channels {complaint}"):
        tiny.made(controls=[control()], **FIELDS)
    tiny.close()


def test_a_hole_is_filled_beside_one_that_is_told_none_as_diffusers_does(tmp_path: Path) -> None:
    """What its pipelines for filling holes with ControlNets of Flux do, which speak of edges or depth."""
    module = tiny_controls.write(tmp_path / "controlnet" / "canny.safetensors", tiny_controls.flux, 5)
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    own = {"model": "canny", "image": other_image(), "strength": 0.7}
    made = tiny.made(controls=[own], image=image(), mask=mask(), **{**FIELDS, "strength": 0.75})
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
    pipeline = diffusers.FluxControlNetInpaintPipeline(scheduler, vae, None, None, None, None, model, module)
    with torch.no_grad():
        found = pipeline(
            **texts_of(made), image=image(), mask_image=mask(), control_image=other_image(), strength=0.75,
            controlnet_conditioning_scale=0.7, guidance_scale=CFG, height=HEIGHT, width=WIDTH,
            num_inference_steps=STEPS, output_type="latent", generator=torch.Generator().manual_seed(SEED),
        ).images  # fmt: skip
    assert_equal(made.latents[0], pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor))
    tiny.close()


def test_one_for_flux_is_refused_by_name(tmp_path: Path) -> None:
    """As alimama-creative publishes them; diffusers has no class with its channels."""
    path = tmp_path / "controlnet" / "hole.safetensors"
    tiny_controls.write(path, tiny_controls.flux)
    tensors = load_file(path)
    weight = tensors["controlnet_x_embedder.weight"]
    save_file({**tensors, "controlnet_x_embedder.weight": torch.zeros(len(weight), weight.shape[1] + 4)}, path)
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    with pytest.raises(
        UnknownArchitecture,
        match=r"hole.*: found 68 channels, expected 64: diffusers does not support inpainting ControlNets for Flux",
    ):
        tiny.made(controls=[control()], **FIELDS)
    tiny.close()


@pytest.mark.parametrize("family", CONTROLS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.counted
def test_runs_hold_what_was_estimated(family: str, count: int, tmp_path: Path) -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    for place in range(count):
        tiny_controls.write(tmp_path / "controlnet" / f"hole{place}.safetensors", CONTROLS[family], place)
    tiny = TinyFamilyModel(tmp_path, FAMILIES[family], device="sim")
    controls = [control(model=f"hole{place}") for place in range(count)]
    try:
        check(tiny.made(controls=controls, **{**FIELDS, **BESIDE.get(family, {}), "steps": 6}), MOST_OVER)
    finally:
        tiny.close()


@pytest.mark.parametrize("family", CONTROLS)
def test_what_streams_gives_the_same_image(family: str, tmp_path: Path) -> None:
    tiny, _ = model_with(tmp_path, family)
    fields = {"controls": [control()], **FIELDS, **BESIDE.get(family, {})}
    whole = tiny.made(**fields)
    tiny.close()
    sim.install()
    sim.configure(0, 512 << 20)
    sim.recover(0)
    tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=512 << 20, vram_policy=VramPolicy.NONE))
    streamed = tiny.made(**fields)
    assert any(cost.streamed_bytes for cost in streamed.costs)
    assert_equal(streamed.latents[0], whole.latents[0])
    tiny.close()


@pytest.mark.parametrize("family", CONTROLS)
def test_several_images_with_holes_of_their_own_are_made_at_once(family: str, tmp_path: Path) -> None:
    tiny, _ = model_with(tmp_path, family)
    fields = {**FIELDS, **BESIDE.get(family, {}), "prompt": "red", "negative": "dog"}
    other = Image.fromarray(np.asarray(soft_mask())[:, ::-1].copy())
    made = [tiny.made(controls=[control(mask=mask)], **fields) for mask in (soft_mask(), other)]
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
