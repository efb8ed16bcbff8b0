"""Plans the components of a checkpoint as diffusers folders: a class, its configuration, and tensors under its names.

Our modules have the parameters of diffusers and transformers, so they are written under the same names, one at
a time. Text encoders are written as pipelines read them: without layers that the family leaves out below a final norm,
without a projection that the pipeline does not read, and CLIP's with the name level of published folders. A part that
no class could load is a `MissingPart`. Plans only: bytes are computed when a file is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLFlux2, AutoencoderKLWan
from diffusers.pipelines.stable_diffusion import StableUnCLIPImageNormalizer
from torch import Tensor, nn
from transformers import (
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLVisionModel,
)

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.inner_models import COMPANION, INNER_FOLDERS, SILENCE
from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.families.parts.pipeline_form import PipelineFacts
from modelpool.pool.families.parts.text_reading import Pooled, Reading
from modelpool.pool.families.unet_families import labels_width
from modelpool.pool.files.formats.folder_header import (
    AUDIO_FOLDERS,
    NORMALIZER,
)
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.models.components.common.module_classes import empty_module, module_from_config
from modelpool.pool.models.components.component_plans import plan_component
from modelpool.pool.models.components.diffusion.audio_seconds import StableAudio3DurationEmbedder
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.components.text.text_encoder_classes import GlmImageWriter
from modelpool.pool.models.components.vae.audio_decoders import SOUND, sound_of
from modelpool.pool.models.components.vae.build_vae import MissingHalf
from modelpool.pool.models.components.vae.codec import statistics_in_folder
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.loading.describe import native_size
from modelpool.pool.models.loading.open_tokenizer import reading_of_role, tokenizer_of
from modelpool.pool.models.saving.component_weights import ComponentWeights
from modelpool.pool.models.saving.glm_image_folder import glm_image
from modelpool.pool.models.saving.llava_folder import is_llava, llava, llava_names, llava_tensors
from modelpool.pool.models.saving.transformer_pipelines import transformer_pipeline
from modelpool.pool.models.text.text_tokenizer import TextTokenizer, TokenizerMissing
from modelpool.pool.values.core.family_facts import TextFacts
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.dtypes import TORCH_DTYPES
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.tensor_bytes import cast_tensor, computed_tensor, copied_tensor

#: the name level of CLIP's text models in published folders
_TEXT_LEVEL = "text_model."
#: keys of a BERT that no supported model reads
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")
#: components with their complete configuration in their plans
_PLANNED = (
    *(Architecture.DIFFUSION_TRANSFORMER, Architecture.TEXT_MODEL, Architecture.TEXT_CONNECTOR),
    Architecture.VISION_MODEL,
)
_TRANSFORMERS = (Architecture.DIFFUSION_TRANSFORMER, Architecture.AUDIO_TRANSFORMER)
#: settings of diffusion models that no tensor determines, with another default in the class
_CONFIG_ENTRIES = {
    family.name: family.folder.config_entries for family in defined_families() if family.folder.config_entries
}
#: the VAE of Stable Cascade, with a different name for its scale
_CASCADE_VAE = "cascade_a"
#: beginning of the names of the audio decoder in the module of a VAE
_OF_SOUND = f"{SOUND}."
#: arguments that tell of inner models
_OF_WHOLE = frozenset({"has_unconditional"})
#: class of the VAE of Wan 2.1 in the pipelines of some families
_VAE_CLASSES = {family.name: family.folder.vae_class for family in defined_families() if family.folder.vae_class}
#: the text encoder that has a vision part
_VISION_ROLES = {
    family.name: family.text.vision.role for family in defined_families() if family.text.vision is not None
}
#: settings of its configuration that only the pipeline of a family reads
_VAE_ENTRIES = {family.name: family.folder.vae_entries for family in defined_families() if family.folder.vae_entries}


@dataclass(frozen=True, slots=True)
class FolderPart:
    """One component's folder.

    role     the component
    module   without weights, built from the folder's configuration
    tensors  of its weights file
    dtype    of most of them
    config   contents of config.json, if the module does not know it; else None
    """

    role: Role
    folder: str
    module: nn.Module
    tensors: tuple[TensorToWrite, ...]
    dtype: torch.dtype
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A component that a pipeline reads and its folder lacks, and the reason as text."""

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
) -> Iterator[FolderPart | MissingPart]:
    """Yield the folders of the component `role` with `patches`, in `dtype` (None: the dtypes of the file), or why there
    is none. The vision part of a text encoder is in the text encoder's folder, and a text encoder that is a part of the
    diffusion model in that model's.

    Raises PatchFailed for a patch that fits no parameter, and UnknownArchitecture.
    """
    architectures = checkpoint.family.architectures
    if role in checkpoint.family.inside:
        return
    if architectures[role] is Architecture.TEXT_VISION or (
        role is Role.VISION_ENCODER and _is_vision_in_text_folder(checkpoint)
    ):
        return
    folder, module = facts.folders[role], _module(checkpoint, role)
    if role is Role.VAE:
        yield from _sound_parts(checkpoint, patches.get(role, PatchSet()), dtype)
    why = _unloadable(module, reading_of_role(checkpoint, role) if role.is_text_encoder else None)
    if isinstance(module, GlmImageWriter) and Role.VISION_ENCODER not in checkpoint.family.prefixes:
        why = "the file lacks its vision part (tensors visual.* and vqmodel.*), which its class has"
    if why:
        yield MissingPart(folder, why)
        return
    weights = ComponentWeights(checkpoint, role, patches.get(role, PatchSet()))
    config = _model_config(checkpoint, role) if _has_own_config(checkpoint, role) else None
    apart = next((name for name in INNER_FOLDERS if name in dict(module.named_children())), "")
    if role is Role.DIFFUSION_MODEL and apart:
        yield from _with_part_apart(module, apart, folder, weights, dtype, config)
    elif _is_llava_text(checkpoint, role):
        vision = ComponentWeights(checkpoint, Role.VISION_ENCODER, patches.get(Role.VISION_ENCODER, PatchSet()))
        yield _part(role, folder, llava(module, vision.built.module), llava_tensors(weights, vision, dtype))
    elif isinstance(module, GlmImageWriter):
        vision = ComponentWeights(checkpoint, Role.VISION_ENCODER, patches.get(Role.VISION_ENCODER, PatchSet()))
        names = {
            name: name if name.startswith("lm_head.") else f"model.language_model.{name}" for name in weights.shapes
        }
        vision_names = {name: f"model.{name}" for name in vision.shapes}
        tensors = (*_tensors(weights, names, dtype), *_tensors(vision, vision_names, dtype))
        yield _part(role, folder, glm_image(module, vision.built.module, _tokenizer(checkpoint, role, module)), tensors)
    elif role is _VISION_ROLES.get(checkpoint.family.name) and Role.VISION_ENCODER in checkpoint.family.prefixes:
        vision = ComponentWeights(checkpoint, Role.VISION_ENCODER, patches.get(Role.VISION_ENCODER, PatchSet()))
        text_names = {name: f"language_model.{name}" for name in weights.shapes}
        vision_names = {name: f"visual.{name}" for name in vision.shapes}
        tensors = (*_tensors(weights, text_names, dtype), *_tensors(vision, vision_names, dtype))
        yield _part(role, folder, _text_and_vision_module(module, vision.built.module), tensors)
    else:
        names = {name: _published_name(module, name) for name in weights.shapes if not name.startswith(_OF_SOUND)}
        tensors = (*_tensors(weights, names, dtype), *_extra_tensors(checkpoint, weights, dtype))
        yield _part(role, folder, module, tensors, config)


