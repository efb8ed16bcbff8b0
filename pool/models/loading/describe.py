"""Describes a file of weights from its header alone, for users and for planning. Torch-free.

Summarises checkpoints and LoRAs. Reads no weights except the single numbers that LoRA files store as tensors.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry
from modelpool.pool.models.components.common.infer_config import latent_facts
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.small_tensors import read_number, refine_family
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.models.lora_names.name_conventions import style_of
from modelpool.pool.values.core.assembly import Source
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.adapter_keys import looks_like_lora, normalized_keys, split_key
from modelpool.pool.weights.quant.detect_layers import QuantizedLayer, layers_in_file, logical_shapes, weight_shapes

RESOLUTION_KEY = "modelspec.resolution"
#: metadata entry of IC-LoRAs that were trained with guides of a lower resolution
REFERENCE_FACTOR_KEY = "reference_downscale_factor"

#: a part that only one kind of adapter has -> the kind
ALGORITHMS: Mapping[str, str] = {
    "up": "LoRA",
    "hada_w1_a": "LoHa",
    "lokr_w1": "LoKr",
    "lokr_w1_a": "LoKr",
    "oft_blocks": "OFT",
    "oft_diag": "OFT",
    "oft_R": "OFT",
    "diff": "difference",
}


#: as `PredictionHint.kind` names them
_PREDICTION_KINDS: Mapping[Prediction, str] = {
    Prediction.NOISE: "epsilon",
    Prediction.VELOCITY: "v",
    Prediction.EDM: "edm",
    Prediction.FLOW: "flow",
    Prediction.CLEAN: "clean",
}


@dataclass(frozen=True, slots=True)
class ComponentInfo:
    """One component of a checkpoint.

    dtypes  bytes in the file by dtype, "F16", or by format of quantized weights, "nvfp4"; most first
    """

    role: Role
    tensors: int
    parameters: int
    storage_bytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that this version runs.

    width, height  pixels of its training images
    is_usual_size  whether they are the family's: the checkpoint states none
    other_bytes    bytes of tensors that belong to no component
    prediction     prediction type with which it is sampled, as `PredictionHint.kind`
    """

    path: str
    family: str
    title: str
    file_bytes: int
    components: tuple[ComponentInfo, ...]
    other_bytes: int
    width: int
    height: int
    latent: LatentFacts
    metadata: Mapping[str, str]
    is_usual_size: bool
    prediction: str


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A LoRA file.

    styles      naming conventions found, most used first
    algorithms  kinds of adapter found, most used first
    modules     number of patched weights by component
    ranks       number of weights by rank
    alphas      number of weights by alpha; those without one are not counted
    unknown     keys that belong to no known adapter
    """

    path: str
    file_bytes: int
    tensors: int
    styles: tuple[str, ...]
    algorithms: tuple[str, ...]
    modules: Mapping[Role, int]
    ranks: Mapping[int, int]
    alphas: Mapping[float, int]
    unknown: tuple[str, ...]
    metadata: Mapping[str, str]


def describe(source: Source, *, allow_pickle: bool = False) -> CheckpointInfo:
    """Describe the checkpoint at `source`: a file, the index of several, the files of an assembly, or a diffusers
    folder.

    Raises CorruptFile and UnsafeFile as `read_weights_header` does, UnknownArchitecture if it is no checkpoint that
    this version runs, BadQuantization if quantized layers are not stored as declared.
    """
    header = read_weights_header(source, allow_pickle=allow_pickle)
    family = refine_family(detect(header), header)
    layers = layers_in_file(header)
    components = tuple(_component(family, role, header, layers) for role in family.prefixes)
    width, height = native_size(family, header)
    return CheckpointInfo(
        path=header.path,
        family=family.name,
        title=family.title,
        file_bytes=header.file_bytes,
        components=components,
        other_bytes=sum(e.storage_bytes for e in header.tensors.values())
        - sum(c.storage_bytes for c in components if c.role not in family.inside),
        width=width,
        height=height,
        latent=latent_facts(family, header.shapes),
        metadata=header.metadata,
        is_usual_size=_stated_size(family, header) is None,
        prediction=_PREDICTION_KINDS[family.sampling.prediction],
    )


def native_size(family: LocatedFamily, header: Header) -> tuple[int, int]:
    """Return the width and height in pixels of the training images: from the checkpoint's metadata, else from its
    family."""
    return _stated_size(family, header) or family.native_sides or (family.native_pixels, family.native_pixels)


def _stated_size(family: LocatedFamily, header: Header) -> tuple[int, int] | None:
    """Return the size in the checkpoint's metadata; None without one."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\d+)\s*)?", header.metadata.get(RESOLUTION_KEY, ""))
    if found is None:  # most models: their VAE need not be measured for it
        return None
    width, height = int(found[1]), int(found[2] or found[1])
    downscale = latent_facts(family, header.shapes).downscale
    # metadata may be hand-written: a size that no latent can have is ignored
    if not width or not height or width % downscale or height % downscale:
        return None
    return width, height


