"""Determines the family of a diffusers folder from its tensors and configurations. Torch-free and pure.

Configurations are untrusted. Sizes in them must agree with the tensors; what no shape determines (heads, norms, the
prediction, the noise, the latent scale) is taken from them. Missing values are the defaults of the classes of diffusers
0.42 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.unet_families import UNETS, VIDEO_UNETS, edm_relative, folder_unet
from modelpool.pool.files.formats.folder_header import CLASS_KEY
from modelpool.pool.files.formats.model_folder import INDEX_FILE
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.models.components.common import infer_config as infer
from modelpool.pool.models.loading.cascade_folder import cascade_folder_family, is_cascade
from modelpool.pool.models.loading.folder_values import FolderConfig, latent_statistics, number_in, wrong_value
from modelpool.pool.models.loading.transformer_folder import TRANSFORMER, VISION, transformer_folder_family
from modelpool.pool.models.loading.video_unet_folder import video_folder_family
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import TextFacts
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction
from modelpool.pool.values.specs.spec import Role

#: (family, component, its folder, the folder's configuration, shapes of all tensors) -> family
_Reader: TypeAlias = Callable[[LocatedFamily, Role, str, FolderConfig, Mapping[str, Shape]], LocatedFamily]

UNET, VAE, SCHEDULER = "unet", "vae", "scheduler"
_UNET_CLASS, _VAE_CLASS = "UNet2DConditionModel", "AutoencoderKL"
_VISION_CLASS = "CLIPVisionModelWithProjection"
_TEXT_CLASSES = {
    "CLIPTextModel": Architecture.CLIP_TEXT,
    "CLIPTextModelWithProjection": Architecture.CLIP_TEXT_PROJECTED,
}
#: arguments of a CLIP text model that change its results, or that no shape determines
_TEXT_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "projection_dim",
    "hidden_act",
    "layer_norm_eps",
    "eos_token_id",
)
_TEXT_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
#: entries of a configuration that do not change the results
_NOT_ARGUMENTS = frozenset(
    {"sample_size", "scaling_factor", "shift_factor", "latents_mean", "latents_std", "force_upcast"}
)
#: `__init__` of the schedulers in diffusers 0.42
_SCHEDULER_DEFAULTS: FolderConfig = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
}
_STEPS = 1000
_KINDS = {"scaled_linear": NoiseKind.SCALED_LINEAR, "linear": NoiseKind.LINEAR}
_PREDICTIONS = {"epsilon": Prediction.NOISE, "v_prediction": Prediction.VELOCITY}


def folder_family(header: Header, shapes: Mapping[str, Shape], *, whole: bool = True) -> LocatedFamily:
    """Return the family of the diffusers folder of `header`, with tensors of `shapes` (quantization undone). Unless
    `whole`, a transformer model may lack some of its components.

    Raises UnknownArchitecture naming the folder, the component and the key, for a model that this version does not run
    and for configurations that contradict the tensors.
    """
    try:
        return _family(header, shapes, whole)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: {error}") from error


def _family(header: Header, shapes: Mapping[str, Shape], whole: bool) -> LocatedFamily:
    unet_shapes = {key: shape for key, shape in shapes.items() if key.startswith(f"{UNET}.")}
    if not unet_shapes and any(key.startswith(f"{TRANSFORMER}.") for key in shapes):
        return transformer_folder_family(header, shapes, whole)
    if not unet_shapes and is_cascade(shapes):
        return cascade_folder_family(header, shapes)
    if not unet_shapes:
        rest = ", ".join(sorted({key.partition(".")[0] for key in shapes}))
        raise UnknownArchitecture(f"a folder of diffusers with {rest}, which this version cannot run yet")
    found = recognise_diffusion(unet_shapes)
    title = "no known diffusion model" if found is None else found.title
    for video in VIDEO_UNETS:
        if found is not None and found.name == video.name:
            return video_folder_family(video, header, shapes)
    folders_found = {key.partition(".")[0] for key in shapes}
    base = folder_unet(found.name if found else "", folders_found, header.configs.get(INDEX_FILE, {}))
    if base is None:
        raise UnknownArchitecture(f"a folder of diffusers, recognised as {title}, which this version cannot run yet")
    base = _with_scheduler(base, header.configs.get(SCHEDULER, {}))
    folders = _folders(base)
    missing = [name for name in folders.values() if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing:
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    family = replace(base, prefixes={role: f"{name}." for role, name in folders.items()})
    readers: dict[Role, _Reader] = {
        Role.DIFFUSION_MODEL: _read_unet,
        Role.VAE: _read_vae,
        Role.VISION_ENCODER: _read_vision,
    }
    for role, name in folders.items():
        folder_config = _checked_counts(
            name, header.configs.get(name, {}), sum(key.startswith(f"{name}.") for key in shapes)
        )
        family = readers.get(role, _read_text)(family, role, name, folder_config, shapes)
    return family


def _folders(family: LocatedFamily) -> dict[Role, str]:
    """Return the folder of each component: the pipeline's for text encoders, where the only one may be the second."""
    pipeline = UNETS[family.name].pipeline
    known = {} if pipeline is None else pipeline.folders
    texts = {role: known.get(role, role.value) for role in family.text_encoders}
    vision = {Role.VISION_ENCODER: VISION} if family.sampling.vision_use is not None else {}
    return {**texts, **vision, Role.DIFFUSION_MODEL: UNET, Role.VAE: VAE}