def _sound_parts(checkpoint: Checkpoint, patches: PatchSet, dtype: torch.dtype | None) -> Iterator[FolderPart]:
    """Yield the folders of what decodes audio, which is a part of the VAE's module here."""
    weights = ComponentWeights(checkpoint, Role.VAE, patches)
    sound = sound_of(weights.built.module)
    for part, folder in () if sound is None else zip(("vae", "vocoder"), AUDIO_FOLDERS, strict=True):
        start = f"{_OF_SOUND}{part}."
        names = {name: name.removeprefix(start) for name in weights.shapes if name.startswith(start)}
        statistics = [
            computed_tensor(name.removeprefix(start), value.dtype, tuple(value.shape), value.detach)
            for name, value in weights.statistics().items()
            if name.startswith(start)
        ]
        module: nn.Module = getattr(sound, part)
        yield _part(Role.VAE, folder, module, (*_tensors(weights, names, dtype), *statistics))


def _tokenizer(checkpoint: Checkpoint, role: Role, module: nn.Module) -> TextTokenizer | None:
    """Return the tokenizer of a text encoder; None if there is none."""
    reading = reading_of_role(checkpoint, role)
    assert reading is not None, f"{role.value} is read by a family"
    try:
        return tokenizer_of(checkpoint, role, reading, module)
    except TokenizerMissing:
        return None


