"""The components of a checkpoint as folders of diffusers have them: a class, its configuration, and tensors under the
names of that class.

The parameters of our modules are those of diffusers and transformers, so that they are written under their own names,
one at a time. Text encoders are written as pipelines read them: layers that the family leaves out below a final norm
are not there, nor a projection that the pipeline does not read, and CLIP's have the level of names that published
folders have. What no class of theirs could load is a `Lack`. Plans only: bytes are made when a file is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from torch import nn
from transformers import (
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
)

from modelpool.pool.core.family_facts import TextFacts
from modelpool.pool.families.family import Architecture
from modelpool.pool.formats.folder_header import PROJECTION
from modelpool.pool.formats.safetensors_writer import TensorToWrite
from modelpool.pool.loading.build_checkpoint import Checkpoint
from modelpool.pool.loading.describe import native_size
from modelpool.pool.loading.open_tokenizer import reading_of_role
from modelpool.pool.mapping.tensor_bytes import carried, cast, made
from modelpool.pool.models.common.module_classes import empty_module, said_module
from modelpool.pool.models.component_plans import plan_component
from modelpool.pool.models.diffusion.audio_seconds import SECONDS
from modelpool.pool.models.diffusion.build import plan_diffusion_model
from modelpool.pool.models.vae.build import MissingHalf
from modelpool.pool.ops.dtypes import TORCH_DTYPES
from modelpool.pool.patches.patch_set import PatchSet
from modelpool.pool.saving.component_weights import ComponentWeights
from modelpool.pool.saving.llava_folder import is_llava, llava, llava_names, llava_tensors
from modelpool.pool.saving.pipeline_form import PipelineFacts
from modelpool.pool.saving.transformer_pipelines import transformer_pipeline
from modelpool.pool.specs.spec import Role
from modelpool.pool.text.reading import Pooled, Reading

#: the level of names that CLIP's text models have in published folders
_TEXT_LEVEL = "text_model."
#: of a BERT, read by no model here
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")
#: components whose plans are the whole of their configuration
_PLANNED = (Architecture.DIFFUSION_TRANSFORMER, Architecture.TEXT_MODEL, Architecture.VISION_MODEL)
_TRANSFORMERS = (Architecture.DIFFUSION_TRANSFORMER, Architecture.AUDIO_TRANSFORMER)
#: what no tensor tells and a class has another default for: the size of the images that its pipeline makes unasked.
#: Source: HunyuanDiTPipeline of diffusers, which takes this where it has no model
_UNASKED: Mapping[str, Mapping[str, Any]] = {"HunyuanDiT2DModel": {"sample_size": 128}}
#: the VAE of Stable Cascade, whose scale has a name of its own
_CASCADE_VAE = "cascade_a"
#: the family whose pipelines have the VAE of Wan 2.1 as a class of their own
_WITH_QWEN_VAE = "qwen_image"


@dataclass(frozen=True, slots=True)
class FolderPart:
    """One component's folder.

    role     the component
    module   without weights, as the folder's configuration says it
    tensors  of its file of weights
    dtype    that most of them have
    config   what config.json says, where the module does not know it; None where it does
    """

    role: Role
    folder: str
    module: nn.Module
    tensors: tuple[TensorToWrite, ...]
    dtype: torch.dtype
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Lack:
    """A component that a pipeline reads and its folder has not, and why, in words."""

    folder: str
    why: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.why}"


def parts_of(
    checkpoint: Checkpoint,
    role: Role,
    facts: PipelineFacts,
    patches: Mapping[Role, PatchSet],
    dtype: torch.dtype | None,
) -> Iterator[FolderPart | Lack]:
    """The folders of the component `role` with `patches`, in `dtype` (its own types when None), or why there is none.
    The part of a text encoder that sees images is in the folder of that.

    Raises PatchFailed for a patch that fits no parameter, and UnknownArchitecture.
    """
    architectures = checkpoint.family.architectures
    if architectures[role] is Architecture.TEXT_VISION or (role is Role.VISION_ENCODER and _is_beside(checkpoint)):
        return
    folder, module = facts.folders[role], _module(checkpoint, role)
    why = _unloadable(module, reading_of_role(checkpoint, role) if role.is_text_encoder else None)
    if why:
        yield Lack(folder, why)
        return
    weights = ComponentWeights(checkpoint, role, patches.get(role, PatchSet()))
    config = _model_config(checkpoint, role) if _has_own_config(checkpoint, role) else None
    if architectures[role] is Architecture.AUDIO_TRANSFORMER:
        seconds = module.get_submodule(SECONDS)
        delattr(module, SECONDS)
        names = {name: name.removeprefix(f"{SECONDS}.") for name in weights.shapes if name.startswith(f"{SECONDS}.")}
        yield _part(role, PROJECTION, seconds, _tensors(weights, names, dtype))
        yield _part(role, folder, module, _tensors(weights, _same(weights.shapes.keys() - names), dtype), config)
    elif _sees_by_itself(checkpoint, role):
        sight = ComponentWeights(checkpoint, Role.VISION_ENCODER, patches.get(Role.VISION_ENCODER, PatchSet()))
        yield _part(role, folder, llava(module, sight.built.module), llava_tensors(weights, sight, dtype))
    elif role is Role.TEXT_ENCODER and architectures.get(Role.VISION_ENCODER) is Architecture.TEXT_VISION:
        sight = ComponentWeights(checkpoint, Role.VISION_ENCODER, patches.get(Role.VISION_ENCODER, PatchSet()))
        own = {name: f"language_model.{name}" for name in weights.shapes}
        seen = {name: f"visual.{name}" for name in sight.shapes}
        tensors = (*_tensors(weights, own, dtype), *_tensors(sight, seen, dtype))
        yield _part(role, folder, _seeing(module, sight.built.module), tensors)
    else:
        names = {name: _published_name(module, name) for name in weights.shapes}
        tensors = (*_tensors(weights, names, dtype), *_beside(checkpoint, weights, dtype))
        yield _part(role, folder, module, tensors, config)


def _is_beside(checkpoint: Checkpoint) -> bool:
    """Whether the vision encoder stands beside a text encoder, which is shown images by it, in one folder."""
    sight = checkpoint.family.sampling.sight
    return sight is not None and not sight.is_told


def _sees_by_itself(checkpoint: Checkpoint, role: Role) -> bool:
    """Whether the text encoder `role` is a LLaVA's language part, whose other part is there."""
    reading = reading_of_role(checkpoint, role) if role.is_text_encoder else None
    return reading is not None and reading.sees and Role.VISION_ENCODER in checkpoint.family.prefixes


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _tensors(weights: ComponentWeights, names: Mapping[str, str], dtype: torch.dtype | None) -> Iterator[TensorToWrite]:
    """The parameters of a component that `names` has, each called as there."""
    for name, shape in weights.shapes.items():
        if name in names:
            own = dtype or weights.dtype(name)
            yield made(names[name], own, shape, partial(weights.parameter, name, own))


