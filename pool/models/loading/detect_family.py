"""Detects the family of a file of weights from its keys and shapes. Torch-free.

The interface to `pool.families.detection` for code that runs checkpoints: returns a family that this version runs, or
raises an error that states what the file is instead. Reads no weights; `pool.models.loading.small_tensors` adds the
facts that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.detection.layouts.signature import Naming
from modelpool.pool.families.detection.other_files import LORA, folder_part, other_file
from modelpool.pool.families.detection.parts import split_second
from modelpool.pool.families.detection.prediction import (
    NOISE_WORD,
    VELOCITY_WORD,
    ZERO_TERMINAL_MARK,
    declared_prediction,
)
from modelpool.pool.families.detection.recognize import what_is
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.supported import LIST, why_not
from modelpool.pool.families.transformer_families import TRANSFORMERS, located, metadata_config, other_texts
from modelpool.pool.families.two_experts import two_expert_family
from modelpool.pool.families.unet_families import FAMILIES, UNETS, VIDEO_UNETS, look_alike
from modelpool.pool.files.formats.ggml_types import is_block_type
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.models.components.common import infer_config as infer
from modelpool.pool.models.components.common.spliced_vae import with_decoder_of_frames
from modelpool.pool.models.components.text_encoder_aliases import with_detected_text_encoders
from modelpool.pool.models.loading.folder_family import folder_family
from modelpool.pool.models.loading.incomplete_checkpoint import without_parts
from modelpool.pool.models.loading.small_tensors import EDM_DEVIATION, EDM_MEAN, EDM_SIGMA_MAX
from modelpool.pool.models.loading.vision_fit import check_vision_encoder
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.detect_layers import QuantizedLayer, layers_in_file, logical_shapes

#: float dtypes that weights may be stored in
WEIGHT_DTYPES = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
#: counters of batch norms, and channel counts
_COUNTERS = (".num_batches_tracked", ".per_channel_statistics.channel")

_ROLE_TITLES: Mapping[Role, str] = {
    Role.TEXT_ENCODER: "text encoder",
    Role.TEXT_ENCODER_2: "second text encoder",
    Role.TEXT_ENCODER_3: "third text encoder",
    Role.TEXT_ENCODER_4: "fourth text encoder",
    Role.VISION_ENCODER: "vision encoder",
    Role.DIFFUSION_MODEL: "diffusion model",
    Role.DIFFUSION_MODEL_2: "diffusion model for low noise",
    Role.VAE: "VAE",
}
#: a key that identifies a component of each kind, without prefix
_IDENTIFYING_KEYS: Mapping[Architecture, str] = {
    Architecture.CLIP_TEXT: "final_layer_norm.weight",
    Architecture.OPEN_CLIP_TEXT: "ln_final.weight",
    Architecture.OPEN_CLIP_TEXT_ALONE: "ln_final.weight",
    Architecture.CLIP_TEXT_PROJECTED: "final_layer_norm.weight",
    Architecture.LDM_UNET: "input_blocks.0.0.weight",
}


def detect(header: Header, *, whole: bool = True) -> LocatedFamily:
    """Return the family of a checkpoint that this version runs completely. Unless `whole`, a transformer model may lack
    some of its components.

    Raises UnknownArchitecture, naming the file and what it seems to be, for anything else, and BadQuantization for
    quantized layers that are not stored as declared.
    """
    layers = layers_in_file(header)
    shapes = logical_shapes(header.shapes, layers)
    if header.configs:
        return _of_folder(header, shapes, layers, whole)
    first, second = split_second(shapes)
    try:
        found = recognise_diffusion(first)
        pair = two_expert_family(found, second) if found is not None and second else None
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: {error}; {_expected()}") from error
    if found is None:
        raise UnknownArchitecture(f"{header.path}: {_describe_unknown(shapes)}; {_expected()}")
    title = _title(found)
    is_transformer = found.name in TRANSFORMERS
    base = pair or TRANSFORMERS.get(found.name)
    family = _family_of(title, shapes) if base is None else located(base, found, first)
    family = None if family is None else family.with_carried(shapes)
    variant = "" if family is None or is_transformer else _variant(family, header, shapes)
    variant = other_texts(found.prefix, first) if is_transformer else variant
    title = (title if family is None else family.title) + variant
    if family is None or variant:
        raise UnknownArchitecture(
            f"{header.path}: recognised as {title}, which this version cannot run yet"
            f"{'' if variant else f': {why_not(found.runs)}'} ({LIST} lists what runs); {_expected()}"
        )
    missing = [role for role in family.prefixes if not _has_component(family, shapes, role)]
    if len(missing) > 1 and Role.DIFFUSION_MODEL in missing:  # found under another prefix or none
        missing.remove(Role.DIFFUSION_MODEL)
    if missing and is_transformer and not whole:
        family, missing = without_parts(family, missing), []
    if missing:
        raise UnknownArchitecture(
            f"{header.path}: recognised as {title}, but without its {' and '.join(_ROLE_TITLES[r] for r in missing)} "
            f"(no tensors {', '.join(family.prefixes[r] + '*' for r in missing)}); {_expected()}; join separate files "
            f"with `modelpool models assemble`"
        )
    _check_dtypes(family, header, shapes, layers)
    try:
        check = infer.check if family.text_encoders and not is_transformer else infer.check_latents
        check(family, shapes)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: recognised as {title}, but {error}; {_expected()}") from error
    check_vision_encoder(family, header, shapes)
    return _with_metadata(family, header) if is_transformer else _with_file_sampling(family, header)


def _with_metadata(family: LocatedFamily, header: Header) -> LocatedFamily:
    """Return `family` with what the file's metadata says about its diffusion model and no shape does."""
    config = metadata_config(family, header.metadata)
    return replace(family, configs={**family.configs, Role.DIFFUSION_MODEL: config}) if config else family


