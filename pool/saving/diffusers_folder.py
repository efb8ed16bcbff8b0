"""`save_diffusers`: a model with its patches as a folder that pipelines of diffusers load.

The parameters of our modules are those of diffusers and transformers, so that they are written under their own names,
one at a time. Text encoders are written as pipelines read them: layers that the family leaves out below a final norm
are not there, and text models have the level of names that published folders have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DDPMScheduler, DDPMWuerstchenScheduler, EDMEulerScheduler, EulerDiscreteScheduler
from torch import nn
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
)

from pool.checkpoints.build import Checkpoint
from pool.checkpoints.cascades import with_text_encoder
from pool.checkpoints.component_plans import plan_component
from pool.checkpoints.describe import native_size
from pool.checkpoints.families import Architecture, TextFacts
from pool.checkpoints.modules import empty_module, said_module
from pool.errors import OutputFailed
from pool.open_model import OpenModel
from pool.patches.patch_set import PatchSet
from pool.saving.checkpoint_file import Progress, Saved, counting, patched_model
from pool.saving.component_weights import ComponentWeights
from pool.saving.facts import with_facts
from pool.saving.pipelines import INDEX_FILE, PipelineFacts, noisy_scheduler_facts, pipeline_facts, scheduler_facts
from pool.saving.single_file import refuse_blocks
from pool.saving.stream_writer import TensorToWrite, write_safetensors
from pool.saving.tensor_bytes import made
from pool.saving.tokenizer_files import write_clip_tokenizer
from pool.saving.whole_file import expect_free, whole_folder
from pool.spec import Role
from pool.work import LoraRef

#: the names that diffusers and transformers look for
_WEIGHTS, _TEXT_WEIGHTS = "diffusion_pytorch_model.safetensors", "model.safetensors"
_TEXT_LEVEL = "text_model."
_SCHEDULERS = {
    kind.__name__: kind for kind in (EulerDiscreteScheduler, EDMEulerScheduler, DDPMScheduler, DDPMWuerstchenScheduler)
}
#: components whose plans are the whole of their configuration
_PLANNED = (Architecture.DIFFUSION_TRANSFORMER, Architecture.TEXT_MODEL, Architecture.VISION_MODEL)
#: the VAE of Stable Cascade, whose scale has a name of its own
_CASCADE_VAE = "cascade_a"


@dataclass(frozen=True, slots=True)
class _Part:
    """One component's folder.

    module   without weights, as the folder's configuration says it
    tensors  of its file of weights
    """

    folder: str
    module: nn.Module
    tensors: tuple[TensorToWrite, ...]
    dtype: torch.dtype


def save_diffusers(
    model: OpenModel | Checkpoint,
    path: Path,
    *,
    loras: Sequence[LoraRef] = (),
    patches: Mapping[Role, PatchSet] | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Saved:
    """Write `model` to the folder `path` as a pipeline of diffusers, `loras` merged and then `patches`, in order.

    Weights are computed as `pool.saving.checkpoint_file.save_checkpoint` does, and have the types of the file, or
    `dtype`; quantized ones become plain. The folder is there whole or not at all; with `overwrite` a pipeline that is
    there is replaced, another folder is not. Raises as `save_checkpoint` does, and UnknownArchitecture for a family
    without a pipeline.
    """
    expect_free(path, overwrite)
    found = patched_model(model, loras, patches)
    refuse_blocks(found.checkpoint, dtype)
    family = found.checkpoint.family
    checkpoint = replace(found.checkpoint, family=with_text_encoder(family, found.checkpoint.shapes))
    facts, schedulers = pipeline_facts(checkpoint.family), {"scheduler": scheduler_facts(checkpoint.family)}
    if facts.noisy:
        schedulers[facts.noisy] = noisy_scheduler_facts(checkpoint.family)
    parts = [
        _part(checkpoint, role, facts, found.patches.get(role, PatchSet()), dtype)
        for role in checkpoint.family.prefixes
    ]
    said = with_facts({"format": "pt"}, found.source, found.merged, dtype is not None, metadata)
    on_bytes = counting([tensor for part in parts for tensor in part.tensors], progress)
    with whole_folder(path, overwrite=overwrite, is_ours=INDEX_FILE) as folder:
        for part in parts:
            _write_module(folder / part.folder, part)
            name = _TEXT_WEIGHTS if isinstance(part.module, PreTrainedModel) else _WEIGHTS
            try:
                write_safetensors(folder / part.folder / name, part.tensors, said, on_bytes=on_bytes)
            except OutputFailed as error:  # of a folder that nobody will find
                raise OutputFailed(str(error).replace(str(folder), str(path))) from error
        for role, text in checkpoint.family.texts.items():
            write_clip_tokenizer(folder / facts.tokenizer_folder(role), text.pad_id)
        if facts.processor:
            _write_processor(folder / facts.processor, parts)
        for place, said_of_it in schedulers.items():
            _SCHEDULERS[said_of_it.name](**said_of_it.settings).save_config(folder / place)
        named = {place: ("diffusers", said_of_it.name) for place, said_of_it in schedulers.items()}
        index = {**_index(checkpoint, facts, parts), **named}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        file_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Saved(path, file_bytes, sum(len(part.tensors) for part in parts), found.patched)


def _part(
    checkpoint: Checkpoint, role: Role, facts: PipelineFacts, patches: PatchSet, dtype: torch.dtype | None
) -> _Part:
    weights = ComponentWeights(checkpoint, role, patches)
    module = _module(checkpoint, role)
    level = _TEXT_LEVEL if _is_text(module) else ""
    wanted = {_published_name(level, name): tuple(each.shape) for name, each in module.named_parameters()}
    tensors, dtypes = [], {}
    for name in weights.shapes:
        saved_as = _published_name(level, name)
        if saved_as in wanted:
            own = dtypes[saved_as] = dtype or weights.dtype(name)
            assert wanted[saved_as] == weights.shapes[name], f"{name}: {weights.shapes[name]}, {wanted[saved_as]}"
            tensors.append(made(saved_as, own, wanted[saved_as], partial(weights.parameter, name, own)))
    assert dtypes.keys() == wanted.keys(), f"{facts.folders[role]}: {sorted(wanted.keys() - dtypes.keys())} are missing"
    for name, value in weights.statistics().items():
        tensors.append(made(name, value.dtype, tuple(value.shape), value.detach))
    kinds = list(dtypes.values())
    return _Part(facts.folders[role], module, tuple(tensors), max(set(kinds), key=kinds.count))


def _published_name(level: str, name: str) -> str:
    """The name of a parameter in published folders: all of a text model but its projection is one level down."""
    return name if not level or name.startswith(("text_projection.", level)) else level + name


def _is_text(module: nn.Module) -> bool:
    return isinstance(module, (CLIPTextModel, CLIPTextModelWithProjection))


def _module(checkpoint: Checkpoint, role: Role) -> nn.Module:
    """The module that the folder's configuration is to build, on the meta device."""
    family = checkpoint.family
    architecture = family.architectures[role]
    pixels = max(native_size(family, checkpoint.header))
    latent = checkpoint.latent
    if role is Role.VAE:
        means = {"latents_mean": latent.means, "latents_std": latent.deviations} if latent.means else {}
        plan = checkpoint.vae_plan()
        if plan.facts.name == _CASCADE_VAE:
            return plan.empty({"scale_factor": 1.0 / latent.scaling_factor})
        return plan.empty({"scaling_factor": latent.scaling_factor, "sample_size": pixels, **means})
    if architecture in _PLANNED:
        shapes = family.shapes_of(role, checkpoint.shapes)
        built: Any = plan_component(family, role, shapes, family.configs.get(role)).module
        if architecture is Architecture.DIFFUSION_TRANSFORMER:
            film = family.sampling.film
            said = {"sample_size": pixels // latent.downscale, "num_frames": None if film is None else film.frames}
            built.register_to_config(**{key: value for key, value in said.items() if value and key in built.config})
        return built  # type: ignore[no-any-return] # diffusers is not typed
    config = checkpoint.config(role)
    if role in family.texts:
        return _text_module(config, family.texts[role])
    build = said_module if role in family.configs else empty_module
    return build(architecture, {**config, "sample_size": pixels // latent.downscale})


def _text_module(config: Mapping[str, Any], text: TextFacts) -> nn.Module:
    """A text encoder as pipelines read it: they give the last layer's output through the final norm, or that of a layer
    before the last without it."""
    layers = config["num_hidden_layers"] - (text.layers_left_out if text.final_norm else 0)
    kind = CLIPTextModelWithProjection if text.gives_pooled else CLIPTextModel
    with torch.device("meta"):
        module: nn.Module = kind(CLIPTextConfig(**{**config, "num_hidden_layers": layers}))
    return module


def _write_module(folder: Path, part: _Part) -> None:
    """The configuration of a component."""
    folder.mkdir()
    module: Any = part.module
    if isinstance(module, PreTrainedModel):
        module.config.architectures = [type(module).__name__]
        module.config.dtype = part.dtype
        module.config.save_pretrained(folder)
    else:
        module.save_config(folder)


def _write_processor(folder: Path, parts: Sequence[_Part]) -> None:
    """How pictures are brought into the form that the vision encoder is shown."""
    config: Any = next(part.module.config for part in parts if hasattr(part.module.config, "image_size"))
    side = config.image_size
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}).save_pretrained(
        folder
    )


def _index(checkpoint: Checkpoint, facts: PipelineFacts, parts: Sequence[_Part]) -> dict[str, Any]:
    classes = {
        p.folder: (
            "transformers" if isinstance(p.module, PreTrainedModel) else facts.libraries.get(p.folder, "diffusers"),
            type(p.module).__name__,
        )
        for p in parts
    }
    if facts.processor:
        classes[facts.processor] = ("transformers", "CLIPImageProcessor")
    tokenizers = {facts.tokenizer_folder(role): ("transformers", "CLIPTokenizer") for role in checkpoint.family.texts}
    return {
        "_class_name": facts.name,
        "_diffusers_version": diffusers.__version__,
        **facts.entries,
        **classes,
        **tokenizers,
    }