def _with_part_apart(
    module: nn.Module,
    apart: str,
    folder: str,
    weights: ComponentWeights,
    dtype: torch.dtype | None,
    config: Mapping[str, Any] | None,
) -> Iterator[FolderPart | MissingPart]:
    """Yield the folders of the diffusion model `module` and of its part `apart`."""
    role, start = Role.DIFFUSION_MODEL, f"{apart}."
    inner = module.get_submodule(apart)
    delattr(module, apart)
    config = None if config is None else {key: value for key, value in config.items() if key not in _OF_WHOLE}
    names = {name: name.removeprefix(start) for name in weights.shapes if name.startswith(start)}
    if apart == COMPANION and SILENCE not in names.values():
        yield MissingPart(INNER_FOLDERS[apart], f"the file has no {SILENCE}, which pipelines read")
    else:
        tensors = (*_tensors(weights, names, dtype), *_tables(inner))
        yield _part(role, INNER_FOLDERS[apart], inner, tensors, config if type(inner) is type(module) else None)
    own = (*_tensors(weights, _same(weights.shapes.keys() - names), dtype), *_buffers(weights, start))
    yield _part(role, folder, module, own, config)


def normalizer_part(checkpoint: Checkpoint) -> FolderPart | None:
    """Return the folder with the statistics of image embeddings that unCLIP's noise is relative to; None for other
    models."""
    labels = checkpoint.family.sampling.image_labels
    if labels is None:
        return None
    width = labels_width(checkpoint.family)
    module = StableUnCLIPImageNormalizer(width)
    values = {"mean": labels.means or (0.0,) * width, "std": labels.deviations or (1.0,) * width}
    tensors = [
        computed_tensor(name, torch.float32, (1, width), partial(torch.tensor, [numbers], dtype=torch.float32))
        for name, numbers in values.items()
    ]
    return FolderPart(Role.VISION_ENCODER, NORMALIZER, module, tuple(tensors), torch.float32)


def _is_vision_in_text_folder(checkpoint: Checkpoint) -> bool:
    """Whether the vision encoder is stored in the folder of the text encoder that reads its images."""
    vision = checkpoint.family.sampling.vision_use
    return vision is not None and not vision.is_model_input


def _is_llava_text(checkpoint: Checkpoint, role: Role) -> bool:
    """Whether the text encoder `role` is the language part of a LLaVA with a vision part."""
    reading = reading_of_role(checkpoint, role) if role.is_text_encoder else None
    return reading is not None and reading.sees and Role.VISION_ENCODER in checkpoint.family.prefixes


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _tensors(weights: ComponentWeights, names: Mapping[str, str], dtype: torch.dtype | None) -> Iterator[TensorToWrite]:
    """Yield the parameters of a component that are in `names`, renamed accordingly."""
    for name, shape in weights.shapes.items():
        if name in names:
            target = dtype or weights.dtype(name)
            yield computed_tensor(names[name], target, shape, partial(weights.parameter, name, target))


def _extra_tensors(
    checkpoint: Checkpoint, weights: ComponentWeights, dtype: torch.dtype | None
) -> Iterator[TensorToWrite]:
    """Yield what the class has in addition to our parameters: statistics of norms, and of a BERT a part that no model
    reads."""
    for name, value in (weights.statistics() | _latent_statistics(checkpoint, weights.built.module)).items():
        if name.startswith(_OF_SOUND):
            continue
        yield computed_tensor(name, value.dtype, tuple(value.shape), value.detach)
    for key in weights.key_map.unused:
        if isinstance(weights.built.module, BertModel) and key.endswith(_POOLER):
            name = key[key.index(_POOLER[0].split(".")[0]) :]
            tensor = (
                copied_tensor(checkpoint.mapped, key) if dtype is None else cast_tensor(checkpoint.mapped, key, dtype)
            )
            yield replace(tensor, name=name)


def _buffers(weights: ComponentWeights, without: str) -> Iterator[TensorToWrite]:
    """Yield the buffers of the file, but not of the part with names that begin with `without`."""
    for name, value in weights.statistics().items():
        if not name.startswith(without):
            yield computed_tensor(name, value.dtype, tuple(value.shape), value.detach)


