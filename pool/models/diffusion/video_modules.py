"""Classes of diffusers for video in a form that runs here.

Each takes what diffusers' own takes and has the same parameters under the same names.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import diffusers
from torch import Tensor


class CosmosTransformer3DModel(diffusers.CosmosTransformer3DModel):  # type: ignore[misc]
    """Cosmos, given latents with their channels of masks.

    diffusers' own makes the channel of padding itself, with a library that is no dependency of this project. What
    diffusers is to write into a folder is the plan's configuration, not this module's, which counts that channel.
    """

    @functools.wraps(diffusers.CosmosTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        if self.config.concat_padding_mask:
            self.register_to_config(concat_padding_mask=False, in_channels=self.config.in_channels + 1)


class HunyuanVideo15Transformer3DModel(diffusers.HunyuanVideo15Transformer3DModel):  # type: ignore[misc]
    """HunyuanVideo 1.5, told the level of noise in full precision.

    diffusers' own embeds it in the precision of the latents; 16 bits do not tell 737 from 739.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **told: Any) -> Any:
        """As diffusers' own."""
        hook = self.time_embed.register_forward_hook(lambda _, __, embedded: embedded.to(hidden_states.dtype))
        try:
            return super().forward(hidden_states, *args, **told)
        finally:
            hook.remove()


class LTXVideoTransformer3DModel(diffusers.LTXVideoTransformer3DModel):  # type: ignore[misc]
    """LTX-Video, which knows how its frames stand in time: `causal_temporal_positioning` in the words of its files.

    Models since 0.9.5 count from the one frame that the first cell stands for, and not from the eight of the others.
    diffusers' own class is told so by a pipeline of its own.
    """

    def __init__(self, *args: Any, causal_temporal_positioning: bool = False, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.register_to_config(causal_temporal_positioning=causal_temporal_positioning)

    # what a configuration may have: diffusers' own arguments, and that one
    __init__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        diffusers.LTXVideoTransformer3DModel.__init__
    ).replace(
        parameters=[
            *inspect.signature(diffusers.LTXVideoTransformer3DModel.__init__).parameters.values(),
            inspect.Parameter("causal_temporal_positioning", inspect.Parameter.KEYWORD_ONLY, default=False),
        ]
    )
