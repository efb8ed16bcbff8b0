"""Images of transformers with ControlNets are those of diffusers' pipelines on the same weights, texts and noise: for
Flux, Stable Diffusion 3 and 3.5 and Qwen-Image, at several strengths, in a share of the steps, two at once; and on a
device that is too small for all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.controlnets.blockwise import BlockwiseControlNet
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import BatchMember, Encoded, EncodeImageParams, Latent
from modelpool.pool.values.specs.spec import Stage
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_model import QUIET, Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.told_pipelines import parts_of, texts_of
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.input_names import results_read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDTH, HEIGHT, STEPS, SEED, CFG = 64, 48, 4, 11, 3.0
FIELDS: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": STEPS, "cfg": CFG, "negative": "blurry"}
#: what is compared, and the models that it speaks to
CONTROLS: Mapping[str, tuple[str, Callable[[], Any], Any]] = {
    "flux": ("flux_dev", tiny_controls.flux, tiny_controls.as_it_is),
    "flux schnell": ("flux_schnell", tiny_controls.flux, tiny_controls.as_it_is),
    "flux, not told": ("flux_dev", lambda: tiny_controls.flux(guidance_embeds=False), tiny_controls.as_it_is),
    "flux, many blocks": (
        "flux_dev",
        lambda: tiny_controls.flux(num_layers=2, num_single_layers=0),
        tiny_controls.as_it_is,
    ),
    "flux of xlabs": (
        "flux_dev",
        lambda: tiny_controls.flux(num_single_layers=0, patch_size=2, conditioning_embedding_channels=16),
        tiny_controls.xlabs_file,
    ),
    "sd3": ("sd3", tiny_controls.sd3, tiny_controls.as_it_is),
    "sd35_large": ("sd35_large", tiny_controls.sd35_large, tiny_controls.sd35_file),
    "sd35_large, edges": ("sd35_large", tiny_controls.sd35_large, partial(tiny_controls.sd35_file, images=1)),
    "qwen_image": ("qwen_image", tiny_controls.qwen_image, tiny_controls.as_it_is),
    "qwen_image, blockwise": ("qwen_image", tiny_controls.qwen_blockwise, tiny_controls.as_it_is),
    "hunyuan_dit": ("hunyuan_dit", tiny_controls.hunyuan_dit, tiny_controls.as_it_is),
    "z_image": ("z_image", tiny_controls.z_image, tiny_controls.as_it_is),
    "z_image 2.0": (
        "z_image",
        lambda: tiny_controls.z_image("2.0", control_layers_places=[0, 1]),
        tiny_controls.z_image_20_file,
    ),
    "z_image 2.1": ("z_image", lambda: tiny_controls.z_image("2.1"), tiny_controls.as_it_is),
}


def control(name: str = "canny", **fields: Any) -> dict[str, Any]:
    return {"model": name, "image": image(), "strength": 0.7, **fields}


def negative() -> Image.Image:
    return Image.fromarray(255 - np.asarray(image()))


def model_with(folder: Path, case: str, names: Sequence[str] = ("canny",)) -> tuple[TinyFamilyModel, list[Any]]:
    """The model, with ControlNets in a folder beside it, and these as diffusers has them."""
    family, make, publish = CONTROLS[case]
    modules = [
        tiny_controls.write(folder / "controlnet" / f"{name}.safetensors", make, 5 + place, publish)
        for place, name in enumerate(names)
    ]
    tiny = TinyFamilyModel(folder, FAMILIES[family])
    assert tiny.family.name == family
    return tiny, modules


def flux_latent(tiny: TinyFamilyModel, made: Made, controls: Sequence[Any], call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    is_schnell = tiny.family.name == "flux_schnell"
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=not is_schnell, max_shift=1.15, base_shift=0.5)
    several = isinstance(call["control_image"], list)
    own = diffusers.FluxMultiControlNetModel(controls) if several else controls[0]
    pipeline = diffusers.FluxControlNetPipeline(scheduler, vae, None, None, None, None, model, own)
    # schnell is not told how strongly it is to follow a text, but its ControlNet is
    guidance = 3.5 if is_schnell else CFG
    found = pipeline(**texts_of(made), **call, guidance_scale=guidance).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked


def sd3_latent(tiny: TinyFamilyModel, made: Made, controls: Sequence[Any], call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    own = controls[0] if len(controls) == 1 else diffusers.SD3MultiControlNetModel(controls)
    pipeline = diffusers.StableDiffusion3ControlNetPipeline(
        model, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, None, None, None, None, own
    )
    if any(work.bright for work in made.works.values() if isinstance(work, EncodeImageParams)):
        pipeline.image_processor = Edges()
    found: Tensor = pipeline(**texts_of(made), **call, guidance_scale=CFG).images
    return found


class Edges(VaeImageProcessor):
    """As the card of stabilityai/stable-diffusion-3.5-large-controlnet-canny has images read."""

    def __init__(self) -> None:
        super().__init__(do_normalize=False)

    def preprocess(self, *args: Any, **how: Any) -> Tensor:
        pixels: Tensor = super().preprocess(*args, **how)
        return pixels * 255 * 0.5 + 0.5


def qwen_latent(tiny: TinyFamilyModel, made: Made, controls: Sequence[Any], call: dict[str, Any]) -> Tensor:
    """One that is used of two images is one module; the pipeline has no several."""
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    own = controls[0]
    if isinstance(own, BlockwiseControlNet):
        return blockwise_latent(tiny, made, controls, call, scheduler)
    if isinstance(call["control_image"], list):
        own = diffusers.QwenImageMultiControlNetModel([own])
    pipeline = diffusers.QwenImageControlNetPipeline(scheduler, vae, None, None, model, own)
    found = pipeline(**texts_of(made, "prompt_embeds_mask"), **call, true_cfg_scale=CFG).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked[:, :, 0]


class BehindBlocks:
    """The formulas of DiffSynth-Studio behind each block of a model: the tokens of a control image and of the latent,
    each normed, are added and read by two layers. `uses` has for each ControlNet its weights, the latent of its image,
    its strength, and its share of the steps."""

    def __init__(self, uses: Sequence[tuple[Mapping[str, Tensor], Tensor, float, float, float]]) -> None:
        self.uses, self.step = uses, 0

    def hook(self, number: int) -> Callable[..., Any]:
        def behind(block: Any, args: Any, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            text, x = out
            for state, latent, strength, start, end in self.uses:
                if start <= self.step / STEPS and (self.step + 1) / STEPS <= end:
                    x = x + strength * self.added(state, latent, out[1], number)
            return text, x

        return behind

    def added(self, state: Mapping[str, Tensor], latent: Tensor, x: Tensor, number: int) -> Tensor:
        patches = functional.unfold(latent, 2, stride=2).transpose(1, 2)
        shown = functional.linear(patches, state["img_in.weight"], state["img_in.bias"])
        beginning = f"controlnet_blocks.{number}."
        own = {key.removeprefix(beginning): value for key, value in state.items() if key.startswith(beginning)}
        x, shown = (
            one * torch.rsqrt(one.square().mean(-1, keepdim=True) + 1e-6) * own[f"{name}_rms.weight"]
            for name, one in (("x", x), ("y", shown))
        )
        h = functional.gelu(functional.linear(x + shown, own["input_proj.weight"], own["input_proj.bias"]))
        return functional.linear(h, own["output_proj.weight"], own["output_proj.bias"])

    def count(self, pipeline: Any, step: int, *_: Any) -> dict[str, Any]:
        self.step = step + 1
        return {}


def blockwise_latent(
    tiny: TinyFamilyModel, made: Made, controls: Sequence[Any], call: dict[str, Any], scheduler: Any
) -> Tensor:
    """By the pipeline without ControlNets, with `BehindBlocks`."""
    vae, model = parts_of(tiny)
    names = "control_image", "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end"
    given = [call.pop(name) for name in names]
    columns = given if isinstance(given[0], list) else [[one] for one in given]
    pipeline = diffusers.QwenImagePipeline(scheduler, vae, None, None, model)
    mean, deviation = (
        torch.tensor(one).view(1, -1, 1, 1, 1) for one in (vae.config.latents_mean, vae.config.latents_std)
    )
    uses = []
    for module, picture, *others in zip(controls * len(columns[0]), *columns, strict=False):
        pixels = pipeline.image_processor.preprocess(picture, HEIGHT, WIDTH)[:, :, None]
        latent = (vae.encode(pixels).latent_dist.mode() - mean) / deviation
        uses.append((module.state_dict(), latent[:, :, 0], *others))
    behind = BehindBlocks(uses)
    hooks = [block.register_forward_hook(behind.hook(place)) for place, block in enumerate(model.transformer_blocks)]
    try:
        texts = texts_of(made, "prompt_embeds_mask")
        found = pipeline(**texts, **call, true_cfg_scale=CFG, callback_on_step_end=behind.count).images
    finally:
        for hook in hooks:
            hook.remove()
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked[:, :, 0]


def in_its_share(control: Any, call: dict[str, Any]) -> Any:
    """`control` for a pipeline that knows no share of the steps, as `call` has it: else it speaks without strength."""
    strength = call["controlnet_conditioning_scale"]
    start, end = call.pop("control_guidance_start"), call.pop("control_guidance_end")
    steps = iter(range(STEPS))

    own = next(kind for kind in type(control).__mro__ if kind.__name__ != "InItsShare")

    class InItsShare(own):  # type: ignore[misc, valid-type] # diffusers is not typed
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            step = next(steps)
            is_on = not (step / STEPS < start or (step + 1) / STEPS > end)
            return super().forward(*args, **{**kwargs, "conditioning_scale": strength if is_on else 0.0})

    control.__class__ = InItsShare
    return control


def hunyuan_latent(tiny: TinyFamilyModel, made: Made, controls: Sequence[Any], call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    betas = {"beta_start": 0.00085, "beta_end": 0.018, "beta_schedule": "scaled_linear"}
    scheduler = diffusers.EulerDiscreteScheduler(**betas, prediction_type="v_prediction")
    own = in_its_share(controls[0], call)
    pipeline = diffusers.HunyuanDiTControlNetPipeline(
        vae, None, None, model, scheduler, None, None, own, None, None, False
    )
    given = texts_of(made, "prompt_attention_mask")
    read = [one for one in made.results.values() if isinstance(one, Encoded)]
    for side, text in zip(("", "negative_"), read, strict=True):
        given[f"{side}prompt_embeds_2"] = torch.from_numpy(text.others["context_2"])[None]
        mask = text.others.get("context_2_mask", np.ones(256, bool))
        given[f"{side}prompt_attention_mask_2"] = torch.from_numpy(mask)[None].long()
    found: Tensor = pipeline(**given, **call, guidance_scale=CFG, use_resolution_binning=False).images
    return found


def z_image_latent(tiny: TinyFamilyModel, made: Made, controls: Sequence[Any], call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    own = in_its_share(diffusers.ZImageControlNetModel.from_transformer(controls[0], model), call)
    pipeline = diffusers.ZImageControlNetPipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, model, own
    )
    context = texts_of(made)["prompt_embeds"]
    found: Tensor = pipeline(prompt_embeds=[context[0]], **call, guidance_scale=0.0).images
    return found


PIPELINES: Mapping[str, Callable[[TinyFamilyModel, Made, Sequence[Any], dict[str, Any]], Tensor]] = {
    "flux_dev": flux_latent,
    "flux_schnell": flux_latent,
    "sd3": sd3_latent,
    "sd35_large": sd3_latent,
    "qwen_image": qwen_latent,
    "hunyuan_dit": hunyuan_latent,
    "z_image": z_image_latent,
}


def expected_of(
    tiny: TinyFamilyModel, made: Made, modules: Sequence[Any], controls: Sequence[dict[str, Any]]
) -> Tensor:
    """What the pipeline of diffusers comes to with `controls`."""
    each = {
        "control_image": [one["image"] for one in controls],
        "controlnet_conditioning_scale": [one["strength"] for one in controls],
        "control_guidance_start": [one.get("start", 0.0) for one in controls],
        "control_guidance_end": [one.get("end", 1.0) for one in controls],
    }
    if any("number" in one for one in controls):
        each["control_mode"] = [one["number"] for one in controls]
    call: dict[str, Any] = {name: values if len(controls) > 1 else values[0] for name, values in each.items()}
    call |= {
        "height": HEIGHT, "width": WIDTH, "num_inference_steps": STEPS, "output_type": "latent",
        "generator": torch.Generator().manual_seed(SEED),
    }  # fmt: skip
    with torch.no_grad():
        return PIPELINES[tiny.family.name](tiny, made, modules, call)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Random weights make latents wider than trained ones."""
    assert float(expected.std()) > 0
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))


