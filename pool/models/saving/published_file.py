"""Plans a diffusers folder as one file in the published layout of its family.

The parameters of both are equal, so the names of the file follow from them (`published_shapes`). The result is
verified: the planned file is recognised like any other before it is written, and refused if it would be read
differently from the folder. Scheduler settings of a folder become the small tensors that trainers write (`v_pred`,
`ztsnr`, `edm_*`). Plans only: bytes are computed when the file is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.detection.prediction import (
    NOISE_WORD,
    PREDICTION_ENTRIES,
    PREDICTION_KEY,
    VELOCITY_MARK,
    ZERO_TERMINAL_MARK,
)
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.unet_families import FAMILIES, UNETS
from modelpool.pool.files.formats.safetensors_file import Header, Shape, TensorEntry
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.models.components.common.infer_config import CLIP_END_TOKEN
from modelpool.pool.models.components.component_plans import plan_component
from modelpool.pool.models.components.published_shapes import published_shapes
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.loading.describe import RESOLUTION_KEY, native_size
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.small_tensors import (
    EDM_DEVIATION,
    EDM_MEAN,
    EDM_SIGMA_MAX,
    EDM_SIGMA_MIN,
    LABEL_STATISTICS,
)
from modelpool.pool.models.saving.component_weights import ComponentWeights
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseKind, Prediction
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import KeyMap
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.detect_layers import METADATA_KEY as QUANTIZATION_KEY
from modelpool.pool.weights.quant.tensor_bytes import computed_tensor

#: metadata of a folder's files that may be wrong for the file: its weights are plain, its prediction is the scheduler's
_NOT_KEPT = frozenset({QUANTIZATION_KEY, *PREDICTION_ENTRIES})
#: placeholder dtype of tensors, before the dtype matters
_ANY_DTYPE = "F32"
#: attributes of modules that change only the dtype of a computation
_PRECISION_ATTRIBUTES = frozenset({"upcast_attention", "upcast_softmax"})
#: arguments that classes read when called, and store nowhere else
_READ_WHEN_CALLED = ("center_input_sample",)
#: value of older CLIP configurations, which their classes read as the end token anyway
_OLD_END_TOKEN = 2


@dataclass(frozen=True, slots=True)
class _Part:
    """One component in progress: its weights, and the map between the file's tensors and them."""

    weights: ComponentWeights
    key_map: KeyMap


