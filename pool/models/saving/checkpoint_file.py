"""`save_checkpoint`: saves a model with its patches as one file, in its original or its family's published layout.

The interface for callers that save. Knows models, LoRAs and the metadata of the file; `pool.models.saving.single_file`
plans its tensors, `pool.models.saving.published_file` the tensors of a folder's model;
`pool.models.saving.diffusers_folder` writes diffusers folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modelpool.pool.files.formats.atomic_write import expect_free
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite, write_safetensors
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.saving.left_out import left_out
from modelpool.pool.models.saving.metadata import Merged, Source, with_facts
from modelpool.pool.models.saving.published_file import PublishedFile
from modelpool.pool.models.saving.replaced_folder import expect_outside
from modelpool.pool.models.saving.single_file import SingleFile
from modelpool.pool.models.saving.tokenizer_tensors import tokenizer_tensors
from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.core.stage_params import LoraRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patches.patch_set import PatchSet

SUFFIX = ".safetensors"
#: dtypes to save weights in, by the user's name
SAVED_DTYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

#: called with the bytes written so far and in total
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of saving a model.

    tensors   number of tensors
    patched   number of the model's weights that patches changed
    missing   parts that a diffusers pipeline reads and its folder lacks, with the reason
    left_out  tensors of the model that the other layout does not store (`pool.models.saving.left_out`)
    """

    path: Path
    file_bytes: int
    tensors: int
    patched: int
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchedModel:
    """A model and its patches, resolved.

    patches  by component; components without patches are left out
    merged   description of the patches for the metadata
    """

    checkpoint: Checkpoint
    source: Source
    patches: Mapping[Role, PatchSet]
    merged: tuple[Merged, ...]

    @property
    def patched(self) -> int:
        """The number of weights that patches change."""
        return sum(len(patches.parameters) for patches in self.patches.values())


def save_checkpoint(
    model: OpenModel | Checkpoint,
    path: Path,
    *,
    loras: Sequence[LoraRef] = (),
    patches: Mapping[Role, PatchSet] | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    keep_ema: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Saved:
    """Write `model` to `path` in its original single-file layout, with `loras` merged and then `patches`, in order. A
    diffusers folder becomes a file in the published layout of its family (`pool.models.saving.published_file`).

    Weights are computed as in runs: in float32, rounded once to their dtype in the file, or to `dtype`. Without LoRAs,
    patches or dtype every tensor of a file is copied byte for byte. One weight at a time is in memory. The tokenizer of
    a text encoder from a GGUF file is added to the file (`pool.models.saving.tokenizer_tensors`).

    patches   of a patcher (`ModelPatcher.patches`), by component
    dtype     for the weights of components; quantized ones become plain. None keeps each dtype, and quantized weights
              that are patched are quantized again in the same format
    metadata  in addition to the source's and the list of merges; overrides them
    keep_ema  averages of training; None keeps them if no weight changes. Folders have none

    Raises OutputFailed if the path exists (unless `overwrite`) or cannot be written; nothing is left there then.
    Raises AdapterMismatch, CorruptFile and PatchFailed as patching does, BadQuantization for a patched weight in a
    quantization format that cannot be written, UnusableField for numbers beyond the range of the dtype and for a folder
    of a family that is not saved as single files, UnknownArchitecture for a folder if its file would be read
    differently.
    """
    if path.suffix != SUFFIX:
        raise unusable_field("path", str(path), f"a name that ends in {SUFFIX}")
    expect_free(path, overwrite)
    found = patched_model(model, loras, patches)
    is_folder = bool(found.checkpoint.header.configs)
    if is_folder:
        expect_outside(path, Path(found.checkpoint.header.path))
    file = _file(found, dtype, keep_ema)
    tensors = (*file.tensors(), *tokenizer_tensors(found.checkpoint))
    facts = with_facts(file.metadata(), found.source, found.merged, is_folder or dtype is not None, metadata)
    left = left_out(found.checkpoint, ()) if is_folder else ()
    file_bytes = write_safetensors(path, tensors, facts, overwrite=overwrite, on_bytes=counting(tensors, progress))
    return Saved(path, file_bytes, len(tensors), found.patched, left_out=left)


def _file(model: PatchedModel, dtype: torch.dtype | None, keep_ema: bool | None) -> SingleFile | PublishedFile:
    """Return the plan of the file: the model's own file again, or the published form of its folder."""
    if model.checkpoint.header.configs:
        return PublishedFile(model.checkpoint, model.patches, dtype)
    return SingleFile(model.checkpoint, model.patches, dtype, keep_ema)


def patched_model(
    model: OpenModel | Checkpoint, loras: Sequence[LoraRef], patches: Mapping[Role, PatchSet] | None
) -> PatchedModel:
    """Return `model` with `loras` and then `patches`. Raises UnusableField for a component that it lacks, and for LoRAs
    on a bare checkpoint; AdapterMismatch and CorruptFile as `OpenModel.match` does."""
    checkpoint = model if isinstance(model, Checkpoint) else model.checkpoint
    component_patches, acting = dict(patches or {}), tuple(lora for lora in loras if lora.has_effect)
    if unknown := [role.value for role in component_patches if role not in checkpoint.roles]:
        known = ", ".join(role.value for role in checkpoint.roles)
        raise UnusableField(f"patches: found {', '.join(unknown)}, expected components of the model: {known}")
    for lora in acting:
        if lora.has_span:
            expected = "all steps: saved weights do not change over the schedule"
            found = f"{lora.start:g} to {lora.end:g}"
            raise UnusableField(f"loras: found {lora.name!r} from {found} of the schedule, expected {expected}")
        if lora.changes_in_run:
            expected = "one strength: saved weights change over neither steps nor texts"
            found = "keyframes" if lora.keyframes else f"only for {', '.join(lora.only)}"
            raise UnusableField(f"loras: found {lora.name!r} with {found}, expected {expected}")
        if lora.noise and Role.DIFFUSION_MODEL_2 not in checkpoint.roles:
            expected = f"nothing: {checkpoint.family.title} is one diffusion model, for all noise"
            raise UnusableField(f"loras: found {lora.name!r} for {lora.noise} noise, expected {expected}")
    if isinstance(model, Checkpoint):
        if loras:
            raise UnusableField("loras: found a bare checkpoint, expected an open model, which can match them")
        source, sets = Source(Path(checkpoint.header.path).name, None), component_patches
    else:
        source = Source(model.ref.name, model.ref.sha256)
        sets = {role: model.patch_set(role, acting) for role in checkpoint.roles if role is not Role.VAE}
        for role, patch_set in component_patches.items():
            sets[role] = sets.get(role, PatchSet()).with_patches(patch_set.patches)
    merged = [Merged(lora.name, lora.sha256, lora.strength, lora.noise) for lora in acting]
    merged += [Merged(role.value, each.digest, 1.0) for role, each in component_patches.items() if each.parameters]
    return PatchedModel(checkpoint, source, {r: each for r, each in sets.items() if each.parameters}, tuple(merged))


def counting(tensors: Sequence[TensorToWrite], progress: Progress | None) -> Callable[[int], None] | None:
    """Return a callback that reports to `progress` the bytes written so far of all `tensors`, called with the bytes of
    each block."""
    if progress is None:
        return None
    total_bytes, done_bytes = sum(tensor.storage_bytes for tensor in tensors), 0

    def on_bytes(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(done_bytes, total_bytes)

    return on_bytes