def _tables(module: nn.Module) -> Iterator[TensorToWrite]:
    """Yield the table of a model of seconds that its class in diffusers loads and ours computes."""
    for name, value in module.named_buffers():
        if isinstance(module, StableAudio3DurationEmbedder):
            yield computed_tensor(name, value.dtype, tuple(value.shape), value.clone)


def _latent_statistics(checkpoint: Checkpoint, module: Any) -> dict[str, Tensor]:
    """Return the statistics of latents that the pipeline reads in the VAE, where the VAE of a file may have others."""
    latent = checkpoint.latent
    if not (latent.means and isinstance(module, AutoencoderKLFlux2)):
        return {}
    return statistics_in_folder(latent.means, latent.deviations, module.config.batch_norm_eps)


def _part(
    role: Role,
    folder: str,
    module: nn.Module,
    tensors: Iterable[TensorToWrite],
    config: Mapping[str, Any] | None = None,
) -> FolderPart:
    """Return the part with `module`, keeping the `tensors` that it has or that are no parameters."""
    published = (
        {} if is_llava(module) else {name: _published_name(module, name) for name, _ in module.named_parameters()}
    )
    published = published or llava_names(module)
    wanted = {published[name]: tuple(each.shape) for name, each in module.named_parameters() if name in published}
    kept = tuple(tensor for tensor in tensors if tensor.name in wanted or not _is_text(module))
    found = {tensor.name: tensor for tensor in kept}
    missing = sorted(name for name in wanted if name not in found)
    assert not missing, f"{folder}: {missing} are missing"
    for name in wanted.keys() & found:
        assert found[name].shape == wanted[name], f"{folder}: {name}: {found[name].shape}, {wanted[name]}"
    kinds = [TORCH_DTYPES[found[name].dtype] for name in wanted if name in found]
    return FolderPart(role, folder, module, kept, max(set(kinds), key=kinds.count), config)


def _published_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter in published folders: everything in a text model except its projection is one
    level down."""
    return name if not _is_text(module) or name.startswith(("text_projection.", _TEXT_LEVEL)) else _TEXT_LEVEL + name


def _is_text(module: nn.Module) -> bool:
    return isinstance(module, (CLIPTextModel, CLIPTextModelWithProjection))


def _unloadable(module: nn.Module, reading: Reading | None) -> str:
    """Return why no class of diffusers or transformers could load the files of `module`; empty if one can."""
    if any(isinstance(part, MissingHalf) for part in module.children()):
        return "the file has only one half of it, and pipelines read both"
    if isinstance(getattr(module, "norm", None), nn.Identity):
        return "the file has only its first layers, without the norm after the last one"
    if reading is not None and reading.pooled is Pooled.PROJECTED and isinstance(module, CLIPTextModel):
        return "the file lacks the projection that pipelines read"
    return ""


def _module(checkpoint: Checkpoint, role: Role) -> nn.Module:
    """Return the module that the folder's configuration builds, on the meta device."""
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
            # the scale of a table of positions is relative to the size in its file
            size = 0 if getattr(built.config, "interpolation_scale", None) else cells
            _configure(built, {"sample_size": size, "num_frames": None if video is None else video.frames})
        return built
    config = checkpoint.config(role)
    if role in family.texts:
        return _text_module(config, family.texts[role])
    build = module_from_config if role in family.configs else empty_module
    cells = max(native_size(family, checkpoint.header)) // checkpoint.latent.downscale
    return build(architecture, {**config, "sample_size": cells})


def _vae(checkpoint: Checkpoint) -> nn.Module:
    latent, plan = checkpoint.latent, checkpoint.vae_plan()
    if plan.facts.name == _CASCADE_VAE:
        return plan.empty({"scale_factor": 1.0 / latent.scaling_factor})
    module = plan.empty()
    if checkpoint.family.name in _VAE_CLASSES and _has_equal_halves(module):
        module = _other_vae(module, getattr(diffusers, _VAE_CLASSES[checkpoint.family.name]))
    settings = {
        "scaling_factor": latent.scaling_factor,
        "shift_factor": latent.shift,
        "sample_size": max(native_size(checkpoint.family, checkpoint.header)),
        "latents_mean": latent.means,
        "latents_std": latent.deviations,
        **_VAE_ENTRIES.get(checkpoint.family.name, {}),
    }
    _configure(module, settings)
    return module


