"""Reads reference images apart: their tokens attend to each other alone and have a fixed time, so that their keys and
values are the same in each step, and are computed once in a run.

Source: `Flux2KleinKVPipeline` of diffusers, which takes the keys and values from its first step. Here they come from a
call of their own before it, which makes the same numbers, so that a run that continues from a checkpoint computes the
same pixels. Shape legend: B batch, L tokens, H heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.values.core.run_options import ReferenceCache
from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.patcher.blocks.overlays import Overlays

_NO_OPTIONS = TransformerOptions()


@dataclass(slots=True, eq=False)
class ReadReferences:
    """The keys and values of the reference images of one run.

    keeps   whether they stay from call to call: not if weights change between calls
    kept    of each layer, for each image of the run; None before the first call
    """

    option: ReferenceCache
    keeps: bool = True
    kept: Any = None

    def around_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model without the tokens of reference images; a wrapper of the diffusion model, which is called with
        names. The texts of one call, one after the other, are for the same images, and so for the same references."""
        count = kwargs.pop("num_ref_tokens", 0)
        if not count:
            return forward(*args, **kwargs)
        rows_BLD, ids = kwargs["hidden_states"], kwargs["img_ids"]
        cells, texts = rows_BLD.shape[1] - count, len(extra_options(_NO_OPTIONS).get("members") or (None,))
        kept = self.kept
        if kept is None:
            images = len(rows_BLD) // texts
            kept = self._read(forward, kwargs, rows_BLD[:images, cells:], ids[cells:])
        if self.keeps:
            self.kept = kept
        cache = _Repeated(kept, texts)
        kwargs |= {"hidden_states": rows_BLD[:, :cells], "img_ids": ids[:cells]}
        return forward(*args, **kwargs, kv_cache=cache, kv_cache_mode="cached")

    def _read(self, forward: Callable[..., Any], kwargs: dict[str, Any], rows_BLD: Tensor, ids: Tensor) -> Any:
        """Return the keys and values of the references in `rows_BLD`, from a call without an image. They do not depend
        on its text, which is one token."""
        images, guidance = len(rows_BLD), kwargs.get("guidance")
        _, found = forward(
            **{
                **kwargs,
                "hidden_states": rows_BLD,
                "img_ids": ids,
                "encoder_hidden_states": kwargs["encoder_hidden_states"][:images, :1],
                "txt_ids": kwargs["txt_ids"][:1],
                "timestep": kwargs["timestep"][:images],
                "guidance": None if guidance is None else guidance[:images],
            },
            kv_cache_mode="extract",
            num_ref_tokens=rows_BLD.shape[1],
            ref_fixed_timestep=self.option.time,
        )
        return found

    @property
    def kept_bytes(self) -> int:
        """Bytes of what stays from call to call."""
        layers = () if self.kept is None else (*self.kept.double_block_caches, *self.kept.single_block_caches)
        return sum(tensor.nbytes for layer in layers for tensor in layer.get())

    def install(self, overlays: Overlays, module: nn.Module) -> None:
        """Put overlays on the attentions of `module`, which then read the keys and values that they are called with.
        Raises NeedsNewerLibrary where diffusers does not know such attentions."""
        plain: Any = module
        for blocks, name in (
            (plain.transformer_blocks, "Flux2KVAttnProcessor"),
            (plain.single_transformer_blocks, "Flux2KVParallelSelfAttnProcessor"),
        ):
            processor = of_library(type(module).__module__, name)()
            for block in blocks:
                overlays.put(block.attn, partial(_attend, processor, block.attn))


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A cache of diffusers, with each layer repeated for so many texts while the layer reads it."""

    cache: Any
    texts: int

    @property
    def num_ref_tokens(self) -> int:
        return int(self.cache.num_ref_tokens)

    def get_double(self, number: int) -> _RepeatedLayer:
        return _RepeatedLayer(self.cache.get_double(number), self.texts)

    def get_single(self, number: int) -> _RepeatedLayer:
        return _RepeatedLayer(self.cache.get_single(number), self.texts)


@dataclass(frozen=True, slots=True)
class _RepeatedLayer:
    layer: Any
    texts: int

    def get(self) -> tuple[Tensor, Tensor]:
        keys_BLHE, values_BLHE = self.layer.get()
        if self.texts == 1:
            return keys_BLHE, values_BLHE
        return keys_BLHE.repeat(self.texts, 1, 1, 1), values_BLHE.repeat(self.texts, 1, 1, 1)


def _attend(processor: Any, attention: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The attention with its own processor replaced by one that knows caches."""
    return processor(attention, *args, **kwargs)