@pytest.fixture(autouse=True)
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    controlled = ("flux.pipeline_flux_controlnet", "qwenimage.pipeline_qwenimage_controlnet")
    for place in (*controlled, "z_image.pipeline_z_image_controlnet"):
        name = f"diffusers.pipelines.{place}.retrieve_latents"
        monkeypatch.setattr(name, lambda encoded, **_: encoded.latent_dist.mode())
    place = "diffusers.models.autoencoders.vae.DiagonalGaussianDistribution.sample"
    monkeypatch.setattr(place, lambda latents, generator=None: latents.mode())


@pytest.mark.parametrize("case", CONTROLS)
def test_a_controlnet_is_that_of_diffusers(case: str, tmp_path: Path) -> None:
    """At two strengths, and in the middle of the steps alone."""
    tiny, modules = model_with(tmp_path, case)
    ref = tiny.catalog.controls.find("canny", 1.0, 0.0, 1.0)
    assert (ref.reads_latent, ref.bright) == ("xlabs" not in case, "edges" in case)
    plain = tiny.made(**FIELDS).latents[0]
    for fields in ({}, {"strength": 0.3}, {"start": 0.25, "end": 0.75}):
        own = control(**fields)
        made = tiny.made(controls=[own], **FIELDS)
        expected = expected_of(tiny, made, modules, [own])
        assert_equal(made.latents[0], expected)
        assert float((made.latents[0] - plain).abs().max()) > 0.01 * float(plain.std())
    tiny.close()


