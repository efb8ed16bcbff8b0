"""Plan one component of a family with the package for its architecture: module, key map, tables.

Knows which package plans which architecture. Reads no files: it takes shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from modelpool.pool.families.parts.inner_models import DURATION, PADDING_KEY
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.files.formats.folder_header import CLASS_KEY
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.diffusers_private import Converter, converter
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.module_classes import (
    config_of,
    configuration_errors,
    empty_module,
    fill_tables,
    module_from_config,
)
from modelpool.pool.models.components.common.spliced_vae import is_spliced, names_in_vae, sound_configs, sound_prefixes
from modelpool.pool.models.components.common.vae_compression import recognised_for
from modelpool.pool.models.components.common.view_projection import PROJECTION, empty_projection, projection_tensors
from modelpool.pool.models.components.diffusion.audio_seconds import (
    converted_duration,
    converted_seconds,
    plan_duration,
    plan_seconds,
)
from modelpool.pool.models.components.diffusion.build_diffusion_model import converted, plan_diffusion_model
from modelpool.pool.models.components.diffusion.meta_module import empty_module as empty_diffusion_model
from modelpool.pool.models.components.text.build_text_encoder import facts_named, plan_text_encoder
from modelpool.pool.models.components.text.connectors import plan_connectors
from modelpool.pool.models.components.text.text_encoder_classes import fill_tables as fill_text_tables
from modelpool.pool.models.components.vae.audio_decoders import SOUND, plan_sound
from modelpool.pool.models.components.vae.build_vae import VaePlan, plan_vae, spliced_vae
from modelpool.pool.models.components.vae.vae_folder_plan import plan_folder_vae
from modelpool.pool.models.components.vision.build_vision_encoder import plan_vision
from modelpool.pool.models.components.vision.glm import is_glm_vision, plan_glm_vision
from modelpool.pool.models.components.vision.llava import plan_image_words
from modelpool.pool.models.components.vision.qwen import plan_qwen_vision
from modelpool.pool.models.components.vision.siglip import is_siglip, plan_siglip
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover, key_map_of


@dataclass(frozen=True, slots=True)
class ComponentPlan:
    """One component without weights.

    module   on the meta device, in evaluation mode, without gradients
    key_map  between the file's tensors and the module's parameters
    fill     fills the module's tables that no file carries, after its weights are set
    """

    module: nn.Module
    key_map: KeyMap
    fill: Callable[[nn.Module], None]


def fitted_plan(family: LocatedFamily, plan: ComponentPlan) -> ComponentPlan:
    """Return `plan` without tensors that the module has no parameter for.

    Raises UnknownArchitecture if the file lacks tensors of the module or has some in other shapes. Packages with their
    own plans have compared them already.
    """
    if plan.fill is not fill_tables:
        return plan
    return replace(plan, key_map=fitted(plan.key_map, plan.module, f"it does not match {family.title}:"))


def plan_component(
    family: LocatedFamily, role: Role, shapes: Mapping[str, Shape], config: Mapping[str, Any] | None = None
) -> ComponentPlan:
    """Return the plan of the component `role` of `family`, for tensors of `shapes` (keys as in the file).

    `config` are the class arguments, if already known. Shapes may still differ from the module's: weights that are
    stored padded do. Raises UnknownArchitecture if there is no such module.
    """
    prefix = family.prefixes[role]
    match family.architectures[role]:
        case Architecture.VAE:
            with configuration_errors():
                vae = vae_plan(family, shapes, prefix)
                return _with_sound(family, shapes, ComponentPlan(*vae.fitting(), _nothing))
        case Architecture.DIFFUSION_TRANSFORMER:
            companions = family.extra_prefixes.get(role, ())
            model = plan_diffusion_model(shapes, prefix, config=family.configs.get(role), companions=companions)
            return ComponentPlan(*model.fitting(), _nothing)
        case Architecture.AUDIO_TRANSFORMER:
            return _audio_plan(shapes, prefix, family.configs.get(role))
        case Architecture.TEXT_MODEL:
            # its role in the family determines the encoder, whatever its size
            is_open_clip = any(key.removeprefix(prefix).startswith("transformer.resblocks.") for key in shapes)
            layout = "open_clip" if is_open_clip else "transformers"
            text = plan_text_encoder(shapes, prefix, facts=facts_named(family.texts[role].encoder, layout))
            return ComponentPlan(*text.fitting(), fill_text_tables)
        case Architecture.TEXT_CONNECTOR:
            return ComponentPlan(*plan_connectors(shapes, family.configs.get(role)), _nothing)
        case Architecture.VISION_MODEL if family.sampling.vision_use is VisionEncoderUse.WORDS:
            words = plan_image_words(family.shapes_of(role, shapes), prefix)
            return ComponentPlan(*words.fitting(), _nothing)
        case Architecture.VISION_MODEL if is_siglip(shapes):
            return ComponentPlan(*plan_siglip(shapes, family.configs.get(role)).fitting(), _nothing)
        case Architecture.VISION_MODEL:
            vision_use = plan_vision(shapes, prefix, folder_config=family.configs.get(role))
            return ComponentPlan(*vision_use.fitting(), _nothing)
        case Architecture.TEXT_VISION if is_glm_vision(shapes, prefix):
            return ComponentPlan(*plan_glm_vision(shapes, prefix).fitting(), fill_text_tables)
        case Architecture.TEXT_VISION:
            seeing = plan_qwen_vision(shapes, prefix)
            return ComponentPlan(*seeing.fitting(), fill_text_tables)
        case architecture:
            bare = {family.bare_key(role, key): shape for key, shape in shapes.items()}
            found = dict(config) if config is not None else config_of(architecture, bare)
            module = (module_from_config if role in family.configs else empty_module)(architecture, found)
            if family.sampling.takes_view and role is Role.DIFFUSION_MODEL:
                return _view_plan(module, shapes, prefix, converter(architecture, found, prefix))
            key_map = discover(shapes, converter(architecture, found, prefix))
            return ComponentPlan(module, key_map, fill_tables)


def _view_plan(module: nn.Module, shapes: Mapping[str, Shape], prefix: str, convert_unet: Converter) -> ComponentPlan:
    """Plan a UNet that shows an object from a requested view, including the projection of the numbers of views."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        return {**convert_unet(own), **projection_tensors(tensors)}

    key_map = discover(shapes, convert)
    module.add_module(PROJECTION, empty_projection(key_map.shapes))
    return ComponentPlan(module, key_map, fill_tables)