class PublishedFile:
    """The file equivalent to a folder with `patches`, in `dtype` (None: the dtypes of the folder)."""

    def __init__(self, checkpoint: Checkpoint, patches: Mapping[Role, PatchSet], dtype: torch.dtype | None) -> None:
        """Raises UnusableField for a family that is not saved as single files, UnknownArchitecture naming the
        folder if the file would be another model, and PatchFailed as `ComponentWeights` does."""
        self._checkpoint, self._dtype = checkpoint, dtype
        row = published_family(checkpoint)
        weights = {role: ComponentWeights(checkpoint, role, patches.get(role, PatchSet())) for role in row.prefixes}
        shapes: dict[str, Shape] = {}
        for role, component in weights.items():
            shapes |= published_shapes(row.architectures[role], component.shapes, row.prefixes[role])
        self._marks = marker_tensors(checkpoint.family)
        self._header, family = self._recognised(shapes)
        self._parts = {
            role: _Part(component, self._key_map(role, component, family, shapes))
            for role, component in weights.items()
        }

    def tensors(self) -> tuple[TensorToWrite, ...]:
        """Return every tensor to write, in order: the components, then the markers of how they are used."""
        weights = [tensor for part in self._parts.values() for tensor in self._of(part)]
        return (
            *weights,
            *(computed_tensor(key, mark.dtype, mark.shape, mark.clone) for key, mark in self._marks.items()),
        )

    def metadata(self) -> dict[str, str]:
        """Return the folder's metadata, and what no tensor expresses."""
        return dict(self._header.metadata)

    def _recognised(self, shapes: Mapping[str, Shape]) -> tuple[Header, LocatedFamily]:
        """Return the header of the file, and the family that it is read as, which is the folder's."""
        folder_family, path = self._checkpoint.family, self._checkpoint.header.path
        metadata = {key: text for key, text in self._checkpoint.header.metadata.items() if key not in _NOT_KEPT}
        unet = UNETS.get(folder_family.name)
        if unet is not None and unet.velocity_pixels and folder_family.sampling.prediction is Prediction.NOISE:
            metadata[PREDICTION_KEY] = NOISE_WORD  # its weights may look like a velocity model's
        everything = {**shapes, **{key: tuple(mark.shape) for key, mark in self._marks.items()}}
        entries = {key: TensorEntry(key, _ANY_DTYPE, shape, 0, 0) for key, shape in everything.items()}
        header = Header(path, 0, entries, metadata)
        try:
            family = detect(header)
        except UnknownArchitecture as error:
            raise UnknownArchitecture(
                f"{path}: as one file it would not be read as {folder_family.title}: {error}"
            ) from error
        for what, found, expected in _differences(folder_family, family, self._marks):
            raise self._refused(f"{what}: found {found!r}, expected {expected!r}, as such a file is read")
        size = native_size(folder_family, self._checkpoint.header)
        if size != native_size(family, header):
            header = replace(header, metadata={**metadata, RESOLUTION_KEY: f"{size[0]}x{size[1]}"})
        return header, family

    def _key_map(
        self, role: Role, weights: ComponentWeights, family: LocatedFamily, shapes: Mapping[str, Shape]
    ) -> KeyMap:
        """Return the map between the tensors of the file and the parameters of `role`, which are built equally from
        both."""
        try:
            plan = plan_component(family, role, family.shapes_of(role, shapes))
        except UnknownArchitecture as error:
            raise self._refused(f"{role.value}: {error}") from error
        found, expected = plan.key_map.shapes, weights.shapes
        differing = [name for name in (*expected, *found) if found.get(name) != expected.get(name)]
        if differing or plan.key_map.unused:
            first = (*differing, *plan.key_map.unused)[0]
            raise self._refused(f"{role.value}: found {first}, expected the weights that such a file has")
        settings, other = _settings(weights.built.module), _settings(plan.module)
        for name in sorted(settings.keys() | other.keys()):
            if (value := settings.get(name)) != (read := other.get(name)):
                raise self._refused(f"{role.value}.{name}: found {value!r}, expected {read!r}, as such a file is read")
        return plan.key_map

    def _refused(self, why: str) -> UnknownArchitecture:
        header, title = self._checkpoint.header, self._checkpoint.family.title
        return UnknownArchitecture(f"{header.path}: cannot be one file of {title}: {why}; a folder of it can be saved")

    def _of(self, part: _Part) -> Iterator[TensorToWrite]:
        for key, shape in part.key_map.sources.items():
            dtype = self._dtype or _dtype(part, key)
            yield computed_tensor(key, dtype, shape, partial(part.weights.source, key, dtype, part.key_map))


def published_family(checkpoint: Checkpoint) -> LocatedFamily:
    """Return the family with the single files that a folder can be saved as. Raises UnusableField for a family that is
    not saved as single files."""
    written = {
        each.name: each for each in FAMILIES if each.architectures[Role.DIFFUSION_MODEL] is Architecture.LDM_UNET
    }
    found = written.get(checkpoint.family.name)
    if found is None:
        titles = [each.title for each in written.values()]
        raise UnusableField(
            f"model: found {checkpoint.header.path}, a folder of diffusers of {checkpoint.family.title}, expected to "
            f"save it as a folder: folders that become single files are of {', '.join(titles[:-1])} and {titles[-1]}"
        )
    return found