def test_the_modes_of_one_are_those_of_diffusers(tmp_path: Path) -> None:
    """By name and by number; two of them at once is one ControlNet, loaded once."""
    module = tiny_controls.write(tmp_path / "controlnet" / "union.safetensors", lambda: tiny_controls.flux(num_mode=10))
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    canny = control("union", mode="canny", number=0)
    depth = control("union", mode=2, number=2, image=negative(), strength=0.4)
    found = []
    for own in ([canny], [depth], [canny, depth]):
        asked = [{name: value for name, value in one.items() if name != "number"} for one in own]
        made = tiny.made(controls=asked, **FIELDS)
        (sample,) = [task for task in made.tasks if task.stage is Stage.SAMPLE]
        assert len(sample.uses) == 2
        found.append(made.latents[0])
        assert_equal(found[-1], expected_of(tiny, made, [module], own))
    assert not torch.allclose(found[0], found[2], atol=0.01)
    path = tmp_path / "edges.png"
    image().save(path)
    by_name, by_number = (tiny.made(controls=[f"union@{said}={path}"], **FIELDS) for said in ("depth", "2"))
    assert [task.task_id for task in by_name.tasks] == [task.task_id for task in by_number.tasks]
    tiny.close()


def test_the_mode_of_a_controlnet_is_refused_by_name(tmp_path: Path) -> None:
    tiny_controls.write(tmp_path / "controlnet" / "union.safetensors", lambda: tiny_controls.flux(num_mode=3))
    tiny_controls.write(tmp_path / "controlnet" / "plain.safetensors", tiny_controls.flux)
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    for own, complaint in (
        (control("union"), "missing; set it to a mode of ControlNet 'union': canny, tile, depth, or a number"),
        (control("union", mode="blur"), "found 'blur', expected a mode of ControlNet 'union'"),
        (control("union", mode=3), "found 3, expected a mode .* from 0 to 2"),
        (control("plain", mode="canny"), "found 'canny', expected no mode: ControlNet 'plain' has a single mode"),
    ):
        with pytest.raises(UnusableField, match=rf"controls.mode: {complaint}"):
            tiny.made(controls=[own], **FIELDS)
    tiny.close()


