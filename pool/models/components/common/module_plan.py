"""`ModulePlan`: how a module is built from the tensors of a file, the same for every component."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from modelpool.pool.models.components.common.fitted_key_map import within
from modelpool.pool.weights.keymaps.key_map import KeyMap
from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill


class ModulePlan(ABC):
    """The plan for building a module from a file.

    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    __slots__ = ()
    key_map: KeyMap

    @abstractmethod
    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """Return the module without weights, and the key map without tensors that it has no parameter for.

        Raises UnknownArchitecture if the file lacks tensors of the class, has some in other shapes, or has more layers.
        """

    def complete(self, module: nn.Module) -> None:
        """Fill the tables of `module` that no file has, after its weights are set."""
        return

    def empty(self) -> nn.Module:
        """Return the module without weights. Raises as `fitting`."""
        return self.fitting()[0]

    def build(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the module over `tensors` (keys as in the file), in evaluation mode, without gradients. Raises as
        `fitting`."""
        module, key_map = self.fitting()
        fill(module, key_map.load(tensors))
        self.complete(module)
        assert_filled(module)
        return module

    def save(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the file's tensors from `module`'s parameters; tensors that it does not use come from `tensors`."""
        key_map = within(self.key_map, module.state_dict())
        return key_map.save(module.state_dict()) | {key: tensors[key] for key in key_map.unused}
