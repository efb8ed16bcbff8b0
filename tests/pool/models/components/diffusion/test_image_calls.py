"""How diffusion models for images are called: bit for bit as the pipelines of diffusers call them.

A pipeline makes an image with a tiny model, and what it hands its scheduler is compared with what our call of the same
model gives for the same latent: patches, positions, time, signs, masks and guidance are the pipeline's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from tests.pool.models.components.diffusion.image_cases import CASES, Case
from tests.pool.zoo.case import quiet_libraries

STEPS = 2
FLOW_SIGMAS = [1.0, 0.5]
#: pixels that one cell of a latent stands for in every pipeline here
CELL = 8


def as_is(x: Tensor, case: Case) -> Tensor:
    return x


def unpacked(x_BND: Tensor, case: Case) -> Tensor:
    """From rows of patches of 2x2 cells to the latent."""
    _, height, width = case.latent
    latent: Tensor = diffusers.FluxPipeline._unpack_latents(x_BND, height * CELL, width * CELL, CELL)
    return latent


def cells(x_BND: Tensor, case: Case) -> Tensor:
    """From rows of single cells to the latent."""
    return x_BND.transpose(1, 2).reshape(x_BND.shape[0], *case.latent)


def reflected(told: Mapping[str, Tensor]) -> dict[str, Any]:
    """What most pipelines call what a model is told."""
    names = {"context": "prompt_embeds", "context_mask": "prompt_attention_mask", "pooled": "pooled_prompt_embeds"}
    given: dict[str, Any] = {names[name]: value for name, value in told.items() if name in names}
    return given | ({"guidance_scale": 3.5} if "guidance" in told else {"guidance_scale": 1.0})


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a pipeline of diffusers makes an image with a case's model.

    name    of the case
    cls     the pipeline
    given   what it is given for what the model is told
    latent  from what its scheduler sees to the latent
    more    further arguments
    flow    whether its levels are shares of noise
    cell    pixels that one cell of a latent stands for, without a VAE to ask
    """

    name: str
    cls: Any
    given: Callable[[Mapping[str, Tensor]], dict[str, Any]] = reflected
    latent: Callable[[Tensor, Case], Tensor] = as_is
    more: Mapping[str, Any] = field(default_factory=dict)
    flow: bool = True
    cell: int = CELL


def _qwen_image(told: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "prompt_embeds": told["context"], "prompt_embeds_mask": told["context_mask"].long(), "true_cfg_scale": 1.0,
    }  # fmt: skip


def _z_image(told: Mapping[str, Tensor]) -> dict[str, Any]:
    texts = [text[real] for text, real in zip(told["context"], told["context_mask"], strict=True)]
    return {"prompt_embeds": texts, "guidance_scale": 0.0}


def _auraflow(told: Mapping[str, Tensor]) -> dict[str, Any]:
    """Its own encoding of a text leaves zeros where there are no words."""
    words = told["context"] * told["context_mask"].unsqueeze(-1)
    return {"prompt_embeds": words, "prompt_attention_mask": told["context_mask"], "guidance_scale": 1.0}


def _chroma(told: Mapping[str, Tensor]) -> dict[str, Any]:
    # in numbers, as its own encoding of a text has it, the mask would be added by attention and hide nothing
    return reflected(told) | {"prompt_attention_mask": told["context_mask"]}


def _pixart(told: Mapping[str, Tensor]) -> dict[str, Any]:
    # without a prompt a pipeline that guides would want a negative one
    return reflected(told) | {"negative_prompt": None, "use_resolution_binning": False}


def _hunyuan_dit(told: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "prompt_embeds": told["context"], "prompt_attention_mask": told["context_mask"],
        "prompt_embeds_2": told["context_2"], "prompt_attention_mask_2": told["context_2_mask"],
        "guidance_scale": 1.0, "use_resolution_binning": False,
    }  # fmt: skip