@pytest.mark.parametrize("case", ["flux", "sd3", "sd35_large"])
def test_two_at_once_are_those_of_diffusers(case: str, tmp_path: Path) -> None:
    tiny, modules = model_with(tmp_path, case, ("canny", "depth"))
    own = [control(), control("depth", image=negative(), strength=1.2, start=0.0, end=0.6)]
    made = tiny.made(controls=own, **FIELDS)
    assert_equal(made.latents[0], expected_of(tiny, made, modules, own))
    tiny.close()


def test_what_its_folder_says_is_heard_of_equal_files_each(tmp_path: Path) -> None:
    """One after the other in one engine, and both at once."""
    paths, modules = {}, {}
    for zeros in (True, False):
        paths[zeros] = tmp_path / "controlnet" / str(zeros) / "diffusion_pytorch_model.safetensors"
        modules[zeros] = tiny_controls.write(paths[zeros], tiny_controls.sd3, 5)
        modules[zeros].register_to_config(force_zeros_for_pooled_projection=zeros)
        (paths[zeros].parent / "config.json").write_text(
            f'{{"force_zeros_for_pooled_projection": {str(zeros).lower()}}}'
        )
    tiny = TinyFamilyModel(tmp_path, FAMILIES["sd3"])
    found = {}
    for zeros, path in paths.items():
        own = control(str(path))
        made = tiny.made(controls=[own], **FIELDS)
        found[zeros] = made.latents[0]
        assert_equal(found[zeros], expected_of(tiny, made, [modules[zeros]], [own]))
    assert not torch.allclose(found[True], found[False], atol=1e-3)
    both = tiny.made(controls=[control(str(path)) for path in paths.values()], **FIELDS)
    (sample,) = [task for task in both.tasks if task.stage is Stage.SAMPLE]
    assert len({use.component for use in sample.uses}) == 3
    tiny.close()


