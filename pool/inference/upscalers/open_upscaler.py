"""`OpenUpscaler`: the file of an upscaler, mapped and built, with its sizes, like `pool.models.loading.open_model` for
checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.inference.upscalers.build_upscaler import UpscalerPlan, plan_upscaler
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.loading.open_model import form_of
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import UpscalerRef, upscaler_key
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.patcher.weight_bytes import component_spec, component_use, module_weights
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.detect_layers import weight_shapes
from modelpool.pool.weights.quant.open_weights import open_weights
from modelpool.pool.weights.tracing.activation_bytes import peak_bytes
from modelpool.pool.weights.tracing.dry_run import META

#: edge of the image of a dry run: a multiple of every `RRDBNet.unshuffle`
_DRY_RUN_EDGE = 32
#: frames and edge of its latent
_DRY_RUN_FRAMES, _DRY_RUN_CELLS = 2, 8


class OpenUpscaler:
    """One open upscaler."""

    def __init__(self, ref: UpscalerRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as in `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        weights = open_weights(ref.path, allow_pickle=True)  # was allowed when the reference was created
        try:
            plan = plan_upscaler(weights.shapes)
            self.module = plan.build(weights)
        except UnknownArchitecture as error:
            weights.expect_scales_read(weights.shapes)  # tensors that say scale may be the reason
            raise UnknownArchitecture(f"{ref.path}: {error}") from None
        check_extra_tensors(weights, "upscaler", plan.unused)
        self._latent_channels = plan.latent_channels
        self.key = upscaler_key(ref)
        self.weights = tuple(module_weights(self.module))
        self.form = form_of(Role.UPSCALER, self.weights, capabilities_of(device))
        self._pixel_bytes: float | None = None

    def spec(self) -> ComponentSpec:
        """Return its sizes."""
        return component_spec(self.key, Role.UPSCALER, self.weights, self.form)

    def use(self, passes: int = 1) -> ComponentUse:
        """Return what a run needs of it."""
        return component_use(self.key, self.weights, self.form, PatchSet(), passes)

    def typical_call(self) -> Callable[[nn.Module], object]:
        """Return one call of typical size, with an input on the meta device, for dry runs."""
        dtype = self.form.compute_dtype
        shape: tuple[int, ...] = (1, 3, _DRY_RUN_EDGE, _DRY_RUN_EDGE)
        if self._latent_channels:
            shape = (1, self._latent_channels, _DRY_RUN_FRAMES, *[_DRY_RUN_CELLS] * 2)
        return lambda module: module(torch.empty(shape, dtype=dtype, device=META))

    def activation_bytes(self, width: int, height: int, frames: int = 1) -> int:
        """Return the device memory of enlarging a tile of this size, or a latent of so many cells, without weights.
        Every tensor of such a network has a number of values for each pixel, so one dry run tells the memory of all
        sizes."""
        pixels = _DRY_RUN_FRAMES * _DRY_RUN_CELLS**2 if self._latent_channels else _DRY_RUN_EDGE**2
        if self._pixel_bytes is None:
            counted = peak_bytes(self.module, self.form.compute_dtype, self.typical_call())
            self._pixel_bytes = counted / pixels
        step = getattr(self.module, "unshuffle", 1)
        return int(self._pixel_bytes * (width + -width % step) * (height + -height % step) * frames)


def upscaler_plan_of(path: str, *, allow_pickle: bool) -> UpscalerPlan:
    """Return the plan of the upscaler in the file at `path`, from its header alone. Raises CorruptFile, UnsafeFile,
    BadQuantization or UnknownArchitecture."""
    header = read_single_header(path, allow_pickle=allow_pickle)
    try:
        return plan_upscaler(weight_shapes(header))
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{path}: {error}") from None
