"""`save_checkpoint`: a model with its patches as one file, in the layout that it came from or is published in.

The door for those that save. Knows models, LoRAs and what a file is to say of them; what its tensors become is
`pool.saving.single_file`, and of a folder's model `pool.saving.published_file`; a folder of diffusers is
`pool.saving.diffusers_folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modelpool.pool.core.errors import UnusableField, unusable_field
from modelpool.pool.core.stage_params import LoraRef
from modelpool.pool.formats.atomic_write import expect_free
from modelpool.pool.formats.safetensors_writer import TensorToWrite, write_safetensors
from modelpool.pool.loading.build_checkpoint import Checkpoint
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.patches.patch_set import PatchSet
from modelpool.pool.saving.left_out import left_out
from modelpool.pool.saving.metadata import Merged, Source, with_facts
from modelpool.pool.saving.published_file import PublishedFile
from modelpool.pool.saving.replaced_folder import expect_outside
from modelpool.pool.saving.single_file import SingleFile
from modelpool.pool.saving.tokenizer_tensors import tokenizer_tensors
from modelpool.pool.specs.spec import Role

SUFFIX = ".safetensors"
#: what weights can be saved in, by the name that a person gives it
SAVED_DTYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

#: told bytes that are written, and bytes in all
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written.

    tensors   how many
    patched   weights of the model that patches changed
    lacks     what a pipeline of diffusers reads and its folder has not, with the reason, in words
    left_out  tensors of the model that the other layout has no place for (`pool.saving.left_out`)
    """

    path: Path
    file_bytes: int
    tensors: int
    patched: int
    lacks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchedModel:
    """A model and what is to be done to it, resolved.

    patches  by component; those without any are left out
    merged   what the patches are, for the file to say
    """

    checkpoint: Checkpoint
    source: Source
    patches: Mapping[Role, PatchSet]
    merged: tuple[Merged, ...]

    @property
    def patched(self) -> int:
        """Weights that patches change."""
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
    """Write `model` to `path` in its original single-file layout, `loras` merged and then `patches`, in order. A folder
    of diffusers becomes a file in the layout that its family is published in (`pool.saving.published_file`).

    Weights are computed as runs compute them: in float32, rounded once into the type that the file has them in, or into
    `dtype`. Without any of these every tensor of a file comes back byte for byte. In memory is one weight at a time.
    The tokenizer of a text encoder that is a GGUF file goes into the file (`pool.saving.tokenizer_tensors`).

    patches   of a patcher (`ModelPatcher.patches`), by component
    dtype     for the weights of components; quantized ones become plain. None keeps each type, and quantized weights
              that are patched are quantized again in their own form
    metadata  beside the source's and what was merged, and before them
    keep_ema  averages of training; None keeps them where no weight changes. Folders have none

    Raises OutputFailed for a place that is taken (unless `overwrite`) or cannot be written: nothing is left there then.
    Raises AdapterMismatch, CorruptFile and PatchFailed as patching does, BadQuantization for a patched weight that is
    quantized in a form that is not made here, UnusableField for numbers beyond the range of the type and for a folder
    of a family that is not written so, UnknownArchitecture for a folder that a file would not be read as.
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
    """What is written of a model: its own file again, or the one that its folder would be."""
    if model.checkpoint.header.configs:
        return PublishedFile(model.checkpoint, model.patches, dtype)
    return SingleFile(model.checkpoint, model.patches, dtype, keep_ema)


def patched_model(
    model: OpenModel | Checkpoint, loras: Sequence[LoraRef], patches: Mapping[Role, PatchSet] | None
) -> PatchedModel:
    """`model` with `loras` and then `patches`. Raises UnusableField for a component that it has not, and for LoRAs on a
    bare checkpoint; AdapterMismatch and CorruptFile as `OpenModel.match` does."""
    checkpoint = model if isinstance(model, Checkpoint) else model.checkpoint
    given, acting = dict(patches or {}), tuple(lora for lora in loras if lora.strength != 0)
    if strange := [role.value for role in given if role not in checkpoint.roles]:
        known = ", ".join(role.value for role in checkpoint.roles)
        raise UnusableField(f"patches: found {', '.join(strange)}, expected components of the model: {known}")
    for lora in acting:
        if lora.noise and Role.DIFFUSION_MODEL_2 not in checkpoint.roles:
            expected = f"nothing: {checkpoint.family.title} is one diffusion model, for all noise"
            raise UnusableField(f"loras: found {lora.name!r} for {lora.noise} noise, expected {expected}")
    if isinstance(model, Checkpoint):
        if loras:
            raise UnusableField("loras: found a bare checkpoint, expected an open model, which knows what they are for")
        source, sets = Source(Path(checkpoint.header.path).name, None), given
    else:
        source = Source(model.ref.name, model.ref.sha256)
        sets = {role: model.patch_set(role, acting) for role in checkpoint.roles if role is not Role.VAE}
        for role, patch_set in given.items():
            sets[role] = sets.get(role, PatchSet()).with_patches(patch_set.patches)
    merged = [Merged(lora.name, lora.sha256, lora.strength, lora.noise) for lora in acting]
    merged += [Merged(role.value, each.digest, 1.0) for role, each in given.items() if each.parameters]
    return PatchedModel(checkpoint, source, {r: each for r, each in sets.items() if each.parameters}, tuple(merged))


def counting(tensors: Sequence[TensorToWrite], progress: Progress | None) -> Callable[[int], None] | None:
    """Tells `progress` of all bytes of `tensors` when it is told of each block's."""
    if progress is None:
        return None
    total_bytes, done_bytes = sum(tensor.storage_bytes for tensor in tensors), 0

    def on_bytes(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(done_bytes, total_bytes)

    return on_bytes