def _of_folder(
    header: Header, shapes: Mapping[str, Shape], layers: Mapping[str, QuantizedLayer], whole: bool
) -> LocatedFamily:
    """Return the family of a diffusers folder: its configurations specify what no tensor determines."""
    family = folder_family(header, shapes, whole=whole)
    _check_dtypes(family, header, shapes, layers)
    try:
        check = infer.check_latents if family.text_set or not family.text_encoders else infer.check
        check(family, shapes)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: recognised as {family.title}, but {error}") from error
    check_vision_encoder(family, header, shapes)
    return family


def recognise(shapes: Mapping[str, Shape]) -> str | None:
    """Return the title of the architecture with a diffusion model among `shapes`, run by this version or not.

    Raises UnknownArchitecture for a known model's keys with impossible shapes.
    """
    found = recognise_diffusion(shapes)
    return None if found is None else _title(found)


def _title(found: DiffusionFacts) -> str:
    return found.title if found.naming is Naming.PUBLISHED else f"{found.title} in the naming of diffusers"


def _family_of(title: str, shapes: Mapping[str, Shape]) -> LocatedFamily | None:
    """Return the family that this version runs `title` as. Of two families that look alike at unpublished
    sizes, the one with its components present."""
    found = [family for family in (*FAMILIES, *VIDEO_UNETS) if family.title == title]
    found += [alike for family in found if (alike := look_alike(family.name)) is not None]
    found = [with_decoder_of_frames(with_detected_text_encoders(family, shapes), shapes) for family in found]
    complete = (f for f in found if all(_has_component(f, shapes, role) for role in f.prefixes))
    return next(complete, found[0] if found else None)


def _variant(family: LocatedFamily, header: Header, shapes: Mapping[str, Shape]) -> str:
    """Return what distinguishes a file from those that this version runs, if its shapes do not; empty for nothing."""
    is_edm = EDM_MEAN in header.tensors or EDM_DEVIATION in header.tensors
    has_ends = EDM_SIGMA_MAX in header.tensors
    if (is_edm and EDM_MEAN not in UNETS[family.name].detect.extra_keys) or (
        has_ends and UNETS[family.name].edm_noise is None
    ):
        return " with another noise schedule (EDM)"
    if ZERO_TERMINAL_MARK in header.tensors and (is_edm or not (has_ends or _predicts_velocity(header))):
        # pure noise contains no information about the noise that a model must predict
        return " with a noise schedule that ends in noise alone (zero terminal SNR) and without velocity prediction"
    prediction = declared_prediction(header.tensors, header.metadata)
    return "" if prediction in (None, NOISE_WORD, VELOCITY_WORD) else f" that predicts {prediction!r}"


def _with_file_sampling(family: LocatedFamily, header: Header) -> LocatedFamily:
    """Return `family` with the prediction and the noise that keys or metadata of the file specify."""
    sampling = family.sampling
    edm_noise = UNETS[family.name].edm_noise
    if EDM_SIGMA_MAX in header.tensors and edm_noise is not None:
        return replace(family, sampling=replace(sampling, prediction=Prediction.VELOCITY, noise=edm_noise))
    if sampling.prediction is not Prediction.NOISE or not _predicts_velocity(header):
        return family
    if ZERO_TERMINAL_MARK in header.tensors:
        sampling = replace(sampling, noise=NoiseFacts(NoiseKind.ZERO_TERMINAL))
    pixels = UNETS[family.name].velocity_pixels or family.native_pixels
    return replace(family, sampling=replace(sampling, prediction=Prediction.VELOCITY), native_pixels=pixels)


def _predicts_velocity(header: Header) -> bool:
    """Whether the file declares it, by an empty tensor or an entry in the metadata that trainers write."""
    return declared_prediction(header.tensors, header.metadata) == VELOCITY_WORD


def _check_dtypes(
    family: LocatedFamily, header: Header, shapes: Mapping[str, Shape], layers: Mapping[str, QuantizedLayer]
) -> None:
    for role in family.prefixes:
        for key in family.shapes_of(role, shapes):
            if key.endswith(_COUNTERS):
                continue
            dtype = header.tensors[key].dtype
            if key not in layers and dtype not in WEIGHT_DTYPES and not is_block_type(dtype):
                raise UnknownArchitecture(
                    f"{header.path}: tensor {key!r}: found type {dtype}, "
                    f"expected one of {', '.join(sorted(WEIGHT_DTYPES))}"
                )


def _has_component(family: LocatedFamily, shapes: Mapping[str, Shape], role: Role) -> bool:
    identifying_key = _IDENTIFYING_KEYS.get(family.architectures[role])
    if identifying_key is None:
        return bool(family.shapes_of(role, shapes))
    # a bare key is a suffix of one in the file
    return identifying_key in family.bare_shapes_of(
        role, {key: shape for key, shape in shapes.items() if key.endswith(identifying_key)}
    )


def _describe_unknown(shapes: Mapping[str, Shape]) -> str:
    if not shapes:
        return "the file holds no tensors"
    other = other_file(shapes)
    if title := other.title if other is not None else folder_part(shapes) or what_is(shapes):
        not_one = ", not a checkpoint: use it with a checkpoint that it was trained for" if title == LORA.title else ""
        return f"this is {title}{not_one}"
    first = ", ".join(list(shapes)[:3])
    return (
        f"its {counted(len(shapes), 'tensor matches', 'tensors match')} no known architecture (the first are {first})"
    )


def _expected() -> str:
    titles = [family.title for family in FAMILIES if not family.relative]
    return f"expected a complete checkpoint of {', '.join(titles[:-1])} or {titles[-1]}, or of a relative of these"
