"""`OpenGligen`: the file of a GLIGEN model, mapped and built, its sizes, and the models that it fits.

Used by the engine and the catalog. Weights are read only when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.inference.controlnets.gligen import HEADS, Gligen, GligenPlan, plan_gligen
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.loading.open_part import OpenPart, built_from
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.refs import MOST_BOXES
from modelpool.pool.values.core.stage_params import GligenRef, gligen_key
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.blocks.diffusers_names import cross_attentions
from modelpool.pool.weights.quant.open_weights import OpenWeights
from modelpool.pool.weights.tracing.dry_run import META

#: rows of the image in the first block in a typical call: an image of 512x512 pixels, for both texts of guidance
_TYPICAL_ROWS, _TYPICAL_TEXTS = 64 * 64, 2


def _built(weights: OpenWeights) -> tuple[GligenPlan, Gligen]:
    plan = plan_gligen(weights.shapes)
    module: Gligen = plan.build(weights)
    check_extra_tensors(weights, "GLIGEN model", plan.unused)
    return plan, module


class OpenGligen(OpenPart):
    """One open GLIGEN model."""

    role = Role.GLIGEN

    def __init__(self, ref: GligenRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as in `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        self.plan, self.module = built_from(ref.path, _built)
        super().__init__(gligen_key(ref), self.module, device)

    def typical_call(self) -> Callable[[nn.Module], object]:
        """Return one call of typical size, with inputs on the meta device, for dry runs: all its layers."""
        plan, empty = self.plan, self._empty

        def call(module: nn.Module) -> object:
            assert isinstance(module, Gligen)
            module.tokens(empty(1, plan.text_width), torch.empty((1, 4), device=META))
            for number, width in enumerate(plan.widths):
                rows = max(1, _TYPICAL_ROWS * plan.widths[0] ** 2 // width**2)
                shapes = (_TYPICAL_TEXTS, rows, width), (_TYPICAL_TEXTS, MOST_BOXES, plan.token_width)
                module.fused(number, empty(*shapes[0]), empty(*shapes[1]))
            return None

        return call

    def call_of(self, texts: int, rows: int) -> Callable[[nn.Module], object]:
        """Return the call of its first layer, which needs most, for so many texts and rows of the image."""
        plan, empty = self.plan, self._empty

        def call(module: nn.Module) -> object:
            return module(empty(texts, rows, plan.widths[0]), empty(texts, MOST_BOXES, plan.token_width))

        return call

    def held_bytes(self, rows: int) -> int:
        """Return the bytes of the tokens that a run holds, for so many tasks and the negative text, and for a call."""
        return 2 * rows * MOST_BOXES * self.plan.token_width * self.form.compute_dtype.itemsize

    def check_fits(self, model: OpenModel) -> None:
        """Raise UnusableField unless it is for diffusion models like `model`'s, and for its text encoder."""
        family, plan = model.checkpoint.family, self.plan
        found = f"GLIGEN model {self.ref.name!r}"
        if family.sampling.model or family.text_set or Role.DIFFUSION_MODEL not in family.prefixes:
            raise UnusableField(f"gligen: not supported by model {model.ref.name!r} of {family.title}: {found} is for "
                                "UNets with one text encoder, as of Stable Diffusion 1")  # fmt: skip
        if len(family.text_encoders) != 1:
            raise unusable_field("gligen", found, f"a model with one text encoder, not {family.title}")
        blocks: list[Any] = [attention for _, _, attention in cross_attentions(self._unet(model))]
        widths = tuple(int(each.to_q.in_features) for each in blocks)
        if plan.widths != widths:
            words = f"one for models like {model.ref.name!r} ({family.title}: {_described(widths)})"
            raise unusable_field("gligen", f"{found} of {_described(plan.widths)}", words)
        if heads := sorted({int(each.heads) for each in blocks} - {HEADS}):
            raise unusable_field("gligen", f"{found} of {HEADS} heads", f"one of {heads[0]}, as of {model.ref.name!r}")
        encoder: Any = model.component(family.text_encoders[0]).built.module
        if (width := int(encoder.config.hidden_size)) != plan.text_width:
            words = f"one for texts of width {width}, as of model {model.ref.name!r}"
            raise unusable_field("gligen", f"{found} for texts of width {plan.text_width}", words)

    def _unet(self, model: OpenModel) -> nn.Module:
        module: nn.Module = model.component(Role.DIFFUSION_MODEL).built.module
        return module

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.form.compute_dtype, device=META)


def _described(widths: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, sorted(set(widths))))
    return f"{counted(len(widths), 'block')} of width {listed}"