def _hunyuan_image(told: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "prompt_embeds": told["context"], "prompt_embeds_mask": told["context_mask"].long(),
        "prompt_embeds_2": told["context_2"], "prompt_embeds_mask_2": told["context_2_mask"].long(),
        "distilled_guidance_scale": 3.5,
    }  # fmt: skip


def _hidream(told: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "prompt_embeds_t5": told["context"], "prompt_embeds_llama3": told["context_2"].transpose(0, 1),
        "pooled_prompt_embeds": told["pooled"], "guidance_scale": 1.0,
    }  # fmt: skip


PIPELINES = (
    Pipeline("sd3", diffusers.StableDiffusion3Pipeline),
    Pipeline("sd35_medium", diffusers.StableDiffusion3Pipeline),
    Pipeline("sd35_large", diffusers.StableDiffusion3Pipeline),
    Pipeline("flux_dev", diffusers.FluxPipeline, latent=unpacked),
    Pipeline("flux_schnell", diffusers.FluxPipeline, latent=unpacked),
    Pipeline("flux2", diffusers.Flux2Pipeline, latent=cells, cell=16),
    Pipeline("flux2_klein", diffusers.Flux2KleinPipeline, latent=cells, cell=16),
    Pipeline("chroma", diffusers.ChromaPipeline, _chroma, unpacked),
    Pipeline("qwen_image", diffusers.QwenImagePipeline, _qwen_image, unpacked),
    Pipeline("z_image", diffusers.ZImagePipeline, _z_image),
    Pipeline("lumina2", diffusers.Lumina2Pipeline),
    Pipeline("auraflow", diffusers.AuraFlowPipeline, _auraflow),
    Pipeline("pixart_alpha", diffusers.PixArtAlphaPipeline, _pixart, flow=False),
    Pipeline("pixart_sigma", diffusers.PixArtSigmaPipeline, _pixart, flow=False),
    Pipeline(
        "hunyuan_dit", diffusers.HunyuanDiTPipeline, _hunyuan_dit, more={"requires_safety_checker": False}, flow=False
    ),
    Pipeline(
        "hunyuan_dit with sizes", diffusers.HunyuanDiTPipeline, _hunyuan_dit, more={"requires_safety_checker": False},
        flow=False,
    ),
    Pipeline("hunyuan_image_21", diffusers.HunyuanImagePipeline, _hunyuan_image),
    Pipeline("hunyuan_image_21 distilled", diffusers.HunyuanImagePipeline, _hunyuan_image),
    Pipeline("hidream_i1", diffusers.HiDreamImagePipeline, _hidream),
)  # fmt: skip


class Enough(Exception):
    """All steps were seen."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a pipeline's scheduler is handed."""

    answer: Tensor
    timestep: float
    latent: Tensor


def steps_of(pipeline: Pipeline, case: Case, module: Any, told: Mapping[str, Tensor]) -> list[Step]:
    """Every step of an image that `pipeline` makes."""
    scheduler: Any = (
        diffusers.FlowMatchEulerDiscreteScheduler() if pipeline.flow else diffusers.DDIMScheduler(steps_offset=1)
    )
    needed = inspect.signature(pipeline.cls.__init__).parameters.values()
    parts = {part.name: None for part in needed if part.default is inspect.Parameter.empty and part.name != "self"}
    pipe = pipeline.cls(**{**parts, "transformer": module, "scheduler": scheduler, **pipeline.more})
    pipe.set_progress_bar_config(disable=True)
    steps: list[Step] = []
    step = scheduler.step

    def watched(answer: Tensor, timestep: Tensor, latent: Tensor, **rest: Any) -> Any:
        steps.append(Step(answer.clone(), float(timestep), latent.clone()))
        if len(steps) == STEPS:
            raise Enough  # some pipelines ask their VAE afterwards
        return step(answer, timestep, latent, **rest)

    scheduler.step = watched
    _, height, width = case.latent
    takes_sigmas = "sigmas" in inspect.signature(pipeline.cls.__call__).parameters
    arguments = {"sigmas": FLOW_SIGMAS} if pipeline.flow and takes_sigmas else {}
    with contextlib.suppress(Enough):
        pipe(
            height=height * pipeline.cell, width=width * pipeline.cell, num_inference_steps=STEPS, output_type="latent",
            generator=torch.Generator().manual_seed(3), **arguments, **pipeline.given(told),
        )  # fmt: skip
    return steps