def _read_text(
    family: LocatedFamily, role: Role, name: str, folder_config: FolderConfig, shapes: Mapping[str, Shape]
) -> LocatedFamily:
    architecture = _TEXT_CLASSES.get(str(folder_config.get(CLASS_KEY)))
    facts = family.texts[role]
    if architecture is None or (facts.gives_pooled and architecture is Architecture.CLIP_TEXT):
        wanted = "CLIPTextModelWithProjection" if facts.gives_pooled else " or ".join(_TEXT_CLASSES)
        raise wrong_value(name, CLASS_KEY, folder_config.get(CLASS_KEY), wanted)
    family = replace(
        family,
        architectures={**family.architectures, role: architecture},
        texts={**family.texts, role: _as_pipelines_read(facts)},
    )
    measured = infer.text_config(family, role, shapes)
    sizes = (*_TEXT_SIZES, *(("projection_dim",) if "projection_dim" in measured else ()))
    _expect_equal(name, folder_config, {key: measured[key] for key in sizes})
    config = {**measured, **{key: folder_config[key] for key in _TEXT_KEYS if folder_config.get(key) is not None}}
    return _with_config(family, role, config)


def _as_pipelines_read(facts: TextFacts) -> TextFacts:
    """A folder's text encoder ends with the layer that is read, if that goes through the final norm."""
    return replace(facts, layers_left_out=0) if facts.final_norm else facts