def _beside(checkpoint: Checkpoint, weights: ComponentWeights, dtype: torch.dtype | None) -> Iterator[TensorToWrite]:
    """What the class has beside our parameters: what norms have counted; and of a BERT a part that no model reads."""
    for name, value in weights.statistics().items():
        yield made(name, value.dtype, tuple(value.shape), value.detach)
    for key in weights.key_map.unused:
        if isinstance(weights.built.module, BertModel) and key.endswith(_POOLER):
            name = key[key.index(_POOLER[0].split(".")[0]) :]
            whole = carried(checkpoint.mapped, key) if dtype is None else cast(checkpoint.mapped, key, dtype)
            yield replace(whole, name=name)


def _part(
    role: Role,
    folder: str,
    module: nn.Module,
    tensors: Iterable[TensorToWrite],
    config: Mapping[str, Any] | None = None,
) -> FolderPart:
    """`module` is what is written; of `tensors` are those written that it has, or that are no parameters."""
    said = {} if is_llava(module) else {name: _published_name(module, name) for name, _ in module.named_parameters()}
    said = said or llava_names(module)
    wanted = {said[name]: tuple(each.shape) for name, each in module.named_parameters() if name in said}
    kept = tuple(tensor for tensor in tensors if tensor.name in wanted or not _is_text(module))
    found = {tensor.name: tensor for tensor in kept}
    missing = sorted(name for name in wanted if name not in found)
    assert not missing, f"{folder}: {missing} are missing"
    for name in wanted.keys() & found:
        assert found[name].shape == wanted[name], f"{folder}: {name}: {found[name].shape}, {wanted[name]}"
    kinds = [TORCH_DTYPES[found[name].dtype] for name in wanted if name in found]
    return FolderPart(role, folder, module, kept, max(set(kinds), key=kinds.count), config)


