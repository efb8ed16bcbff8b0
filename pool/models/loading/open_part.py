"""`OpenPart`: a model in a file of its own that runs use next to a checkpoint, mapped and built, with its sizes.

ControlNets, image prompt adapters, GLIGEN models and upscalers are parts. Weights are read only when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.models.loading.open_model import DTYPES, form_of
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.patcher.weight_bytes import component_spec, component_use, module_weights
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.open_weights import OpenWeights, open_weights

T = TypeVar("T")


def built_from(path: str, build: Callable[[OpenWeights], T]) -> T:
    """Map the file at `path` and return what `build` makes of its weights. Raises CorruptFile, or UnknownArchitecture
    with the path."""
    weights = open_weights(path, allow_pickle=True)  # was allowed when the reference was created
    try:
        return build(weights)
    except UnknownArchitecture as error:
        weights.expect_scales_read(weights.shapes)  # tensors that say scale may be the reason
        raise UnknownArchitecture(f"{path}: {error}") from None


class OpenPart:
    """One open part. Subclasses name its `role`."""

    role: ClassVar[Role]

    def __init__(
        self, key: ComponentKey, module: nn.Module, device: str | DeviceCapabilities, dtypes: Sequence[str] = DTYPES
    ) -> None:
        """`device` is as in `OpenModel`, `dtypes` as in `form_of`."""
        self.key = key
        self.weights = tuple(module_weights(module))
        self.form = form_of(self.role, self.weights, capabilities_of(device), dtypes)

    def spec(self) -> ComponentSpec:
        """Return its sizes."""
        return component_spec(self.key, self.role, self.weights, self.form)

    def use(self, passes: int = 1) -> ComponentUse:
        """Return what a run of `passes` steps needs of it."""
        return component_use(self.key, self.weights, self.form, PatchSet(), passes)