# a pipeline hands its scheduler a tensor where numpy wants an array
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline.name)
def test_a_call_is_what_the_pipeline_does(pipeline: Pipeline) -> None:
    case = CASES[pipeline.name]
    module = case.module()
    _, told = case.inputs()
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in case.file(module).items()})
    with torch.no_grad(), quiet_libraries():
        steps = steps_of(pipeline, case, module, told)
        assert len(steps) == STEPS
        for number, step in enumerate(steps):
            if "next_level" in told:
                told["next_level"] = torch.full((2,), [*(each.timestep for each in steps), 0.0][number + 1] / 1000)
            x = pipeline.latent(step.latent, case)
            level = torch.full((x.shape[0],), step.timestep / (1000 if pipeline.flow else 1))
            given = plan.call(module, x, level, told)
            assert torch.equal(given, pipeline.latent(step.answer, case)[:, : x.shape[1]])


def arguments_of(case: Case, told: Mapping[str, Tensor], x: Tensor, level: Tensor) -> dict[str, Any]:
    """What our call hands the module of `case`."""
    module = case.module()
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in case.file(module).items()})
    seen: dict[str, Any] = {}
    forward = module.forward

    def watched(**given: Any) -> Any:
        seen.update(given)
        return forward(**given)

    module.forward = watched
    with torch.no_grad(), quiet_libraries():
        assert plan.call(module, x, level, told).shape == x.shape
    return seen


@pytest.mark.parametrize("name", ["flux_control", "flux_fill"])
def test_a_control_image_stands_beside_the_latent_in_each_patch(name: str) -> None:
    """As `FluxControlPipeline` joins the rows of both, and `FluxFillPipeline` those of latent, image and mask."""
    case = CASES[name]
    x, told = case.inputs()
    seen = arguments_of(case, told, x, torch.tensor([0.5, 0.25]))
    parts = (x, *told["image"].split([16, 64] if name == "flux_fill" else [16], dim=1))
    rows = [diffusers.FluxControlPipeline._pack_latents(part, *part.shape) for part in parts]
    assert torch.equal(seen["hidden_states"], torch.cat(rows, dim=2))


def test_a_image_to_work_from_follows_the_latent_with_positions_of_its_own() -> None:
    """As `FluxKontextPipeline` and `Flux2Pipeline` have it; the answer to it is left out."""
    case = CASES["flux_dev"]
    x, told = case.inputs()
    reference = torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(1))
    seen = arguments_of(case, told | {"reference": reference}, x, torch.tensor([0.5, 0.25]))
    rows = [diffusers.FluxKontextPipeline._pack_latents(part, *part.shape) for part in (x, reference)]
    assert torch.equal(seen["hidden_states"], torch.cat(rows, dim=1))
    ids = [
        diffusers.FluxKontextPipeline._prepare_latent_image_ids(
            2, part.shape[2] // 2, part.shape[3] // 2, part.device, part.dtype
        )
        for part in (x, reference)
    ]
    ids[1][..., 0] = 1
    assert torch.equal(seen["img_ids"], torch.cat(ids))

    case = CASES["flux2"]
    x, told = case.inputs()
    reference = torch.randn(2, 8, 3, 2, generator=torch.Generator().manual_seed(1))
    seen = arguments_of(case, told | {"reference": reference}, x, torch.tensor([0.5, 0.25]))
    rows = [diffusers.Flux2Pipeline._pack_latents(part) for part in (x, reference)]
    assert torch.equal(seen["hidden_states"], torch.cat(rows, dim=1))
    own = diffusers.Flux2Pipeline._prepare_latent_ids(x)[0]
    other = diffusers.Flux2Pipeline._prepare_image_ids([reference[:1]])[0]
    assert torch.equal(seen["img_ids"], torch.cat((own, other)).float())