def _published_name(module: nn.Module, name: str) -> str:
    """The name of a parameter in published folders: all of a text model but its projection is one level down."""
    return name if not _is_text(module) or name.startswith(("text_projection.", _TEXT_LEVEL)) else _TEXT_LEVEL + name


def _is_text(module: nn.Module) -> bool:
    return isinstance(module, (CLIPTextModel, CLIPTextModelWithProjection))


def _unloadable(module: nn.Module, reading: Reading | None) -> str:
    """Why no class of diffusers or transformers could load what is written of `module`; empty where one can."""
    if any(isinstance(part, MissingHalf) for part in module.children()):
        return "the file has one half of it alone, and pipelines read both"
    if isinstance(getattr(module, "norm", None), nn.Identity):
        return "the file has its first layers alone, without the norm that follows the last one"
    if reading is not None and reading.pooled is Pooled.PROJECTED and isinstance(module, CLIPTextModel):
        return "the file has it without the projection that pipelines read"
    return ""


def _module(checkpoint: Checkpoint, role: Role) -> nn.Module:
    """The module that the folder's configuration is to build, on the meta device."""
    family = checkpoint.family
    architecture = family.architectures[role]
    if role is Role.VAE:
        return _vae(checkpoint)
    if architecture in (*_PLANNED, Architecture.AUDIO_TRANSFORMER):
        shapes = family.shapes_of(role, checkpoint.shapes)
        built = plan_component(family, role, shapes, family.configs.get(role)).module
        if _is_text(built):
            return _clip(built, reading_of_role(checkpoint, role))
        if architecture is Architecture.DIFFUSION_TRANSFORMER and not _has_own_config(checkpoint, role):
            video = family.sampling.video
            cells = max(native_size(family, checkpoint.header)) // checkpoint.latent.downscale
            _configure(built, {"sample_size": cells, "num_frames": None if video is None else video.frames})
        return built
    config = checkpoint.config(role)
    if role in family.texts:
        return _text_module(config, family.texts[role])
    build = said_module if role in family.configs else empty_module
    cells = max(native_size(family, checkpoint.header)) // checkpoint.latent.downscale
    return build(architecture, {**config, "sample_size": cells})


def _vae(checkpoint: Checkpoint) -> nn.Module:
    latent, plan = checkpoint.latent, checkpoint.vae_plan()
    if plan.facts.name == _CASCADE_VAE:
        return plan.empty({"scale_factor": 1.0 / latent.scaling_factor})
    module = plan.empty()
    if checkpoint.family.name == _WITH_QWEN_VAE and _is_qwen_vae(module):
        module = _qwen_vae(module)
    said = {
        "scaling_factor": latent.scaling_factor,
        "shift_factor": latent.shift,
        "sample_size": max(native_size(checkpoint.family, checkpoint.header)),
        "latents_mean": latent.means,
        "latents_std": latent.deviations,
    }
    _configure(module, said)
    return module