def _read_unet(
    family: LocatedFamily, role: Role, name: str, folder_config: FolderConfig, shapes: Mapping[str, Shape]
) -> LocatedFamily:
    if folder_config.get(CLASS_KEY) != _UNET_CLASS:
        raise wrong_value(name, CLASS_KEY, folder_config.get(CLASS_KEY), _UNET_CLASS)
    unet_shapes = {key.removeprefix(f"{name}."): shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
    context = next((shape for key, shape in unet_shapes.items() if key.endswith("attn2.to_k.weight")), ())
    sizes: dict[str, Any] = {
        "in_channels": _size(unet_shapes, "conv_in.weight", 1),
        "out_channels": _size(unet_shapes, "conv_out.weight", 0),
        "block_out_channels": [
            _size(unet_shapes, f"down_blocks.{level}.resnets.0.conv1.weight", 0)
            for level in _levels(unet_shapes, "down_blocks")
        ],
        "cross_attention_dim": context[1] if len(context) == 2 else 0,
    }
    for label in ("add_embedding.linear_1.weight", "class_embedding.linear_1.weight"):
        if label in unet_shapes:
            sizes["projection_class_embeddings_input_dim"] = _size(unet_shapes, label, 1)
    _expect_equal(name, folder_config, sizes)
    family = _with_config(family, role, {**sizes, **_arguments(folder_config)})
    family = replace(family, architectures={**family.architectures, role: Architecture.DIFFUSERS_UNET})
    return replace(family, native_pixels=_native_pixels(family, name, folder_config, shapes))


def _native_pixels(family: LocatedFamily, name: str, folder_config: FolderConfig, shapes: Mapping[str, Shape]) -> int:
    cells = folder_config.get("sample_size")
    largest = max(cells) if isinstance(cells, list) and cells and all(type(c) is int for c in cells) else cells
    if largest is None:
        return family.native_pixels
    if type(largest) is not int or not 0 < largest < 1 << 16:
        raise wrong_value(name, "sample_size", cells, "the edge of a latent")
    levels = _levels({key.removeprefix(f"{VAE}."): s for key, s in shapes.items()}, "decoder.up_blocks")
    edge: int = largest * 2 ** max(levels, default=0)
    return edge


def _read_vision(
    family: LocatedFamily, role: Role, name: str, folder_config: FolderConfig, shapes: Mapping[str, Shape]
) -> LocatedFamily:
    if folder_config.get(CLASS_KEY) != _VISION_CLASS:
        raise wrong_value(name, CLASS_KEY, folder_config.get(CLASS_KEY), _VISION_CLASS)
    return _with_config(family, role, folder_config)


def _read_vae(
    family: LocatedFamily, role: Role, name: str, folder_config: FolderConfig, shapes: Mapping[str, Shape]
) -> LocatedFamily:
    if folder_config.get(CLASS_KEY) != _VAE_CLASS:
        raise wrong_value(name, CLASS_KEY, folder_config.get(CLASS_KEY), _VAE_CLASS)
    vae_shapes = {key.removeprefix(f"{name}."): shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
    channels = _size(vae_shapes, "decoder.conv_in.weight", 1)
    sizes = {
        "latent_channels": channels,
        "block_out_channels": [
            _size(vae_shapes, f"encoder.down_blocks.{level}.resnets.0.conv1.weight", 0)
            for level in _levels(vae_shapes, "encoder.down_blocks")
        ],
    }
    _expect_equal(name, folder_config, sizes)
    means, deviations = latent_statistics(name, folder_config, channels)
    family = replace(
        family,
        scaling_factor=number_in(name, folder_config, "scaling_factor", 0.18215),
        latent_shift=number_in(name, folder_config, "shift_factor", 0.0),
        latent_means=means,
        latent_deviations=deviations,
    )
    if not family.scaling_factor > 0:
        raise wrong_value(name, "scaling_factor", family.scaling_factor, "a number above 0")
    return _with_config(family, role, {**sizes, **_arguments(folder_config), CLASS_KEY: _VAE_CLASS})


def _with_scheduler(family: LocatedFamily, folder_config: FolderConfig) -> LocatedFamily:
    """Return `family` with the prediction and the noise of its scheduler's configuration; unchanged if there is none,
    and for a model that removes no noise."""
    if not folder_config or family.sampling.prediction is Prediction.CLEAN:
        return family
    prediction = folder_config.get("prediction_type", _SCHEDULER_DEFAULTS["prediction_type"])
    if prediction not in _PREDICTIONS:
        raise wrong_value(SCHEDULER, "prediction_type", prediction, " or ".join(_PREDICTIONS))
    if str(folder_config.get(CLASS_KEY, "")).startswith("EDM"):
        return _with_edm_noise(family, folder_config, prediction)
    noise = _table_noise(folder_config, prediction)
    unet = UNETS.get(family.name)
    if unet is not None and (expected := unet.untrained_noise.get(noise.kind)):
        raise wrong_value(
            SCHEDULER,
            "beta_schedule",
            folder_config.get("beta_schedule", _SCHEDULER_DEFAULTS["beta_schedule"]),
            expected,
        )
    return _sampled(family, _PREDICTIONS[prediction], noise)


def _table_noise(folder_config: FolderConfig, prediction: str) -> NoiseFacts:
    """Return the noise of a scheduler with a table of levels."""
    for key, expected in (("num_train_timesteps", _STEPS), ("trained_betas", None)):
        if folder_config.get(key, _SCHEDULER_DEFAULTS[key]) != expected:
            raise wrong_value(SCHEDULER, key, folder_config[key], str(expected))
    schedule = folder_config.get("beta_schedule", _SCHEDULER_DEFAULTS["beta_schedule"])
    if schedule not in _KINDS:
        raise wrong_value(SCHEDULER, "beta_schedule", schedule, " or ".join(_KINDS))
    start = number_in(SCHEDULER, folder_config, "beta_start", _SCHEDULER_DEFAULTS["beta_start"])
    end = number_in(SCHEDULER, folder_config, "beta_end", _SCHEDULER_DEFAULTS["beta_end"])
    if not 0.0 < start <= end < 1.0:
        raise wrong_value(SCHEDULER, "beta_start and beta_end", (start, end), "rising numbers between 0 and 1")
    kind = _KINDS[schedule]
    if folder_config.get("rescale_betas_zero_snr", False) is True:
        if prediction != "v_prediction" or kind is not NoiseKind.SCALED_LINEAR:
            # pure noise contains no information about the noise that a model must predict
            raise wrong_value(SCHEDULER, "rescale_betas_zero_snr", True, "false without velocity prediction")
        kind = NoiseKind.ZERO_TERMINAL
    return NoiseFacts(kind, beta_start=start, beta_end=end)


def _with_edm_noise(family: LocatedFamily, folder_config: FolderConfig, prediction: str) -> LocatedFamily:
    is_edm = prediction == "epsilon"
    unet, relative = UNETS.get(family.name), edm_relative(family.name)
    base = relative if is_edm else family
    default = relative.sampling.noise if is_edm and relative else None if unet is None else unet.edm_noise
    if base is None or default is None:
        raise wrong_value(SCHEDULER, CLASS_KEY, folder_config.get(CLASS_KEY), f"a scheduler of {family.title}")
    noise = replace(
        default,
        sigma_min=number_in(SCHEDULER, folder_config, "sigma_min", default.sigma_min),
        sigma_max=number_in(SCHEDULER, folder_config, "sigma_max", default.sigma_max),
        sigma_data=number_in(SCHEDULER, folder_config, "sigma_data", 0.5 if is_edm else default.sigma_data),
    )
    if not 0.0 < noise.sigma_min < noise.sigma_max or not noise.sigma_data > 0:
        ends = (noise.sigma_min, noise.sigma_max)
        raise wrong_value(SCHEDULER, "sigma_min and sigma_max", ends, "a rising range above 0")
    return _sampled(base, Prediction.EDM if is_edm else Prediction.VELOCITY, noise)


def _sampled(family: LocatedFamily, prediction: Prediction, noise: NoiseFacts) -> LocatedFamily:
    """Return `family` with such noise; its conditioning is unchanged."""
    return replace(family, sampling=replace(family.sampling, prediction=prediction, noise=noise))


def _with_config(family: LocatedFamily, role: Role, config: FolderConfig) -> LocatedFamily:
    return replace(family, configs={**family.configs, role: config})


def _arguments(folder_config: FolderConfig) -> dict[str, Any]:
    return {key: value for key, value in folder_config.items() if not key.startswith("_") and key not in _NOT_ARGUMENTS}


def _checked_counts(name: str, folder_config: FolderConfig, tensors: int) -> FolderConfig:
    """Return the configuration if no count of layers or blocks exceeds the number of tensors: an untrusted one may
    claim any number."""
    for key, value in folder_config.items():
        counts = _whole_numbers(value) if "layers" in key or "blocks" in key else ()
        if any(number > tensors for number in counts):
            raise wrong_value(name, key, value, f"no more than its {tensors} tensors")
    return folder_config


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _whole_numbers(part)


def _expect_equal(name: str, folder_config: FolderConfig, sizes: FolderConfig) -> None:
    """Raise UnknownArchitecture if the configuration contradicts the `sizes` of the tensors."""
    for key, size in sizes.items():
        found = folder_config.get(key)
        if found is not None and found != size:
            raise wrong_value(name, key, found, f"{size} as its tensors have")


def _size(shapes: Mapping[str, Shape], key: str, dimension: int) -> int:
    if len(shapes.get(key, ())) <= dimension:
        raise UnknownArchitecture(f"found no tensor {key!r} of more than {dimension} dimensions, expected one")
    return shapes[key][dimension]


def _levels(shapes: Mapping[str, Shape], blocks: str) -> Sequence[int]:
    numbers = {key.removeprefix(f"{blocks}.").partition(".")[0] for key in shapes if key.startswith(f"{blocks}.")}
    return sorted(int(number) for number in numbers if number.isdecimal())