def test_one_that_speaks_of_two_images_is_that_of_diffusers(tmp_path: Path) -> None:
    tiny, modules = model_with(tmp_path, "qwen_image")
    own = [control(), control(image=negative(), strength=0.3)]
    made = tiny.made(controls=own, **FIELDS)
    assert_equal(made.latents[0], expected_of(tiny, made, modules, own))
    assert len([work for work in made.works.values() if isinstance(work, EncodeImageParams)]) == 2
    tiny.close()


def test_two_blockwise_ones_are_added(tmp_path: Path) -> None:
    tiny, modules = model_with(tmp_path, "qwen_image, blockwise", ("canny", "depth"))
    own = [control(), control("depth", image=negative(), strength=0.4, start=0.0, end=0.6)]
    made = tiny.made(controls=own, **FIELDS)
    assert_equal(made.latents[0], expected_of(tiny, made, modules, own))
    tiny.close()


def test_a_blockwise_one_acts_next_to_another_kind(tmp_path: Path) -> None:
    tiny_controls.write(tmp_path / "controlnet" / "union.safetensors", tiny_controls.qwen_image, 9)
    tiny, _ = model_with(tmp_path, "qwen_image, blockwise")
    alone, other, both = (
        tiny.made(controls=own, **FIELDS).latents[0]
        for own in ([control()], [control("union")], [control(), control("union")])
    )
    assert not any(torch.allclose(both, one, atol=0.01) for one in (alone, other))
    tiny.close()


def test_two_that_say_different_numbers_of_samples_are_both_heard_behind_every_block(tmp_path: Path) -> None:
    """One with a sample for all blocks is as one that has it for each of them; diffusers would drop samples."""
    folder = tmp_path / "controlnet"
    few = tiny_controls.write(folder / "few.safetensors", lambda: tiny_controls.flux(num_single_layers=0))
    state = {key: tensor.clone() for key, tensor in few.state_dict().items()}
    for key in [key for key in state if "blocks.0." in key]:
        again = key.replace("blocks.0.", "blocks.1.")
        # a block with a modulation that is zero changes nothing
        state[again] = torch.zeros_like(state[key]) if ".norm1.linear." in again else state[key].clone()
    save_file(state, folder / "many.safetensors")
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    twice, both = (
        tiny.made(controls=[control("few"), control(name, strength=0.2)], **FIELDS).latents[0]
        for name in ("few", "many")
    )
    assert_equal(both, twice)
    assert not torch.allclose(both, tiny.made(controls=[control("few")], **FIELDS).latents[0], atol=0.01)
    tiny.close()