def _configure(module: Any, said: Mapping[str, Any]) -> None:
    """Have a module of diffusers say in its configuration what of this says something and is known to its class."""
    module.register_to_config(**{key: value for key, value in said.items() if value and key in module.config})


def _is_qwen_vae(module: Any) -> bool:
    """Whether a VAE of Wan is one that Qwen-Image's class can be: its halves are as wide as each other."""
    config: Any = module.config
    return (
        type(module) is AutoencoderKLWan
        and config.decoder_base_dim in (None, config.base_dim)
        and config.in_channels == config.out_channels
        and not (config.is_residual or config.patch_size)
    )


def _qwen_vae(module: Any) -> nn.Module:
    """The VAE of Qwen-Image with the parameters of `module`, which have the same names in both."""
    known = inspect.signature(AutoencoderKLQwenImage.__init__).parameters
    config = {key: value for key, value in module.config.items() if key in known}
    with torch.device("meta"):
        made: nn.Module = AutoencoderKLQwenImage(**config, input_channels=module.config.in_channels)
    return made


def _has_own_config(checkpoint: Checkpoint, role: Role) -> bool:
    """Whether the plan of the component says its configuration: of families that run on transformers. Their classes
    reckon with sizes of images, which are left as the plan has them."""
    return (
        checkpoint.family.architectures[role] in _TRANSFORMERS and transformer_pipeline(checkpoint.family) is not None
    )


def _model_config(checkpoint: Checkpoint, role: Role) -> dict[str, Any]:
    """The configuration of diffusers' class of a diffusion model. Our module may be another, which is built with
    arguments that diffusers' own is not."""
    family = checkpoint.family
    shapes = family.shapes_of(role, checkpoint.shapes)
    plan = plan_diffusion_model(shapes, family.prefixes[role], config=family.configs.get(role))
    name = plan.architecture.module.__name__
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    # what diffusers' own class has no word for is said where it is so, for those that know it
    given = {key: value for key, value in plan.config.items() if key in defaults or value}
    return {
        "_class_name": name,
        "_diffusers_version": diffusers.__version__,
        **defaults,
        **_UNASKED.get(name, {}),
        **given,
    }


def _clip(planned: nn.Module, reading: Reading | None) -> nn.Module:
    """CLIP's text model as pipelines read it: without a projection where they read the pooled text without one."""
    if reading is None or reading.pooled is not Pooled.PLAIN or isinstance(planned, CLIPTextModel):
        return planned
    config: Any = planned.config
    with torch.device("meta"):
        module: nn.Module = CLIPTextModel(config)
    return module


def _seeing(text: Any, sight: Any) -> nn.Module:
    """A text encoder and the part of it that sees images as the one class of both. Its three axes of positions share
    a head as in the published one, which matters where there is an image alone."""
    half = text.config.hidden_size // text.config.num_attention_heads // 2
    first = half // 4
    sections = [first, (half - first) // 2, half - first - (half - first) // 2]
    positions = {**text.config.rope_parameters, "mrope_section": sections}
    own = {**text.config.to_dict(), "rope_parameters": positions}
    own.pop("model_type")
    with torch.device("meta"):
        config = Qwen2_5_VLConfig(text_config=own, vision_config=sight.config.to_dict())
        module: nn.Module = Qwen2_5_VLModel(config)
    return module


def _text_module(config: Mapping[str, Any], text: TextFacts) -> nn.Module:
    """A text encoder as pipelines read it: they give the last layer's output through the final norm, or that of a layer
    before the last without it."""
    layers = config["num_hidden_layers"] - (text.layers_left_out if text.final_norm else 0)
    kind = CLIPTextModelWithProjection if text.gives_pooled else CLIPTextModel
    with torch.device("meta"):
        module: nn.Module = kind(CLIPTextConfig(**{**config, "num_hidden_layers": layers}))
    return module
