"""`TransformerOptions`: changes of a run inside the diffusion model, as an immutable value.

Names and signatures are ComfyUI's. Defines functions and where they apply; `pool.weights.patcher.blocks` applies them.
A builder returns a new value that shares everything unchanged.

Every function gets `extra`, a new dictionary: "block" (("input"|"middle"|"output", n), or ("double_block", i)),
"block_index" (transformer block inside it), "transformer_index" (counted over the model), "n_heads", "dim_head",
"original_shape", the values of `pool.weights.options.run_context.call_facts` ("sigmas", "cond_or_uncond", ...) and
`extra` of the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: ("input", 4), ("middle", 0), ("output", 1), or with the transformer block inside it, ("input", 4, 0)
BlockKey: TypeAlias = tuple[str, int] | tuple[str, int, int]
Extra: TypeAlias = dict[str, Any]
Patch: TypeAlias = Callable[..., Any]


class PatchPoint(Enum):
    """Point of a patch; each value is ComfyUI's name, except for additions. See the builders for the signatures."""

    ATTN1_PATCH = "attn1_patch"
    ATTN2_PATCH = "attn2_patch"
    ATTN1_OUTPUT_PATCH = "attn1_output_patch"
    ATTN2_OUTPUT_PATCH = "attn2_output_patch"
    ATTN2_ADDITION = "attn2_addition"
    INPUT_BLOCK_PATCH = "input_block_patch"
    INPUT_BLOCK_PATCH_AFTER_SKIP = "input_block_patch_after_skip"
    MIDDLE_BLOCK_PATCH = "middle_block_patch"
    OUTPUT_BLOCK_PATCH = "output_block_patch"
    EMB_PATCH = "emb_patch"
    FORWARD_TIMESTEP_EMBED_PATCH = "forward_timestep_embed_patch"
    DOUBLE_BLOCK = "double_block"
    POST_INPUT = "post_input"
    DIT_ATTENTION_ADDITION = "dit_attention_addition"
    DIT_BLOCK_ADDITION = "dit_block_addition"