def marker_tensors(family: LocatedFamily) -> dict[str, Tensor]:
    """Return the small tensors by which a file of `family` specifies its prediction, its noise and its latent
    statistics."""
    sampling, found = family.sampling, dict[str, Tensor]()
    if sampling.prediction is Prediction.EDM:
        columns = (1, len(family.latent_means), 1, 1)
        found[EDM_MEAN] = torch.tensor(family.latent_means).reshape(columns)
        found[EDM_DEVIATION] = torch.tensor(family.latent_deviations).reshape(columns)
    elif sampling.noise.kind is NoiseKind.EDM:
        found[EDM_SIGMA_MIN] = torch.tensor(sampling.noise.sigma_min)
        found[EDM_SIGMA_MAX] = torch.tensor(sampling.noise.sigma_max)
    elif sampling.prediction is Prediction.VELOCITY:
        found[VELOCITY_MARK] = torch.empty(0)
    if sampling.image_labels is not None and sampling.image_labels.means:
        values = sampling.image_labels.means, sampling.image_labels.deviations
        found |= {key: torch.tensor([each]) for key, each in zip(LABEL_STATISTICS[0], values, strict=True)}
    if sampling.noise.kind is NoiseKind.ZERO_TERMINAL:
        found[ZERO_TERMINAL_MARK] = torch.empty(0)
    return found


def _differences(
    folder: LocatedFamily, family: LocatedFamily, markers: Collection[str]
) -> Iterator[tuple[str, object, object]]:
    """Yield what differs between a folder of the family `folder` and a file that is read as `family`, by name, except
    for the numbers in the tensors `markers`."""
    if EDM_SIGMA_MAX in markers:
        noise = folder.sampling.noise
        ends = replace(family.sampling.noise, sigma_min=noise.sigma_min, sigma_max=noise.sigma_max)
        family = replace(family, sampling=replace(family.sampling, noise=ends))
    if EDM_MEAN in markers:
        family = replace(family, latent_means=folder.latent_means, latent_deviations=folder.latent_deviations)
    if LABEL_STATISTICS[0][0] in markers:
        sampling = replace(family.sampling, image_labels=folder.sampling.image_labels)
        family = replace(family, sampling=sampling)
    if folder.name != family.name:
        yield "family", folder.title, family.title
    for name in ("scaling_factor", "latent_shift", "latent_means", "latent_deviations"):
        if getattr(folder, name) != getattr(family, name):
            yield name, getattr(folder, name), getattr(family, name)
    yield from _unequal("", folder.sampling, family.sampling)
    for role in family.texts:
        yield from _unequal(f"{role.value}.", folder.texts[role], family.texts[role])


def _unequal(place: str, found: Any, expected: Any) -> Iterator[tuple[str, object, object]]:
    """Yield the differing fields of two values of one dataclass, including nested ones."""
    for field in fields(found):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if one != other and is_dataclass(one) and type(one) is type(other):
            yield from _unequal(f"{place}{field.name}.", one, other)
        elif one != other:
            yield f"{place}{field.name}", *(each.value if isinstance(each, Enum) else each for each in (one, other))


def _dtype(part: _Part, key: str) -> torch.dtype:
    """Return the dtype of a tensor of the file: its parameters' dtype, or float32 if they differ."""
    kinds = {part.weights.dtype(target.key) for target in part.key_map.targets(key)}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _settings(module: nn.Module) -> dict[str, object]:
    """Return the numbers and strings that each part of a module was built with, and its class, by name: two modules
    with equal settings compute the same from the same weights."""
    found: dict[str, object] = {}
    for place, part in module.named_modules():
        found[f"{place}.class"] = type(part).__name__
        plain = {
            key: value for key, value in vars(part).items() if _is_plain(value) and key not in _PRECISION_ATTRIBUTES
        }
        found |= {f"{place}.{key}".removeprefix("."): value for key, value in plain.items()}
        if plain.get("eos_token_id") == _OLD_END_TOKEN:
            found[f"{place}.eos_token_id".removeprefix(".")] = CLIP_END_TOKEN
    return found | {key: getattr(module.config, key, None) for key in _READ_WHEN_CALLED}


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))
