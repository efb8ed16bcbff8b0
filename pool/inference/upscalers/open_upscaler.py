"""`OpenUpscaler`: the file of an upscaler, mapped and built, with its sizes, like `pool.models.loading.open_model` for
checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.inference.upscalers.build_upscaler import UpscalerPlan, plan_upscaler
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.loading.open_part import OpenPart, built_from
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import UpscalerRef, upscaler_key
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.detect_layers import weight_shapes
from modelpool.pool.weights.quant.open_weights import OpenWeights
from modelpool.pool.weights.tracing.activation_bytes import peak_bytes
from modelpool.pool.weights.tracing.dry_run import META

#: edge of the image of a dry run: a multiple of every `RRDBNet.unshuffle`
_DRY_RUN_EDGE = 32
#: frames and edge of its latent
_DRY_RUN_FRAMES, _DRY_RUN_CELLS = 2, 8


def _built(weights: OpenWeights) -> tuple[UpscalerPlan, nn.Module]:
    plan = plan_upscaler(weights.shapes)
    module: nn.Module = plan.build(weights)
    check_extra_tensors(weights, "upscaler", plan.unused)
    return plan, module


class OpenUpscaler(OpenPart):
    """One open upscaler."""

    role = Role.UPSCALER

    def __init__(self, ref: UpscalerRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as in `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        plan, self.module = built_from(ref.path, _built)
        self._latent_channels = plan.latent_channels
        super().__init__(upscaler_key(ref), self.module, device)
        self._pixel_bytes: float | None = None

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