class ReplacePoint(Enum):
    """Point of a replacement: an attention's softmax product, or a complete block of a DiT."""

    ATTN1 = "attn1"
    ATTN2 = "attn2"
    DIT = "dit"


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """Scale and shift of the image's rotary positions along x, y and t: position * scale + shift."""

    scale_x: float = 1.0
    shift_x: float = 0.0
    scale_y: float = 1.0
    shift_y: float = 0.0
    scale_t: float = 1.0
    shift_t: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TransformerOptions:
    """Patches and replacements of a run. Equal values have equal effect; entries of `extra` that cannot be compared
    differ.

    patches          functions of each point in the order in which they were added; each gets the result of the previous
                     one
    patches_replace  at most one function per block; a key with a transformer index takes precedence
    rope             None: the model's positions
    extra            entries for the dictionary that functions get
    """

    patches: Mapping[PatchPoint, tuple[Patch, ...]] = field(default_factory=lambda: MappingProxyType({}))
    patches_replace: Mapping[ReplacePoint, Mapping[BlockKey, Patch]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    rope: RopeOptions | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __eq__(self, other: object) -> bool:
        """Equal functions at equal points, equal positions, and equal `extra`."""
        if not isinstance(other, TransformerOptions):
            return NotImplemented
        same = (self.patches, self.patches_replace, self.rope) == (other.patches, other.patches_replace, other.rope)
        return same and _surely_equal(self.extra, other.extra)

    @property
    def is_empty(self) -> bool:
        """Whether nothing here changes the model's computation."""
        return not self.patches and not self.patches_replace and self.rope is None

    def with_attn1_patch(self, patch: Patch) -> TransformerOptions:
        """`(q_in, k_in, v_in, extra) -> the three`, before the projections of every self-attention."""
        return _with(self, PatchPoint.ATTN1_PATCH, patch)

    def with_attn2_patch(self, patch: Patch) -> TransformerOptions:
        """`(q_in, k_in, v_in, extra) -> the three`, before the projections of every cross-attention."""
        return _with(self, PatchPoint.ATTN2_PATCH, patch)

    def with_attn1_output_patch(self, patch: Patch) -> TransformerOptions:
        """`(out, extra) -> out`, after the output projection of every self-attention."""
        return _with(self, PatchPoint.ATTN1_OUTPUT_PATCH, patch)

    def with_attn2_output_patch(self, patch: Patch) -> TransformerOptions:
        """`(out, extra) -> out`, after the output projection of every cross-attention."""
        return _with(self, PatchPoint.ATTN2_OUTPUT_PATCH, patch)

    def with_attn2_addition(self, patch: Patch) -> TransformerOptions:
        """`(q, extra) -> out or None`, added to the result of every cross-attention before its output projection."""
        return _with(self, PatchPoint.ATTN2_ADDITION, patch)

    def with_attn1_replace(self, patch: Patch, block: str, number: int, index: int | None = None) -> TransformerOptions:
        """`(q, k, v, extra) -> out` replaces self-attention between the projections, heads concatenated."""
        return _with_replace(self, ReplacePoint.ATTN1, patch, block, number, index)

    def with_attn2_replace(self, patch: Patch, block: str, number: int, index: int | None = None) -> TransformerOptions:
        """`(q, k, v, extra) -> out` replaces cross-attention between the projections, heads concatenated."""
        return _with_replace(self, ReplacePoint.ATTN2, patch, block, number, index)

    def with_block_replace(self, patch: Patch, block: str, number: int) -> TransformerOptions:
        """`(args, {"original_block": f}) -> dict` replaces a block of a DiT: "double_block" or "single_block".

        args has "img", "vec", "pe" and, for double blocks, "txt"; the result has "img" and "txt" likewise. A single
        block with concatenated text has both in "img", the text first.
        """
        return _with_replace(self, ReplacePoint.DIT, patch, block, number, None)

    def with_input_block_patch(self, patch: Patch, after_skip: bool = False) -> TransformerOptions:
        """`(h, extra) -> h` after each input block; with `after_skip` the skip connection keeps the unpatched h."""
        point = PatchPoint.INPUT_BLOCK_PATCH_AFTER_SKIP if after_skip else PatchPoint.INPUT_BLOCK_PATCH
        return _with(self, point, patch)

    def with_middle_block_patch(self, patch: Patch) -> TransformerOptions:
        """`(h, extra) -> h` after the middle block."""
        return _with(self, PatchPoint.MIDDLE_BLOCK_PATCH, patch)

    def with_output_block_patch(self, patch: Patch) -> TransformerOptions:
        """`(h, skip, extra) -> the two` before each output block concatenates them."""
        return _with(self, PatchPoint.OUTPUT_BLOCK_PATCH, patch)

    def with_emb_patch(self, patch: Patch) -> TransformerOptions:
        """`(emb, model_channels, extra) -> emb` on the timestep's embedding, before others are added to it."""
        return _with(self, PatchPoint.EMB_PATCH, patch)

    def with_forward_timestep_embed_patch(self, layer_class: type, handler: Patch) -> TransformerOptions:
        """`handler(layer, x, emb, context, extra) -> x` in place of each layer of a UNet block of `layer_class`."""
        return _with(self, PatchPoint.FORWARD_TIMESTEP_EMBED_PATCH, LayerHandler(layer_class, handler))

    def with_double_block_patch(self, patch: Patch) -> TransformerOptions:
        """`({"img", "txt", "block_index", "transformer_options"}) -> dict` after each double block of a DiT."""
        return _with(self, PatchPoint.DOUBLE_BLOCK, patch)

    def with_dit_attention_addition(self, patch: Patch) -> TransformerOptions:
        """`(q, extra) -> out or None`, added to the result of the attention of every block of a DiT like Flux before
        its output projection. `q` are the queries of the image (in single blocks of the text, then the image),
        normalized, without rotary positions."""
        return _with(self, PatchPoint.DIT_ATTENTION_ADDITION, patch)

    def with_dit_block_addition(self, patch: Patch) -> TransformerOptions:
        """`(q, extra) -> out or None`, with the same `q`, added to the image after every double block of a DiT like
        Flux."""
        return _with(self, PatchPoint.DIT_BLOCK_ADDITION, patch)

    def with_post_input_patch(self, patch: Patch) -> TransformerOptions:
        """`({"img", "txt", "img_ids", "txt_ids", "transformer_options"}) -> dict` on the inputs of a DiT's first block;
        only "img" and "txt" of the result are used."""
        return _with(self, PatchPoint.POST_INPUT, patch)

    def with_rope_options(self, rope: RopeOptions | None) -> TransformerOptions:
        """Change the rotary positions by `rope`, replacing the previous change."""
        return replace(self, rope=rope)


@dataclass(frozen=True, slots=True)
class LayerHandler:
    """One `forward_timestep_embed` patch: the layer class, and the function that replaces its layers."""

    layer_class: type
    handler: Patch

    def __call__(self, *args: Any) -> Any:
        """Return the handler's result."""
        return self.handler(*args)


def merged(first: TransformerOptions, second: TransformerOptions) -> TransformerOptions:
    """Combine both: patches of `first` run first; replacements, positions and extras of `second` take precedence."""
    patches = dict(first.patches)
    for point, functions in second.patches.items():
        patches[point] = (*patches.get(point, ()), *functions)
    replaced = dict(first.patches_replace)
    for where, table in second.patches_replace.items():
        replaced[where] = MappingProxyType({**replaced.get(where, {}), **table})
    return TransformerOptions(
        MappingProxyType(patches),
        MappingProxyType(replaced),
        second.rope or first.rope,
        MappingProxyType({**first.extra, **second.extra}),
    )


def functions_of(options: TransformerOptions) -> Iterator[Patch]:
    """Yield every function in `options`, handlers unwrapped."""
    for patches in options.patches.values():
        yield from (p.handler if isinstance(p, LayerHandler) else p for p in patches)
    for table in options.patches_replace.values():
        yield from table.values()


def map_functions(options: TransformerOptions, change: Callable[[Patch], Patch]) -> TransformerOptions:
    """Apply `change` to every function of `options`; return `options` itself when it changed none."""

    def one(patch: Patch) -> Patch:
        if isinstance(patch, LayerHandler):
            return LayerHandler(patch.layer_class, change(patch.handler))
        return change(patch)

    if all(change(f) is f for f in functions_of(options)):
        return options
    return replace(
        options,
        patches=MappingProxyType({p: tuple(map(one, fs)) for p, fs in options.patches.items()}),
        patches_replace=MappingProxyType(
            {w: MappingProxyType({k: change(f) for k, f in t.items()}) for w, t in options.patches_replace.items()}
        ),
    )


def on_device(options: TransformerOptions, device: torch.device) -> TransformerOptions:
    """Return `options` with the movable functions (those with a method `to`) on `device`."""

    def to_device(function: Patch) -> Patch:
        move = getattr(function, "to", None)
        return move(device) if callable(move) else function

    return map_functions(options, to_device)


def _surely_equal(left: object, right: object) -> bool:
    """Whether they are surely equal: tensors by their numbers, collections by entry, others by their own comparison."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.device == right.device and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_surely_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(_surely_equal, left, right))
    try:
        return bool(left == right)
    except Exception:  # arrays raise because they are ambiguous; other values may raise anything
        return False


def _with(options: TransformerOptions, point: PatchPoint, patch: Patch) -> TransformerOptions:
    functions = (*options.patches.get(point, ()), patch)
    return replace(options, patches=MappingProxyType({**options.patches, point: functions}))


def _with_replace(
    options: TransformerOptions, where: ReplacePoint, patch: Patch, block: str, number: int, index: int | None
) -> TransformerOptions:
    key: BlockKey = (block, number) if index is None else (block, number, index)
    table = MappingProxyType({**options.patches_replace.get(where, {}), key: patch})
    return replace(options, patches_replace=MappingProxyType({**options.patches_replace, where: table}))