def test_two_beside_z_image_go_behind_the_layers_of_each(tmp_path: Path) -> None:
    """One speaks behind the first layer, the other behind both; said twice at once is said once as strongly."""
    folder = tmp_path / "controlnet"
    tiny_controls.write(folder / "one.safetensors", tiny_controls.z_image, 1)
    tiny_controls.write(folder / "two.safetensors", lambda: tiny_controls.z_image(control_layers_places=[0, 1]), 2)
    tiny = TinyFamilyModel(tmp_path, FAMILIES["z_image"])
    for name in ("one", "two"):
        once = tiny.made(controls=[control(name, strength=0.8)], **FIELDS).latents[0]
        twice = tiny.made(controls=[control(name, strength=0.5), control(name, strength=0.3)], **FIELDS).latents[0]
        assert_equal(twice, once)
    both = [control("one", strength=0.8), control("two", strength=0.5)]
    parts = [control("two", strength=0.3), control("one", strength=0.8), control("two", strength=0.2)]
    found = tiny.made(controls=both, **FIELDS).latents[0]
    assert_equal(tiny.made(controls=parts, **FIELDS).latents[0], found)
    assert not torch.allclose(found, once, atol=0.01)
    tiny.close()


def test_what_a_image_is_made_from_may_be_what_a_controlnet_reads(tmp_path: Path) -> None:
    """Such as one for details, beside the image that is made anew: its latent is one task's, read twice."""
    tiny, modules = model_with(tmp_path, "flux")
    own = control()
    made = tiny.made(image=image(), strength=0.75, controls=[own], **FIELDS)
    (sample,) = [task for task in made.tasks if task.stage is Stage.SAMPLE]
    (encoded,) = [task.task_id for task in made.tasks if isinstance(made.works[task.task_id], EncodeImageParams)]
    assert sample.needs.count(encoded) == 2
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
    pipeline = diffusers.FluxControlNetImg2ImgPipeline(scheduler, vae, None, None, None, None, model, modules[0])
    with torch.no_grad():
        found = pipeline(
            **texts_of(made), image=image(), control_image=image(), strength=0.75, guidance_scale=CFG,
            controlnet_conditioning_scale=0.7, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
            output_type="latent", generator=torch.Generator().manual_seed(SEED),
        ).images  # fmt: skip
    assert_equal(made.latents[0], pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor))
    tiny.close()


def test_both_passes_hear_it_each_at_its_size(tmp_path: Path) -> None:
    tiny, _ = model_with(tmp_path, "flux")
    made = tiny.made(controls=[control()], hires="2:0.5", **FIELDS)
    sizes = [(work.width, work.height) for work in made.works.values() if isinstance(work, EncodeImageParams)]
    assert sorted(sizes) == [(WIDTH, HEIGHT), (2 * WIDTH, 2 * HEIGHT)]
    assert made.pixels.shape == (2 * HEIGHT, 2 * WIDTH, 3)
    plain = tiny.made(hires="2:0.5", **FIELDS)
    assert not torch.allclose(made.latents[1], plain.latents[1], atol=0.01)
    tiny.close()


@pytest.mark.parametrize("case", ["flux", "sd35_large", "qwen_image", "qwen_image, blockwise", "z_image 2.1"])
def test_what_streams_gives_the_same_image(case: str, tmp_path: Path) -> None:
    tiny, _ = model_with(tmp_path, case)
    fields = {"controls": [control()], **FIELDS}
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
    del streamed, tiny  # Z-Image's module has its table of positions where it ran last, as long as it lives
    gc.collect()
    assert sim.memory_stats(0).used_bytes == 0, "nothing that a ControlNet makes outlives the engine"


