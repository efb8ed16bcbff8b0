"""`OpenImagePrompt`: the file of an image prompt adapter, mapped and built, its sizes, and the models that it fits.

Used by the engine and the catalog. Weights are read only when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.inference.image_prompts.adapter import AdapterPlan, ImagePromptAdapter, plan_adapter
from modelpool.pool.inference.image_prompts.layouts import BlockReading
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.loading.open_part import OpenPart, built_from
from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.core.stage_params import ImagePromptRef, image_prompt_key
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.blocks.diffusers_names import block_lists, cross_attentions
from modelpool.pool.weights.quant.open_weights import OpenWeights
from modelpool.pool.weights.tracing.dry_run import META

#: the diffusion models by the width of the text that they read, for messages
_TITLES = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "Stable Diffusion XL"}
#: name of the models that Redux appends to, and that some IP-Adapters are for (`OptionFacts.image_prompts`)
_FLUX = "flux"
#: states of one image in a typical call
_TYPICAL_STATES = 257


def _built(weights: OpenWeights) -> tuple[AdapterPlan, ImagePromptAdapter]:
    plan = plan_adapter(weights.shapes)
    module: ImagePromptAdapter = plan.build(weights)
    check_extra_tensors(weights, "image prompt adapter", plan.unused)
    return plan, module


class OpenImagePrompt(OpenPart):
    """One open image prompt adapter. A run calls it once, before the first step."""

    role = Role.IMAGE_PROMPT

    def __init__(self, ref: ImagePromptRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as in `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        self.plan, self.module = built_from(ref.path, _built)
        super().__init__(image_prompt_key(ref), self.module, device)

    def typical_call(self) -> Callable[[nn.Module], object]:
        """Return one call of typical size, with inputs on the meta device, for dry runs."""
        return self.call_of(1)

    def call_of(self, images: int, states: int = _TYPICAL_STATES) -> Callable[[nn.Module], object]:
        """Return a call for `images` images, with inputs on the meta device."""
        plan, dtype = self.plan, self.form.compute_dtype

        def call(module: nn.Module) -> object:
            assert isinstance(module, ImagePromptAdapter)
            seen = torch.empty((images, states, plan.state_width), dtype=dtype, device=META)
            faces = torch.empty((images, plan.face_width), dtype=dtype, device=META) if plan.face_width else None
            return module.keys_and_values(module.tokens(seen, faces))

        return call

    def held_bytes(self, rows: int, images: int) -> int:
        """Return the bytes of the keys and values that a run with `rows` rows holds, each of `images` images."""
        tokens = images * (self.plan.tokens or _TYPICAL_STATES)
        widths = sum(width for width, _ in self.plan.layers)
        return 2 * rows * tokens * widths * self.form.compute_dtype.itemsize

    def check_fits(self, model: OpenModel) -> None:
        """Raise UnusableField unless it is for diffusion models like `model`'s."""
        family, name, plan = model.checkpoint.family, self.ref.name, self.plan
        kind = plan.kind
        found = f"{kind.title} {name!r}"
        if kind.appends:
            if family.sampling.model not in _models_of(_FLUX):
                expected = f"an adapter for models like {model.ref.name!r} ({family.title})"
                raise unusable_field("image_prompts", f"{found} for Flux", expected)
            built: Any = model.component(Role.DIFFUSION_MODEL).built.module
            if built.config.joint_attention_dim != plan.text_width:
                words = f"text width {built.config.joint_attention_dim}"
                raise unusable_field("image_prompts", f"{found} of text width {plan.text_width}", words)
            return
        if kind.blocks is not None:
            self._check_blocks(model, found)
            return
        title = _TITLES.get(plan.text_width, f"UNets of text width {plan.text_width}")
        if family.sampling.model or Role.DIFFUSION_MODEL not in family.prefixes:
            raise UnusableField(
                f"image_prompts: not supported by model {model.ref.name!r}; {found} is for {title}, not {family.title}"
            )
        unet = model.component(Role.DIFFUSION_MODEL).built.module
        read = [(a.to_k.out_features, a.to_k.in_features) for _, _, a in _in_file_order(unet)]
        if list(plan.layers) != read:
            words = f"an adapter for models like {model.ref.name!r} ({family.title}: {_layers(read)})"
            raise unusable_field("image_prompts", f"{found} for {title} ({_layers(list(plan.layers))})", words)

    def _check_blocks(self, model: OpenModel, found: str) -> None:
        """Check that the layers are those for the blocks of `model`."""
        family, plan = model.checkpoint.family, self.plan
        expected = f"an adapter for models like {model.ref.name!r} ({family.title}"
        if family.sampling.model not in _models_of(_FLUX):
            raise unusable_field("image_prompts", f"{found} for Flux", f"{expected})")
        module: Any = model.component(Role.DIFFUSION_MODEL).built.module
        counts = {name: len(blocks) for name, blocks in block_lists(module)}
        reads_all = plan.kind.blocks is BlockReading.IN_ATTENTION
        count = counts["double_block"] + (counts["single_block"] if reads_all else 0)
        read = [(int(module.inner_dim), int(module.config.joint_attention_dim))] * count
        if list(plan.layers) != read:
            own, wanted = _layers(list(plan.layers), "layers"), _layers(read, "layers")
            raise unusable_field("image_prompts", f"{found} for Flux ({own})", f"{expected}: {wanted})")


def _models_of(adapters: str) -> frozenset[str]:
    """Return the families that image prompt adapters of this name are for."""
    return frozenset(family.name for family in defined_families() if family.options.image_prompts == adapters)


def _in_file_order(unet: nn.Module) -> list[tuple[str, int, Any]]:
    return sorted(cross_attentions(unet), key=lambda each: each[1])


def _layers(layers: list[tuple[int, int]], what: str = "cross-attentions") -> str:
    widths = sorted({text for _, text in layers})
    return f"{len(layers)} {what}, text width {', '.join(map(str, widths))}"
