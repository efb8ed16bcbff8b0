"""Applies a run's options to a UNet of the Stable Diffusion kind: attention, blocks, skip connections, timestep
embedding.

Knows what each option means between the UNet's layers; `diffusers_names` knows the names of the layers.

Shape legend: B batch, C channels, H W cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import (
    Extra,
    LayerHandler,
    Patch,
    PatchPoint,
    ReplacePoint,
    TransformerOptions,
)
from modelpool.pool.weights.patcher.blocks.attention_patches import ATTENTION_POINTS, AttentionPlace, PatchedAttention
from modelpool.pool.weights.patcher.blocks.diffusers_names import (
    UnetBlockInfo,
    attentions_of,
    is_plain_attention,
    unet_blocks,
)
from modelpool.pool.weights.patcher.blocks.overlays import ForwardWrapper, Overlays

#: options that do not apply to a UNet
_UNSUPPORTED = (
    PatchPoint.DOUBLE_BLOCK,
    PatchPoint.POST_INPUT,
    PatchPoint.DIT_ATTENTION_ADDITION,
    PatchPoint.DIT_BLOCK_ADDITION,
)


class UnetInstaller:
    """Installs the overlays for one run's options on one UNet. Only layers that an option names get one."""

    def __init__(self, unet: nn.Module, options: TransformerOptions, overlays: Overlays) -> None:
        self._unet, self._options, self._overlays = unet, options, overlays
        self._blocks = unet_blocks(unet)
        self._input_shape: tuple[int, ...] = ()
        #: the positions of this UNet's attentions, as options name them
        self._attentions: list[AttentionPlace] = []

    def install(self) -> None:
        """Install all overlays. Raises UnusableField, with some of them installed, if an option does not apply here."""
        self._refuse_unsupported()
        self._overlays.put(self._unet, self._remember_shape)
        self._install_attention()
        self._refuse_unmatched()
        self._install_handlers()
        for block in self._blocks:
            self._install_block(block)
        if patches := self._patches(PatchPoint.EMB_PATCH):
            plain: Any = self._unet
            width = int(plain.config.block_out_channels[0])
            self._overlays.put(plain.time_embedding, _after(lambda e: _each(patches, e, width, self._extra())))

    def _refuse_unsupported(self) -> None:
        found = [point.value for point in _UNSUPPORTED if self._patches(point)]
        found += [ReplacePoint.DIT.value] * bool(self._options.patches_replace.get(ReplacePoint.DIT))
        found += ["rope_options"] * (self._options.rope is not None)
        if found:
            raise unusable_field("transformer options", ", ".join(found), "options that apply to a UNet")
        if self._patches(PatchPoint.MIDDLE_BLOCK_PATCH) and not any(b.key[0] == "middle" for b in self._blocks):
            raise unusable_field(
                PatchPoint.MIDDLE_BLOCK_PATCH.value, "a UNet without a middle block", "one that has it"
            )

    def _refuse_unmatched(self) -> None:
        """Refuse patches and replacements that match no attention; call after all attentions were visited."""
        if self._patches(PatchPoint.ATTN2_ADDITION) and not any(place.name == "attn2" for place in self._attentions):
            raise unusable_field(PatchPoint.ATTN2_ADDITION.value, "a UNet without attn2", "one that has it")
        for name, points in ATTENTION_POINTS.items():
            places = [place for place in self._attentions if place.name == name]
            for point in points.patches:
                if self._patches(point) and not places:
                    raise unusable_field(point.value, f"a UNet without {name}", "one that has it")
            known = {key for place in places for key in place.keys}
            for key in self._options.patches_replace.get(points.replace, {}):
                if key not in known:
                    listed = ", ".join(map(str, sorted(known))) or "none"
                    raise unusable_field(f"{name} replacement", key, f"a place of {name} in this UNet: {listed}")

    def _install_attention(self) -> None:
        transformer_index = 0
        for block in self._blocks:
            for layer in block.layers:
                indices = set()
                for index, name, attention in attentions_of(self._unet.get_submodule(layer)):
                    place = AttentionPlace(name, block.key, index, transformer_index + index)
                    self._attentions.append(place)
                    patched = PatchedAttention(attention, place, self._options, lambda: self._input_shape)
                    if patched.computes and not is_plain_attention(attention):
                        raise unusable_field(f"patches of {layer} {name}", type(attention).__name__, "plain attention")
                    if patched.does_something:
                        self._overlays.put(attention, patched)
                    indices.add(index)
                transformer_index += len(indices)

    def _install_handlers(self) -> None:
        point = PatchPoint.FORWARD_TIMESTEP_EMBED_PATCH
        layers = [(block, self._unet.get_submodule(name)) for block in self._blocks for name in block.layers]
        handlers: list[LayerHandler] = []
        for handler in self._patches(point):
            if not isinstance(handler, LayerHandler):
                raise unusable_field(point.value, handler, "a layer class and a function")
            handlers.append(handler)
            if not any(isinstance(layer, handler.layer_class) for _, layer in layers):
                known = sorted({type(layer).__name__ for _, layer in layers})
                expected = f"the class of a layer of this UNet: {', '.join(known)}"
                raise unusable_field(point.value, handler.layer_class.__name__, expected)
        for block, layer in layers:
            first = next((h for h in handlers if isinstance(layer, h.layer_class)), None)
            if first is not None:
                self._overlays.put(layer, self._handled(layer, first, block.key))

    def _handled(self, layer: nn.Module, handler: LayerHandler, key: tuple[str, int]) -> ForwardWrapper:
        def wrapper(original: Callable[..., Any], x_BCHW: Tensor, *args: Any, **kwargs: Any) -> Any:
            emb = kwargs.get("temb", args[0] if args and isinstance(args[0], Tensor) else None)
            context = kwargs.get("encoder_hidden_states")
            out_BCHW = handler(layer, x_BCHW, emb, context, self._extra(block=key))
            return (out_BCHW,) if attention_layer else out_BCHW

        attention_layer = any(True for _ in attentions_of(layer))
        return wrapper

    def _install_block(self, block: UnetBlockInfo) -> None:
        kind = block.key[0]
        first, last = (self._unet.get_submodule(block.layers[i]) for i in (0, -1))
        if kind == "input":
            self._change(last, _after, PatchPoint.INPUT_BLOCK_PATCH, block)
            if self._patches(PatchPoint.INPUT_BLOCK_PATCH_AFTER_SKIP):
                # the skip connection is stored by then: only the input of the next block changes
                reader = self._unet.get_submodule(self._reader_of(block).layers[0])
                self._change(reader, _before, PatchPoint.INPUT_BLOCK_PATCH_AFTER_SKIP, block)
        elif kind == "middle":
            self._change(last, _after, PatchPoint.MIDDLE_BLOCK_PATCH, block)
        elif patches := self._patches(PatchPoint.OUTPUT_BLOCK_PATCH):
            self._overlays.put(first, _before(lambda h: self._join_patched(patches, h, block)))

    def _change(
        self,
        layer: nn.Module,
        place: Callable[[Callable[[Tensor], Tensor]], ForwardWrapper],
        point: PatchPoint,
        block: UnetBlockInfo,
    ) -> None:
        """Install the patches of `point` on the input or the result of `layer`."""
        patches = self._patches(point)
        if patches:
            self._overlays.put(layer, place(lambda h: _each(patches, h, self._extra(block=block.key))))

    def _join_patched(self, patches: tuple[Patch, ...], joined_BCHW: Tensor, block: UnetBlockInfo) -> Tensor:
        width = joined_BCHW.shape[1] - block.skip_channels
        h_BCHW, skip_BCHW = joined_BCHW[:, :width], joined_BCHW[:, width:]
        for patch in patches:
            h_BCHW, skip_BCHW = patch(h_BCHW, skip_BCHW, self._extra(block=block.key))
        return torch.cat([h_BCHW, skip_BCHW], dim=1)

    def _reader_of(self, block: UnetBlockInfo) -> UnetBlockInfo:
        """Return the block that reads the result of the input block `block`, skip connections excluded."""
        following = self._blocks[self._blocks.index(block) + 1]
        if following.key[0] == "output":  # its input already includes the skip connection
            raise unusable_field("input_block_patch_after_skip", "a UNet without a middle block", "one that has it")
        return following

    def _patches(self, point: PatchPoint) -> tuple[Patch, ...]:
        return self._options.patches.get(point, ())

    def _extra(self, **known: Any) -> Extra:
        return extra_options(self._options, original_shape=self._input_shape, **known)

    def _remember_shape(self, original: Callable[..., Any], sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._input_shape = tuple(sample.shape)
        return original(sample, *args, **kwargs)


def _each(patches: tuple[Patch, ...], value: Tensor, *more: Any) -> Tensor:
    """Apply all `patches` to `value` in turn."""
    for patch in patches:
        value = patch(value, *more)
    return value


def _after(change: Callable[[Tensor], Tensor]) -> ForwardWrapper:
    """Change a layer's result; of an attention layer's tuple, the first element."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return wrapper


def _before(change: Callable[[Tensor], Tensor]) -> ForwardWrapper:
    """Change a layer's first argument."""

    def wrapper(original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(change(x), *args, **kwargs)

    return wrapper
