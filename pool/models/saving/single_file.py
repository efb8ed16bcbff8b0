"""Plans each tensor of a single-file checkpoint that is saved again.

Rules, in this order:
1. Without a patch or a requested dtype a tensor is copied byte for byte, in file order; so are tensors that belong to
   no component (position tables, schedules, markers of trainers).
2. Averages of training (`model_ema.`) are copies of the weights before any patch: they are left out if weights change,
   unless requested.
3. A patched weight keeps its dtype. A quantized one is quantized again in the same format.
4. With a dtype the weights of components, and averages, get it, and quantized ones become plain; nothing else does.

Plans only: bytes are computed when the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from modelpool.pool.files.formats.ggml_types import is_block_type
from modelpool.pool.files.formats.safetensors_file import TensorEntry
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.saving.component_weights import ComponentWeights
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.dtypes import TORCH_DTYPES
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.detect_layers import METADATA_KEY as QUANTIZATION_KEY
from modelpool.pool.weights.quant.detect_layers import QuantizedLayer
from modelpool.pool.weights.quant.state_dict import pack
from modelpool.pool.weights.quant.tensor_bytes import (
    cast_tensor,
    computed_tensor,
    copied_tensor,
    tensor_blocks,
    unpacked_tensor,
)
from modelpool.pool.weights.quant.unmarked_scales import are_codes

EMA_PREFIX = "model_ema."

#: metadata that only a GGUF file has
_GGUF_METADATA = ("GGUF.", "general.", "split.", "tokenizer.ggml.")


class SingleFile:
    """A checkpoint's file with `patches`, in `dtype` (None: the dtypes of the file)."""

    def __init__(
        self, checkpoint: Checkpoint, patches: Mapping[Role, PatchSet], dtype: torch.dtype | None, keep_ema: bool | None
    ) -> None:
        """`keep_ema` None keeps averages if no weight changes. Raises as `ComponentWeights` does, and UnusableField for
        weights of GGUF files without a `dtype`."""
        self._checkpoint, self._dtype = checkpoint, dtype
        shapes = checkpoint.shapes
        #: the component of each weight
        self._roles = {key: role for role in checkpoint.roles for key in checkpoint.family.shapes_of(role, shapes)}
        #: quantized layers that are weights of components
        self._layers = {key: layer for key, layer in checkpoint.layers.items() if key in self._roles}
        #: weights in ggml's block formats, which only GGUF files have
        self._blocks = [key for key, entry in checkpoint.header.tensors.items() if is_block_type(entry.dtype)]
        refuse_blocks(checkpoint, dtype)
        self._components = {
            role: ComponentWeights(checkpoint, role, patches.get(role, PatchSet()))
            for role in checkpoint.roles
            if patches.get(role, PatchSet()).parameters or (dtype is not None and self._has_codes(role))
        }
        changes = dtype is not None or any(c.patches.parameters for c in self._components.values())
        self._keeps_ema = not changes if keep_ema is None else keep_ema

    def tensors(self) -> tuple[TensorToWrite, ...]:
        """Return every tensor to write, in order. Raises BadQuantization for a quantized weight that cannot be
        written."""
        parts = self._parts()
        return tuple(self._planned(self._checkpoint.header.tensors.values(), parts))

    def metadata(self) -> dict[str, str]:
        """Return the source's metadata without invalid entries."""
        kept = dict(self._checkpoint.header.metadata)
        if self._blocks:
            kept = {key: text for key, text in kept.items() if not key.startswith(_GGUF_METADATA)}
        if self._dtype is not None:
            kept.pop(QUANTIZATION_KEY, None)
        return kept

    def _has_codes(self, role: Role) -> bool:
        """Whether weights of a component are quantized, or might be: building it checks that all scales are used."""
        stored = self._checkpoint.header.tensors
        return any(key in self._layers or are_codes(stored[key]) for key, of in self._roles.items() if of is role)

    def _parts(self) -> dict[str, TensorToWrite | None]:
        """Return the replacements of the tensors that make up quantized weights, by key: None leaves one out. Those
        that are copied are not included."""
        if self._dtype is not None:
            foreign = {
                k for key, each in self._checkpoint.layers.items() if key not in self._layers for k in _keys(each)
            }
            inner = self._checkpoint.header.tensors.keys() - self._checkpoint.shapes.keys() - foreign
            blocks = [key for key in self._blocks if self._keeps_ema or not key.startswith(EMA_PREFIX)]
            return {**dict.fromkeys(inner), **{key: self._plain(key) for key in (*self._layers, *blocks)}}
        found: dict[str, TensorToWrite | None] = {}
        for key, layer in self._layers.items():
            component = self._components.get(self._roles[key])
            if component is not None and component.is_patched(key):
                found.update(self._packed(component, layer))
        return found

    def _packed(self, component: ComponentWeights, layer: QuantizedLayer) -> Iterator[tuple[str, TensorToWrite]]:
        """Yield the parts of a patched quantized weight. Each is quantized when it is written, so that none stays in
        memory: the seed makes them parts of one weight."""
        header = self._checkpoint.header
        name = component.expect_packable(layer.key, header.path)
        for part, key in layer.parts.items():
            yield key, _part(component, name, part, header.tensors[key])

    def _plain(self, key: str) -> TensorToWrite:
        """Return a quantized weight as plain numbers, also one that no module reads: the last layer of a text
        encoder."""
        assert self._dtype is not None
        role = self._roles.get(key)
        if role is not None and key not in self._components[role].key_map.unused:
            return self._from_component(key, self._dtype)
        mapped, layer, shape = self._checkpoint.mapped, self._layers.get(key), self._checkpoint.shapes[key]
        if layer is None:
            return unpacked_tensor(key, self._dtype, lambda: mapped.tensor(key), shape)
        return unpacked_tensor(
            key, self._dtype, lambda: pack(layer, mapped.tensors(), shape, file=mapped.header.path), shape
        )

    def _from_component(self, key: str, dtype: torch.dtype) -> TensorToWrite:
        component = self._components[self._roles[key]]
        return computed_tensor(key, dtype, component.key_map.sources[key], lambda: component.source(key, dtype))

    def _planned(
        self, entries: Iterable[TensorEntry], parts: Mapping[str, TensorToWrite | None]
    ) -> Iterator[TensorToWrite]:
        for entry in entries:
            if entry.name in parts:
                part = parts[entry.name]
                if part is not None:
                    yield part
            elif not entry.name.startswith(EMA_PREFIX) or self._keeps_ema:
                yield self._tensor(entry)

    def _tensor(self, entry: TensorEntry) -> TensorToWrite:
        """Return the plan of a tensor that is no part of a quantized weight, or of an unchanged one."""
        key, stored = entry.name, TORCH_DTYPES.get(entry.dtype)
        role = self._roles.get(key)
        component = None if role is None else self._components.get(role)
        if component is not None and key not in self._layers and component.is_patched(key):
            assert stored is not None, f"{key}: detect rejects {entry.dtype}"
            return self._from_component(key, self._dtype or stored)
        is_weight = role is not None or key.startswith(EMA_PREFIX)
        if (
            self._dtype is None
            or not is_weight
            or stored is None
            or stored is self._dtype
            or not stored.is_floating_point
        ):
            return copied_tensor(self._checkpoint.mapped, key)
        return cast_tensor(self._checkpoint.mapped, key, self._dtype)


def refuse_blocks(checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
    """Raise UnusableField if a checkpoint has weights in GGUF blocks and no `dtype` to save them in is specified."""
    header = checkpoint.header
    count = sum(is_block_type(entry.dtype) for entry in header.tensors.values())
    if dtype is None and count:
        expected = f"a plain dtype for the {counted(count, 'weight')} of {header.path} that are in GGUF blocks"
        raise unusable_field("dtype", "none", expected)


def _keys(layer: QuantizedLayer) -> Iterable[str]:
    return (layer.key, *layer.parts.values(), *layer.other)


def _part(component: ComponentWeights, name: str, part: str, entry: TensorEntry) -> TensorToWrite:
    """Return the plan of one part of the patched packed parameter `name`, in the form of `entry` in the file."""

    def blocks() -> Iterator[memoryview]:
        packed: PackedWeight = component.packed(name)
        return tensor_blocks(packed.parts[part].reshape(entry.shape))

    make: Callable[[], Iterator[memoryview]] = blocks
    return TensorToWrite(entry.name, entry.dtype, entry.shape, make)
