"""Computes the weights of one component with patches, one at a time.

Uses the arithmetic of runs: float32, rounded once at the end, 8-bit floats and quantized weights stochastically with
the seed of the weight's name (`pool.weights.patches.stochastic_rounding`). One weight at a time is in memory. Does not
know files, nor the form in which a weight is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.loading.build_checkpoint import BuiltComponent, Checkpoint
from modelpool.pool.values.core.errors import BadQuantization, PatchFailed
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import KeyMap
from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightFunction
from modelpool.pool.weights.patches.stochastic_rounding import round_to, seed_of
from modelpool.pool.weights.quant.quantize import can_requantize, requantize
from modelpool.pool.weights.quant.tensor_bytes import expect_in_range

_HOST = torch.device("cpu")


class ComponentWeights:
    """The parameters of one component of a checkpoint with `patches`.

    Builds a separate module, independent of a pool's modules.
    """

    def __init__(self, checkpoint: Checkpoint, role: Role, patches: PatchSet) -> None:
        """Raises PatchFailed for a patch that fits no parameter, or would change a weight's shape."""
        self.built: BuiltComponent = checkpoint.build(role)
        self.patches = patches
        self._hosts: dict[str, Tensor] = {name: p.data for name, p in self.built.module.named_parameters()}
        shapes = self.shapes
        patches.check(shapes)
        for name in sorted(patches.parameters):
            found = patches.patched_shape(name, shapes[name])
            if found != shapes[name]:
                raise PatchFailed(
                    f"{patches.patches_for(name)[0].name}: it changes the shape {shapes[name]} to {found}, expected "
                    f"the same shape for a saved model"
                )

    @property
    def key_map(self) -> KeyMap:
        """The map between the checkpoint's tensors and the parameters."""
        return self.built.key_map

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each parameter, in the order of the module."""
        return {name: tuple(host.shape) for name, host in self._hosts.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter on the host; of a packed one, its unpacked values' dtype."""
        return self._hosts[name].dtype

    def statistics(self) -> dict[str, Tensor]:
        """Return the buffers of its file that no patch changes, such as counters of batch norms."""
        carried = self.built.module.state_dict().keys()
        return {name: value for name, value in self.built.module.named_buffers() if name in carried}

    def is_patched(self, key: str) -> bool:
        """Whether the checkpoint's tensor `key` becomes a parameter that a patch changes."""
        return any(target.key in self.patches.parameters for target in self.key_map.targets(key))

    def parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one parameter with its patches, in `dtype`; unpacked if it is packed.

        Raises UnusableField if `dtype` cannot hold one of its numbers.
        """
        host, functions = self._hosts[name], self.patches.functions(name)
        if not functions and not isinstance(host, PackedWeight):
            before, result = host, host.to(dtype)
        else:
            before = self._values(host, functions, torch.float64 if dtype is torch.float64 else torch.float32)
            result = round_to(before, dtype, seed_of(name))
        expect_in_range(name, before, result)
        return result

    def source(self, key: str, dtype: torch.dtype, key_map: KeyMap | None = None) -> Tensor:
        """Return the checkpoint's tensor `key` with its patches, in `dtype`; with a `key_map` between another layout
        and the same parameters, that layout's tensor. Raises as `parameter` does."""
        return (key_map or self.key_map).source(key, _Parameters(self, dtype))

    def expect_packable(self, key: str, file: str) -> str:
        """Return the parameter of the checkpoint's quantized weight `key`, if patches can be stored in it.

        Raises BadQuantization, naming the file and a remedy, if its format cannot be written, or if the module has it
        in a form that the format cannot represent.
        """
        targets = self.key_map.targets(key)
        host = self._hosts[targets[0].key] if targets else None
        if len(targets) != 1 or targets[0].operations or not isinstance(host, PackedWeight) or not can_requantize(host):
            form = host.codec.name if isinstance(host, PackedWeight) else "a file-specific form"
            raise BadQuantization(
                f"{file}: {key!r}: patches cannot be stored in a weight quantized like this ({form}), expected "
                f"a format that can be written, or a dtype to save plain weights in"
            )
        return targets[0].key

    def packed(self, name: str) -> PackedWeight:
        """Return a packed parameter with its patches, packed in the same format, as checked by `expect_packable`."""
        host = self._hosts[name]
        assert isinstance(host, PackedWeight), f"{name} is not packed"
        values = self._values(host, self.patches.functions(name), torch.float32)
        return requantize(values, host, seed_of(name), name)

    def _values(self, host: Tensor, functions: Sequence[WeightFunction], dtype: torch.dtype) -> Tensor:
        return apply_weight_functions(host, functions, _HOST, dtype, _stays)


class _Parameters(Mapping[str, Tensor]):
    """The parameters of a component in one dtype; each is computed on access."""

    def __init__(self, weights: ComponentWeights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._weights.parameter(name, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.shapes)

    def __len__(self) -> int:
        return len(self._weights.shapes)


def _stays(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)