def test_a_image_to_edit_follows_the_latent_of_qwen_image() -> None:
    """As `QwenImageEditPipeline` has it; a latent with one frame is taken as an image."""
    case = CASES["qwen_image"]
    x, told = case.inputs()
    reference = torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(1))
    seen = arguments_of(case, told | {"reference": reference}, x, torch.tensor([0.5, 0.25]))
    rows = [diffusers.QwenImageEditPipeline._pack_latents(part, *part.shape) for part in (x, reference)]
    assert torch.equal(seen["hidden_states"], torch.cat(rows, dim=1))
    assert seen["img_shapes"] == [[(1, 4, 3), (1, 3, 2)]] * 2
    framed = arguments_of(case, told | {"reference": reference[:, :, None]}, x[:, :, None], torch.tensor([0.5, 0.25]))
    assert torch.equal(framed["hidden_states"], seen["hidden_states"])


def test_sizes_that_nobody_tells_are_those_of_the_latent() -> None:
    case = CASES["pixart_alpha"]
    x, told = case.inputs()
    seen = arguments_of(case, told, x, torch.tensor([500.0, 250.0]))
    del told["size"]
    alone = arguments_of(case, told, x, torch.tensor([500.0, 250.0]))
    for name, value in seen["added_cond_kwargs"].items():
        assert torch.equal(alone["added_cond_kwargs"][name], value)
    assert alone["added_cond_kwargs"]["resolution"].tolist() == [[64.0, 48.0]] * 2


def test_layers_stand_one_after_the_other_before_the_image_that_is_taken_apart() -> None:
    """As `QwenImageLayeredPipeline` has it."""
    case = CASES["qwen_image_layered"]
    x, told = case.inputs()
    seen = arguments_of(case, told, x, torch.tensor([0.5, 0.25]))
    layers = diffusers.QwenImageLayeredPipeline._pack_latents(x.transpose(1, 2).contiguous(), 2, 4, 8, 6, 3)
    image = diffusers.QwenImageLayeredPipeline._pack_latents(told["reference"][:, None], 2, 4, 6, 4, 1)
    assert torch.equal(seen["hidden_states"], torch.cat((layers, image), dim=1))
    assert seen["img_shapes"] == [[(1, 4, 3), (1, 4, 3), (1, 4, 3), (1, 3, 2)]] * 2
    assert seen["additional_t_cond"].tolist() == [0, 0]


def test_layers_come_back_as_they_went_in() -> None:
    """The pipeline unpacks what the model answers; a model that answers with its own rows shows the order."""
    case = CASES["qwen_image_layered"]
    x, told = case.inputs()
    module = case.module()
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in case.file(module).items()})
    module.forward = lambda **given: (given["hidden_states"],)
    assert torch.equal(plan.call(module, x, torch.tensor([0.5, 0.25]), told), x)


#: those that read images, and no more channels than they give
ECHOING = [name for name, case in CASES.items() if len(case.latent) == 3 and "image" not in case.told]


@pytest.mark.parametrize("name", ECHOING)
def test_a_model_that_answers_with_what_it_is_asked_gives_the_latent_back(name: str) -> None:
    """Patches go back to where they came from: no size of the latent is taken for another."""
    case = CASES[name]
    x, told = case.inputs()
    module = case.module()
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in case.file(module).items()})

    def echo(*given: Any, **named: Any) -> tuple[Any]:
        return (given[0] if given else named["hidden_states"],)

    module.forward = echo
    answer = plan.call(module, x, torch.tensor([0.5, 0.25]), told)
    assert torch.equal(answer.abs(), x.abs())
    assert torch.equal(answer, -x) == name.startswith(("lumina2", "z_image", "hidream"))
