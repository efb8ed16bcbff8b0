"""Deep shrink: computes the deep layers of a UNet on smaller features in the first steps, so that large images have the
composition of small ones.

An input block has the features made smaller, before or after its skip connection is stored; each output block then
reads features of the size of its skip connection. Source: Kohya 2023 ("Deep Shrink Hires.fix").

Shape legend: B batch, C channels, H W cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.run_options import DeepShrink
from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.patcher.blocks.diffusers_names import UnetBlockInfo, unet_blocks
from modelpool.pool.weights.patcher.blocks.overlays import Overlays

#: the fact of a model call with the noise level of the step
LEVEL = "level"
_NO_OPTIONS = TransformerOptions()


def check_block(option: DeepShrink, unet: nn.Module) -> None:
    """Raise UnusableField for a block that `unet` does not have, and for one that no deeper one follows."""
    last = max(block.key[1] for block in unet_blocks(unet) if block.key[0] == "input")
    if not any(block.key[0] == "middle" for block in unet_blocks(unet)):
        raise unusable_field("options.deep_shrink", "a UNet without a middle block", "one that has it")
    if option.block > last:
        raise unusable_field("options.deep_shrink.block", option.block, f"1 to {last}, an input block of this model")


@dataclass(slots=True, eq=False)
class ShrunkFeatures:
    """The features of one UNet in one run, which are smaller in some steps.

    table   the noise levels that start and end are shares of; None: they are shares of the steps
    _sizes  heights and widths of the skip connections of this call, in the order in which they are stored
    """

    option: DeepShrink
    clock: StepClock
    table: SigmaTable | None = None
    _acts: bool = False
    _sizes: list[tuple[int, ...]] = field(default_factory=list)

    def acts(self, level: float) -> bool:
        """Return whether the features are smaller in this step, or at this noise level."""
        option = self.option
        if option.shares_of == "steps" or self.table is None:
            return self.clock.acts(option)
        first, last = (self.table.sigma_at_percent(share) for share in (option.start, option.end))
        return last <= level <= first

    def around_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the UNet; a wrapper of the diffusion model."""
        self._acts, self._sizes = self.acts(float(extra_options(_NO_OPTIONS).get(LEVEL, 0.0))), []
        return forward(*args, **kwargs)

    def install(self, overlays: Overlays, unet: nn.Module) -> None:
        """Put overlays on the layers of `unet`, which has the block that the option names."""
        blocks = unet_blocks(unet)
        last_layers = [unet.get_submodule(block.layers[-1]) for block in blocks]
        for place, block in enumerate(blocks):
            if block.key[0] == "input":
                here = block.key[1] == self.option.block
                overlays.put(last_layers[place], self._stored(here and not self.option.after_skip))
                if here and self.option.after_skip:
                    overlays.put(unet.get_submodule(blocks[place + 1].layers[0]), self._reading_less)
        self._install_outputs(overlays, blocks, last_layers)

    def _install_outputs(
        self, overlays: Overlays, blocks: Sequence[UnetBlockInfo], last_layers: Sequence[nn.Module]
    ) -> None:
        """Have the features before each output block brought to the size of the skip connection that it joins."""
        outputs = [place for place, block in enumerate(blocks) if block.key[0] == "output"]
        for number, place in enumerate(outputs):
            overlays.put(last_layers[place - 1], self._joining(number))

    def _stored(self, shrinks: bool) -> Callable[..., Any]:
        def layer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if not self._acts:
                return out
            if shrinks:
                out = _changed(out, self._shrunk)
            self._sizes.append(tuple((out[0] if isinstance(out, tuple) else out).shape[-2:]))
            return out

        return layer

    def _reading_less(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first layer behind a skip connection."""
        if not self._acts:
            return forward(*args, **kwargs)
        if args:
            return forward(self._shrunk(args[0]), *args[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": self._shrunk(kwargs["hidden_states"])})

    def _joining(self, number: int) -> Callable[..., Any]:
        """A layer before output block `number`, which joins the skip connection that many places before the last."""

        def layer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._acts:
                return forward(*args, **kwargs)
            size = self._sizes[-1 - number]
            if isinstance(getattr(forward, "__self__", None), Upsample2D):
                hidden = args[0] if args else kwargs["hidden_states"]
                return forward(hidden, size)
            return _changed(forward(*args, **kwargs), lambda h_BCHW: resized(h_BCHW, size, self.option.up))

        return layer

    def _shrunk(self, h_BCHW: Tensor) -> Tensor:
        size = tuple(max(1, round(side / self.option.factor)) for side in h_BCHW.shape[-2:])
        return resized(h_BCHW, size, self.option.down)


def _changed(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the result of a layer, of an attention layer's tuple the first element, changed."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def resized(h_BCHW: Tensor, size: tuple[int, ...], method: str) -> Tensor:
    """Return features of another height and width."""
    if tuple(h_BCHW.shape[-2:]) == size:
        return h_BCHW
    return functional.interpolate(h_BCHW, size=size, mode=method)
