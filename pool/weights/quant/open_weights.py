"""Opens files of weights for every loader: checkpoints, text encoders, VAEs, ControlNets, adapters, upscalers, tiny
decoders, LoRAs, textual inversions. The only module that maps weights files.

What a loader gets are weights, never codes: a quantized weight is packed with its scales (`pool.weights.quant`), and
the tensors that describe it are left out. Codes with an unknown scale are an error that names them: on access, where
their type holds no weights, and by `expect_scales_read`, where a tensor beside them that no parameter uses says scale.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.weights.quant.detect_layers import QuantizedLayer, layers_in_file, logical_shapes
from modelpool.pool.weights.quant.mapped_file import MappedFile
from modelpool.pool.weights.quant.state_dict import pack
from modelpool.pool.weights.quant.unmarked_scales import expect_scales_read

#: types that no weight has as plain numbers
_CODE_TYPES = frozenset(
    {
        *("I8", "U8", "I16", "U16", "U32", "U64"),
        *("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class OpenWeights(Mapping[str, Tensor]):
    """The weights of an open file by key, quantized ones packed; each is created on access, as a view of the file.

    mapped  the file as it is stored
    layers  its quantized layers, by the key of their weight
    """

    mapped: MappedFile
    layers: Mapping[str, QuantizedLayer]
    #: shapes of weights that are stored padded, by key: only modules know them
    _unpadded: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def header(self) -> Header:
        """The header of the file."""
        return self.mapped.header

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the weights by key, quantization undone."""
        return logical_shapes(self.header.shapes, self.layers)

    def __getitem__(self, key: str) -> Tensor:
        """Return the weight `key`. Raises KeyError if there is none, BadQuantization for codes without a known scale,
        and as `MappedFile.tensor`."""
        layer = self.layers.get(key)
        if layer is not None:
            return pack(layer, self.mapped.tensors(), self._unpadded.get(key), file=self.header.path)
        dtype = self.header.tensors[key].dtype
        if dtype in _CODE_TYPES:
            raise BadQuantization(
                f"{self.header.path}: {key!r}: found codes of type {dtype} without a scale or marker, expected "
                f"floating point numbers, or a known format with its scales"
            )
        return self.mapped.tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, key: object) -> bool:
        return key in self.header.tensors

    def values_of(self, key: str) -> Tensor:
        """Return the weight `key` as a plain tensor: a quantized one as a new tensor in float32.

        Raises as access does, and BadQuantization for a format that pads weights: no module tells their true shape.
        """
        layer = self.layers.get(key)
        if layer is None:
            return self[key]
        if layer.format.pads_to > 1:
            raise BadQuantization(
                f"{self.header.path}: {key!r}: found {layer.format.name}, which is stored padded to multiples of "
                f"{layer.format.pads_to}, expected a format that keeps the shape"
            )
        return self[key].to(torch.float32)

    def with_shapes(self, shapes: Mapping[str, Shape]) -> OpenWeights:
        """Return the same weights without the padding of those that are stored padded to more than `shapes`."""
        return OpenWeights(self.mapped, self.layers, shapes)

    def expect_scales_read(self, unused: Iterable[str]) -> None:
        """Raise BadQuantization, naming both, if one of the tensors `unused`, which no parameter of a component uses,
        says by its name that it is a scale or zero point of 8-bit codes beside it."""
        expect_scales_read(self.header.tensors, unused, self.header.path)


def open_weights(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> OpenWeights:
    """Open the weights at `path`: a file, an index of shards or a folder. Reads headers and markers only.

    Raises CorruptFile and UnsafeFile as `read_part` does, and BadQuantization for layers that are not stored as their
    descriptions, scales and types require.
    """
    return _of(MappedFile.open(path, allow_pickle=allow_pickle))


def weights_of_header(header: Header) -> OpenWeights:
    """Open the files that `header` was read from. Raises as `open_weights`."""
    return _of(MappedFile.of(header))


def _of(mapped: MappedFile) -> OpenWeights:
    return OpenWeights(mapped, layers_in_file(mapped.header))