def describe_lora(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> LoraInfo:
    """Describe the LoRA at `path`.

    Raises CorruptFile and UnsafeFile as `read_weights_header` does, UnknownArchitecture if it is no LoRA,
    BadQuantization for factors with scales that are not as their types require.
    """
    header = read_weights_header(path, allow_pickle=allow_pickle)
    if not looks_like_lora(header.tensors):
        raise UnknownArchitecture(
            f"{header.path}: none of its {counted(len(header.tensors), 'tensor')} "
            f"is named like a part of a LoRA, expected a LoRA"
        )
    parts: dict[str, dict[str, TensorEntry]] = {}
    unknown = []
    for key, original in normalized_keys(weight_shapes(header)).original.items():
        split, entry = split_key(key), header.tensors[original]
        if split is None:
            unknown.append(original)
        else:
            parts.setdefault(split[0], {})[split[1]] = entry
    styles = Counter(style_of(base)[1] for base in parts)
    return LoraInfo(
        path=header.path,
        file_bytes=header.file_bytes,
        tensors=len(header.tensors),
        styles=tuple(style for style, _ in styles.most_common()),
        algorithms=_algorithms(parts),
        modules=Counter(style_of(base)[0] for base in parts),
        ranks=Counter(sorted(rank for own in parts.values() if (rank := _rank(own)) is not None)),
        alphas=Counter(sorted(read_number(header, own["alpha"].name) for own in parts.values() if "alpha" in own)),
        unknown=tuple(unknown),
        metadata=header.metadata,
    )


def reference_factor(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> int:
    """Return how many times smaller than the video the guides of the IC-LoRA at `path` are along a side, from its
    metadata; 1 if these do not say it. Raises CorruptFile and UnsafeFile.

    Source: diffusers' LTX2InContextPipeline."""
    found = read_weights_header(path, allow_pickle=allow_pickle).metadata.get(REFERENCE_FACTOR_KEY, "")
    try:
        return max(1, round(float(found)))
    except (ValueError, OverflowError):  # metadata may be hand-written
        return 1


def _component(
    family: LocatedFamily, role: Role, header: Header, layers: Mapping[str, QuantizedLayer]
) -> ComponentInfo:
    shapes = family.shapes_of(role, logical_shapes(header.shapes, layers))
    by_dtype: Counter[str] = Counter()
    for key in shapes:
        if key in layers:
            stored = (*layers[key].parts.values(), *layers[key].other)
            by_dtype[layers[key].format.name] += sum(header.tensors[part].storage_bytes for part in stored)
        else:
            by_dtype[header.tensors[key].dtype] += header.tensors[key].storage_bytes
    return ComponentInfo(
        role=role,
        tensors=len(shapes),
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        storage_bytes=by_dtype.total(),
        dtypes=dict(by_dtype.most_common()),
    )


def _algorithms(parts: Mapping[str, Mapping[str, TensorEntry]]) -> tuple[str, ...]:
    found = Counter(name for own in parts.values() for part, name in ALGORITHMS.items() if part in own)
    return tuple(name for name, _ in found.most_common())


def _rank(adapter: Mapping[str, TensorEntry]) -> int | None:
    """Return the rank of one adapter, None for one that is not decomposed."""
    for part in ("down", "hada_w1_b", "lokr_w1_b", "lokr_w2_b"):
        if part in adapter and adapter[part].shape:
            return adapter[part].shape[0]
    return None