@pytest.mark.parametrize(
    ("case", "family", "complaint"),
    [
        (
            "flux",
            "sd3",
            r"found .*ControlNet 'canny' for Flux.*expected a ControlNet for models like 'tiny' \(Stable Diffusion 3",
        ),
        (
            "sd3",
            "flux_dev",
            r"found .*ControlNet 'canny' for Stable Diffusion 3.*expected a ControlNet for models like 'tiny' \(Flux",
        ),
        (
            "flux",
            "chroma",
            r"found .*ControlNet 'canny' for Flux.*expected a ControlNet for models like 'tiny' \(Chroma",
        ),
        (
            "qwen_image",
            "z_image",
            r"found .*ControlNet 'canny' for Qwen-Image.*expected a ControlNet for models like 'tiny'",
        ),
    ],
)
def test_one_for_another_family_is_refused_by_name(case: str, family: str, complaint: str, tmp_path: Path) -> None:
    _, make, publish = CONTROLS[case]
    tiny_controls.write(tmp_path / "controlnet" / "canny.safetensors", make, 5, publish)
    tiny = TinyFamilyModel(tmp_path, FAMILIES[family])
    with pytest.raises(UnusableField, match=f"controls: {complaint}"):
        tiny.made(controls=[control()], **FIELDS)
    tiny.close()


@pytest.mark.parametrize(
    ("case", "make", "complaint"),
    [
        ("flux_dev", lambda: tiny_controls.flux(joint_attention_dim=48), "text width 48"),
        ("flux_dev", lambda: tiny_controls.flux(in_channels=128), "latent channels 32"),
        ("flux_dev", lambda: tiny_controls.flux(num_attention_heads=4), "width 128"),
        ("z_image", lambda: tiny_controls.z_image(dim=96, n_heads=3, n_kv_heads=3), "width 96"),
    ],
)
def test_one_of_other_sizes_is_refused_by_name(
    case: str, make: Callable[[], Any], complaint: str, tmp_path: Path
) -> None:
    tiny_controls.write(tmp_path / "controlnet" / "canny.safetensors", make)
    tiny = TinyFamilyModel(tmp_path, FAMILIES[case])
    with pytest.raises(
        UnusableField, match=rf"controls: found .*ControlNet 'canny' \(.*{complaint}.*expected a ControlNet for"
    ):
        tiny.made(controls=[control()], **FIELDS)
    tiny.close()


def test_one_beside_a_image_to_work_from_is_refused(tmp_path: Path) -> None:
    tiny, _ = model_with(tmp_path, "flux")
    with pytest.raises(UnusableField, match="reference: cannot be combined with controls; ControlNet 'canny' works"):
        tiny.made(controls=[control()], reference=negative(), **FIELDS)
    tiny.close()


def test_regions_hear_what_is_said_to_the_prompt(tmp_path: Path) -> None:
    """A region with the text of the prompt is the image without it, whatever a ControlNet says."""
    tiny, _ = model_with(tmp_path, "flux")
    own = [control()]
    text = "a photo of a red cube"
    made = tiny.made(controls=own, regions=[{"prompt": text, "box": (0, 0, WIDTH, HEIGHT)}], **FIELDS)
    assert_equal(made.latents[0], tiny.made(controls=own, **FIELDS).latents[0])
    tiny.close()


@pytest.mark.parametrize("case", ["flux", "sd3", "qwen_image", "z_image"])
def test_several_images_at_once_are_those_of_each_alone(case: str, tmp_path: Path) -> None:
    """Different seeds and images for the ControlNet, through the modules in one batch; with the negative prompt too,
    where that is as long as the prompt."""
    tiny, _ = model_with(tmp_path, case)
    fields = {**FIELDS, "prompt": "red", "negative": "dog"}
    made = [
        tiny.made(controls=[control(image=shown)], seed=seed, **fields)
        for seed, shown in ((1, image()), (2, negative()))
    ]
    members = []
    for one in made:
        (task,) = [task for task in one.tasks if task.stage is Stage.SAMPLE]
        inputs = results_read(task, one.results)
        members.append(BatchMember(task, one.works[task.task_id], inputs, QUIET))
    assert len({member.task.together for member in members}) == 1
    for outcome, one in zip(tiny.engine.run_batch(members), made, strict=True):
        assert isinstance(outcome, tuple)
        assert isinstance(outcome[0], Latent)
        assert outcome[1].batched == 2
        assert_equal(torch.from_numpy(outcome[0].samples_CHW)[None], one.latents[0])
    tiny.close()