def _configure(module: Any, settings: Mapping[str, Any]) -> None:
    """Set the values that are not empty and known to the module's class in its configuration."""
    module.register_to_config(**{key: value for key, value in settings.items() if value and key in module.config})


def _has_equal_halves(module: Any) -> bool:
    """Whether it is a VAE of Wan with halves of equal width, as other classes for it expect."""
    config: Any = module.config
    return (
        type(module) is AutoencoderKLWan
        and config.decoder_base_dim in (None, config.base_dim)
        and config.in_channels == config.out_channels
        and not (config.is_residual or config.patch_size)
    )


def _other_vae(module: Any, cls: type[nn.Module]) -> nn.Module:
    """Return the VAE of the class `cls` with the parameters of `module`, which have the same names in both."""
    known = inspect.signature(cls.__init__).parameters
    config = {key: value for key, value in module.config.items() if key in known}
    with torch.device("meta"):
        return cls(**config, input_channels=module.config.in_channels)


def _has_own_config(checkpoint: Checkpoint, role: Role) -> bool:
    """Whether the plan of the component provides its configuration, as for transformer families. Their classes compute
    with image sizes, which stay as planned."""
    return (
        checkpoint.family.architectures[role] in _TRANSFORMERS and transformer_pipeline(checkpoint.family) is not None
    )


def _model_config(checkpoint: Checkpoint, role: Role) -> dict[str, Any]:
    """Return the configuration of diffusers' class of a diffusion model. Our module may be another class, built with
    arguments that diffusers' class lacks."""
    family = checkpoint.family
    shapes = family.shapes_of(role, checkpoint.shapes)
    companions = family.extra_prefixes.get(role, ()) if family.companion else ()
    plan = plan_diffusion_model(shapes, family.prefixes[role], config=family.configs.get(role), companions=companions)
    name = plan.architecture.module.__name__
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    # arguments unknown to diffusers' class are included if they are set, for readers that know them
    set_arguments = {key: value for key, value in plan.config.items() if key in defaults or value}
    if family.companion:  # its folder has its own
        part = f"{family.companion}_"
        set_arguments = {key: value for key, value in set_arguments.items() if not key.startswith(part)}
    return {
        "_class_name": name,
        "_diffusers_version": diffusers.__version__,
        **defaults,
        **_CONFIG_ENTRIES.get(family.name, {}),
        **set_arguments,
    }


def _clip(planned: nn.Module, reading: Reading | None) -> nn.Module:
    """Return CLIP's text model as pipelines read it: without a projection if they read the pooled text without one."""
    if reading is None or reading.pooled is not Pooled.PLAIN or isinstance(planned, CLIPTextModel):
        return planned
    config: Any = planned.config
    with torch.device("meta"):
        module: nn.Module = CLIPTextModel(config)
    return module


def _text_and_vision_module(text: Any, vision: Any) -> nn.Module:
    """Combine a text encoder and its vision part in the one class of both. The three position axes share a head as in
    the published model, which matters only with an image."""
    if isinstance(vision, Qwen3VLVisionModel):
        both = {"text_config": text.config.to_dict(), "vision_config": vision.config.to_dict()}
        with torch.device("meta"):
            whole: nn.Module = Qwen3VLModel(Qwen3VLConfig(**both))
        return whole
    half = text.config.hidden_size // text.config.num_attention_heads // 2
    first = half // 4
    sections = [first, (half - first) // 2, half - first - (half - first) // 2]
    positions = {**text.config.rope_parameters, "mrope_section": sections}
    text_config = {**text.config.to_dict(), "rope_parameters": positions}
    text_config.pop("model_type")
    with torch.device("meta"):
        config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision.config.to_dict())
        module: nn.Module = Qwen2_5_VLModel(config)
    return module


def _text_module(config: Mapping[str, Any], text: TextFacts) -> nn.Module:
    """Return a text encoder as pipelines read it: the last layer's output through the final norm, or the output of a
    layer before the last without it."""
    layers = config["num_hidden_layers"] - (text.layers_left_out if text.final_norm else 0)
    kind = CLIPTextModelWithProjection if text.gives_pooled else CLIPTextModel
    with torch.device("meta"):
        module: nn.Module = kind(CLIPTextConfig(**{**config, "num_hidden_layers": layers}))
    return module