def _audio_plan(shapes: Mapping[str, Shape], prefix: str, config: Mapping[str, Any] | None) -> ComponentPlan:
    """Plan an audio diffusion model, including the model that embeds seconds. Raises UnknownArchitecture."""
    model = plan_diffusion_model(shapes, prefix, config=config)
    name = model.architecture.seconds_model
    is_length = name == DURATION
    seconds = plan_duration(shapes) if is_length else plan_seconds(shapes)
    convert_seconds = converted_duration if is_length else converted_seconds
    module = empty_diffusion_model(model.architecture.module, model.config)
    module.add_module(name, seconds.empty())

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        start = model.recognised.prefix
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(start)}
        own |= {start + key: tensor for key, tensor in tensors.items() if is_length and key == PADDING_KEY}
        embedding = {f"{name}.{key}": tensor for key, tensor in convert_seconds(tensors).items()}
        return {**converted(model.architecture, model.recognised, own), **embedding}

    key_map = fitted(discover(shapes, convert), module, f"recognised as {model.recognised.title}, but")
    return ComponentPlan(module, key_map, _nothing)


def _with_sound(family: LocatedFamily, shapes: Mapping[str, Shape], plan: ComponentPlan) -> ComponentPlan:
    """Return the `plan` of the VAE of `family` with the decoder of audio, if `shapes` have it. Raises
    UnknownArchitecture."""
    if not any(key.startswith(sound_prefixes(family)) for key in shapes):
        return plan
    video = family.sampling.video
    scale = 1.0 if video is None or video.sound is None else video.sound.scale
    sound, key_map = plan_sound(shapes, sound_configs(family), scale)
    plan.module.add_module(SOUND, sound)
    origins = {f"{SOUND}.{name}": origin for name, origin in key_map.origins.items()}
    return replace(plan, key_map=key_map_of(shapes, {**plan.key_map.origins, **origins}))


def vae_plan(family: LocatedFamily, shapes: Mapping[str, Shape], prefix: str) -> VaePlan:
    """Plan the VAE of `family` with tensors of `shapes`. Raises UnknownArchitecture."""
    folder_config = family.configs.get(Role.VAE)
    shapes = {key: shape for key, shape in shapes.items() if not key.startswith(sound_prefixes(family))}
    if is_spliced(family):
        names = names_in_vae(family, shapes)
        return spliced_vae({key: shapes[key] for key in names}, names)
    if folder_config is not None:
        return plan_folder_vae(folder_config[CLASS_KEY], folder_config, shapes, prefix)
    bare = {key.removeprefix(prefix): tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    return plan_vae(shapes, prefix, facts=recognised_for(family.latent_format, bare))


def _nothing(module: nn.Module) -> None:
    """Do nothing: every table has its values already."""
