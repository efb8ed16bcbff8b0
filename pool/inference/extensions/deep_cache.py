"""DeepCache: computes the deep layers of a UNet in every few steps, and repeats their result in those between.

Source: Ma et al. 2024 ("DeepCache: Accelerating Diffusion Models for Free"), section 3.2. Which steps are computed
depends on their number only, so images of a batch do not change each other, and a run can continue from a checkpoint
before a computed step.

Shape legend: B batch, C channels, H W cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from modelpool.pool.inference.conditioning.micro_conditioning import FEATURES
from modelpool.pool.inference.extensions.unet_attention import PERTURBED
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.run_options import DeepCache
from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.patcher.blocks.overlays import Overlays

_NO_OPTIONS = TransformerOptions()


@dataclass(slots=True, eq=False)
class DeepLayers:
    """The deep layers of one UNet in one run.

    features  their result in the last computed step, for each group of texts that the model reads together
    """

    option: DeepCache
    clock: StepClock
    features: dict[object, Tensor | tuple[Tensor, ...]] = field(default_factory=dict)
    _key: object = None
    _skips: bool = False
    #: levels with blocks that add the features of T2I-Adapters themselves, of those that run in each step
    _adapted_levels: int = 0

    def computes(self, step: int) -> bool:
        """Return whether the deep layers are computed in `step`."""
        option, schedule = self.option, self.clock.schedule
        return not option.acts(step, schedule.steps) or (step - self.clock.first) % option.interval == 0

    def around_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the UNet; a wrapper of the diffusion model."""
        facts = extra_options(_NO_OPTIONS)
        self._key = facts.get("members"), facts.get(PERTURBED)
        self._skips = self._key in self.features and not self.computes(self.clock.now)
        if self._skips and kwargs.get(FEATURES):
            kwargs = {**kwargs, FEATURES: kwargs[FEATURES][: self._adapted_levels]}
        return forward(*args, **kwargs)

    def install(self, overlays: Overlays, unet: nn.Module) -> None:
        """Put overlays on the layers of `unet`, which has those that the option names."""
        plain: Any = unet
        first, *deeper = plain.down_blocks
        *upper, last = plain.up_blocks
        layers = self.option.layers
        self._adapted_levels = int(getattr(first, "has_cross_attention", False))
        kept = len(last.resnets) - 1 - layers
        before = _layers(last, range(kept))
        deep = [layer for layer in (plain.mid_block, *upper) if layer is not None]
        feature = (before or deep)[-1]
        overlays.put(feature, self._feature)
        for layer in _layers(first, range(layers, len(first.resnets))):
            overlays.put(layer, self._unchanged)
        for layer in first.downsamplers or ():
            overlays.put(layer, self._nothing)
        for block in deeper:
            count = len(block.resnets) + len(block.downsamplers or ())
            overlays.put(block, self._nothing_with_skips(count))
        for layer in [*deep, *before]:
            if layer is not feature:
                # the layers before the feature join their input with a skip connection of the feature's size
                overlays.put(layer, self._stand_in if before and layer is deep[-1] else self._unchanged)

    def _feature(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The last of the deep layers; it returns a tuple if it is an attention."""
        if self._skips:
            return self.features[self._key]
        out = forward(*args, **kwargs)
        self.features[self._key] = out
        return out

    def _stand_in(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer that only layers read that return the feature themselves, or nothing of their own."""
        if not self._skips:
            return forward(*args, **kwargs)
        feature = self.features[self._key]
        return feature[0] if isinstance(feature, tuple) else feature

    def _unchanged(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer that returns its input in the steps between; what follows it there reads only the feature."""
        if not self._skips:
            return forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if kwargs.get("return_dict", True) else (hidden,)

    def _nothing(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer that nothing reads in the steps between; ControlNets add to its result."""
        if not self._skips:
            return forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden.new_zeros(())

    def _nothing_with_skips(self, count: int) -> Callable[..., Any]:
        """The same for a block with `count` skip connections."""

        def forward_or_nothing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            out = self._nothing(forward, *args, **kwargs)
            return (out, (out,) * count) if self._skips else out

        return forward_or_nothing


def check_layers(option: DeepCache, unet: nn.Module) -> None:
    """Raise UnusableField if `unet` has fewer layers than `option` names."""
    plain: Any = unet
    most = len(plain.down_blocks[0].resnets)
    if option.layers > most:
        expected = f"at most {most}, the residual layers of the first level of this model"
        raise unusable_field("options.deepcache.layers", option.layers, expected)


def _layers(block: Any, numbers: range) -> list[nn.Module]:
    """Return the residual layers of `block` with these numbers and the attention after each, in order."""
    attentions = getattr(block, "attentions", None)
    found: list[nn.Module] = []
    for number in numbers:
        found.append(block.resnets[number])
        if attentions is not None and attentions[number] is not None:
            found.append(attentions[number])
    return found
