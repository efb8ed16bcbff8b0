"""Applies a run's options to a diffusion transformer: replaced blocks, patched results and first inputs, rotary
positions.

Works on every transformer of diffusers with blocks in lists: argument names come from a block's signature, the
order of its results from `diffusers_names`.

Shape legend: B batch, L tokens, D model width, H heads, E width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import (
    Extra,
    Patch,
    PatchPoint,
    ReplacePoint,
    TransformerOptions,
)
from modelpool.pool.weights.patcher.blocks import diffusers_names as names
from modelpool.pool.weights.patcher.blocks.overlays import Overlays
from modelpool.pool.weights.patcher.blocks.rotary import PlacedGrid, grid_rope, placed_ids

Values = dict[str, Any]
#: options that apply to a transformer
_SUPPORTED = (
    PatchPoint.DOUBLE_BLOCK,
    PatchPoint.POST_INPUT,
    PatchPoint.DIT_ATTENTION_ADDITION,
    PatchPoint.DIT_BLOCK_ADDITION,
)


class DitInstaller:
    """Installs the overlays for one run's options on one transformer. Only blocks that an option names get one."""

    def __init__(self, module: nn.Module, options: TransformerOptions, overlays: Overlays) -> None:
        self._module, self._options, self._overlays = module, options, overlays
        self._blocks = [
            (kind, number, block) for kind, blocks in names.block_lists(module) for number, block in enumerate(blocks)
        ]
        self._signature = inspect.signature(type(module).forward)
        self._has_ids = "img_ids" in self._signature.parameters
        self._call: Values = {}

    def install(self) -> None:
        """Install all overlays. Raises UnusableField, with some of them installed, if an option does not apply here."""
        self._refuse_unsupported()
        self._overlays.put(self._module, self._enter)
        if self._options.rope is not None and not self._has_ids and (rope := grid_rope(self._module)) is not None:
            self._overlays.put(rope, PlacedGrid(rope, self._options.rope))
        table = self._options.patches_replace.get(ReplacePoint.DIT, {})
        after = self._options.patches.get(PatchPoint.DOUBLE_BLOCK, ())
        first = self._options.patches.get(PatchPoint.POST_INPUT, ())
        for place, (kind, number, block) in enumerate(self._blocks):
            self._install_additions(place, (kind, number), block)
            replacement = table.get((kind, number))
            patches = after if kind == "double_block" else ()
            inputs = first if block is self._blocks[0][2] else ()
            if replacement is not None or patches or inputs:
                self._overlays.put(block, self._around(block, (kind, number), replacement, patches, inputs))

    def _refuse_unsupported(self) -> None:
        kind = type(self._module).__name__
        found = [point.value for point in self._options.patches if point not in _SUPPORTED]
        found += [where.value for where in self._options.patches_replace if where is not ReplacePoint.DIT]
        kinds = {block_kind for block_kind, _, _ in self._blocks}
        if not kinds and self._options.patches.get(PatchPoint.POST_INPUT):
            found.append(PatchPoint.POST_INPUT.value)
        if "double_block" not in kinds and self._options.patches.get(PatchPoint.DOUBLE_BLOCK):
            found.append(PatchPoint.DOUBLE_BLOCK.value)
        for point in (PatchPoint.DIT_ATTENTION_ADDITION, PatchPoint.DIT_BLOCK_ADDITION):
            attentions = [names.joint_attention(block) for _, _, block in self._blocks]
            if self._options.patches.get(point) and (None in attentions or not attentions):
                found.append(point.value)
        if self._options.rope is not None and not self._has_ids and grid_rope(self._module) is None:
            found.append("rope_options")
        if found:
            raise unusable_field("transformer options", ", ".join(found), f"options that apply to {kind}")
        known = {(block_kind, number) for block_kind, number, _ in self._blocks}
        for key in self._options.patches_replace.get(ReplacePoint.DIT, {}):
            if key not in known:
                raise unusable_field("block replacement", key, f"a block of this {kind}: {sorted(known)}")

    def _install_additions(self, place: int, key: tuple[str, int], block: nn.Module) -> None:
        """Install the additions to the attention of `block`, and to its image after it."""
        inside = self._options.patches.get(PatchPoint.DIT_ATTENTION_ADDITION, ())
        is_double = key[0] == "double_block"
        after = self._options.patches.get(PatchPoint.DIT_BLOCK_ADDITION, ()) if is_double else ()
        if not inside and not after:
            return
        attention: Any = names.joint_attention(block)
        queries: list[Tensor] = []

        def keep(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            q_BLHE = forward(*args, **kwargs)
            queries.append(q_BLHE.flatten(2))
            return q_BLHE

        def added(x_BLD: Tensor, patches: tuple[Patch, ...]) -> Tensor:
            sizes = {"n_heads": attention.heads, "dim_head": attention.head_dim}
            extra = self._extra(block=key, block_index=key[1], transformer_index=place, **sizes)
            for patch in patches:
                out_BLD = patch(queries[0], extra)
                x_BLD = x_BLD if out_BLD is None else x_BLD + out_BLD
            return x_BLD

        def in_double(forward: Callable[..., Tensor], x_BLD: Tensor) -> Tensor:
            return forward(added(x_BLD, inside))

        def in_single(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            return added(forward(*args, **kwargs), inside)

        form = BlockForm.of(block, key[0])

        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            queries.clear()
            try:
                out = form.result(forward(*args, **kwargs))
                return form.packed({**out, "img": added(out["img"], after)} if after else out)
            finally:
                queries.clear()

        self._overlays.put(attention.norm_q, keep)
        if inside:
            self._overlays.put(attention.to_out[0] if is_double else attention, in_double if is_double else in_single)
        self._overlays.put(block, around)

    def _enter(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(self._module, *args, **kwargs)
        if self._options.rope is not None and self._has_ids:
            if not isinstance(bound.arguments.get("img_ids"), Tensor):
                raise unusable_field("rope_options", "a call without img_ids", "positions of the image to change")
            bound.arguments["img_ids"] = placed_ids(bound.arguments["img_ids"], self._options.rope)
        self._call = bound.arguments
        try:
            return forward(*bound.args[1:], **bound.kwargs)
        finally:
            self._call = {}

    def _around(
        self,
        block: nn.Module,
        key: tuple[str, int],
        replacement: Patch | None,
        patches: tuple[Patch, ...],
        inputs: tuple[Patch, ...],
    ) -> Callable[..., Any]:
        form = BlockForm.of(block, key[0])

        def wrapper(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            bound = form.signature.bind(block, *args, **kwargs)
            extra = self._extra(block=key, block_index=key[1])
            for patch in inputs:
                form.put(bound.arguments, self._post_input(patch, form.values(bound.arguments), extra))

            def original(values: Values, _: Any = None) -> Values:
                form.put(bound.arguments, values)
                return form.result(forward(*bound.args[1:], **bound.kwargs))

            inputs_of_block = {**form.values(bound.arguments), "transformer_options": extra}
            if replacement is None:
                out = original(inputs_of_block)
            else:
                out = {**inputs_of_block, **replacement(inputs_of_block, {"original_block": original})}
            for patch in patches:
                context = {"block_index": key[1], "transformer_options": extra}
                out = {**out, **patch({"txt": None, **form.only_tokens(out), **context})}
            return form.packed(out)

        return wrapper

    def _post_input(self, patch: Patch, values: Values, extra: Extra) -> Values:
        ids = {name: self._call.get(name) for name in ("img_ids", "txt_ids")}
        tokens = {"img": values["img"], "txt": values.get("txt")}
        out = {**tokens, **patch({**tokens, **ids, "transformer_options": extra})}
        return {**values, **{k: v for k, v in out.items() if k in tokens and v is not None}}

    def _extra(self, **known: Any) -> Extra:
        sample = next((v for v in self._call.values() if isinstance(v, Tensor)), None)
        shape = () if sample is None else tuple(sample.shape)
        return extra_options(self._options, original_shape=shape, **known)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The form in which one block takes and returns its tokens.

    img, txt, vec, pe  names of its arguments; None if it lacks one
    joined             a single block with both kinds of tokens: options get them concatenated, the text first
    text_first         order of a result of two
    """

    signature: inspect.Signature
    name: str
    img: str
    txt: str | None
    vec: str | None
    pe: str | None
    joined: bool
    text_first: bool | None

    @staticmethod
    def of(block: nn.Module, kind: str) -> BlockForm:
        """Return the form of `block`. Raises UnusableField if its arguments have unknown names."""
        signature = inspect.signature(type(block).forward)

        def found(known: tuple[str, ...]) -> str | None:
            return next((name for name in known if name in signature.parameters), None)

        img, txt = found(names.IMAGE_ARGUMENTS), found(names.TEXT_ARGUMENTS)
        if img is None:
            raise unusable_field("a block's arguments", list(signature.parameters), f"one of {names.IMAGE_ARGUMENTS}")
        joined = kind == "single_block" and txt is not None
        vec, pe = found(names.VECTOR_ARGUMENTS), found(names.POSITION_ARGUMENTS)
        return BlockForm(signature, type(block).__name__, img, txt, vec, pe, joined, names.text_comes_first(block))

    def values(self, arguments: Values) -> Values:
        """Return the values that options get from a call's `arguments`."""
        txt = arguments.get(self.txt) if self.txt else None
        values = {"img": arguments[self.img], "vec": arguments.get(self.vec or ""), "pe": arguments.get(self.pe or "")}
        if self.joined and isinstance(txt, Tensor):
            values["img"] = torch.cat([txt, values["img"]], dim=1)
            values["text_tokens"] = txt.shape[1]
        elif isinstance(txt, Tensor):
            values["txt"] = txt
        return values

    def put(self, arguments: Values, values: Values) -> None:
        """Write `values` back to a call's `arguments`."""
        img, txt = values["img"], values.get("txt")
        if self.joined and "text_tokens" in values:
            txt, img = img[:, : values["text_tokens"]], img[:, values["text_tokens"] :]
        arguments[self.img] = img
        for name, value in ((self.txt, txt), (self.vec, values.get("vec")), (self.pe, values.get("pe"))):
            if name is not None and value is not None:
                arguments[name] = value

    def result(self, out: Any) -> Values:
        """Return the values that options get from the block's result. Raises UnusableField for two results in an
        unknown order."""
        if not isinstance(out, tuple):
            return {"img": out}
        if self.text_first is None:
            raise unusable_field(f"result of {self.name}", "a tuple", "one tensor, or a block whose order is known")
        img, txt = (out[1], out[0]) if self.text_first else (out[0], out[1])
        if self.joined:
            return {"img": torch.cat([txt, img], dim=1), "text_tokens": txt.shape[1], "is_pair": True}
        return {"img": img, "txt": txt, "is_pair": True}

    def packed(self, values: Values) -> Any:
        """Convert `values` back to the block's result."""
        has_text = "txt" in values or "text_tokens" in values
        img, txt = values["img"], values.get("txt")
        if not values.get("is_pair", self.text_first is not None and has_text):
            return img
        if "text_tokens" in values:
            txt, img = img[:, : values["text_tokens"]], img[:, values["text_tokens"] :]
        return (txt, img) if self.text_first else (img, txt)

    def only_tokens(self, values: Values) -> Values:
        """Return the tokens of both kinds among `values`."""
        return {k: v for k, v in values.items() if k in ("img", "txt")}
