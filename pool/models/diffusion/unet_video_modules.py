"""diffusers' video UNet with numeric conditioning per frame.

Same arguments and parameters as diffusers' class.
"""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor

from modelpool.pool.core.errors import unusable_field

#: embedding widths of the noise on the image, the height and the direction of the view. Source: sv3d_p.yaml of
#: Stability-AI/generative-models
VIEW_WIDTHS = (256, 512, 512)


class ViewedUNet(diffusers.UNetSpatioTemporalConditionModel):  # type: ignore[misc]
    """SV3D p, with a view for each frame.

    `added_time_ids` has noise, height and direction per frame, [B,T,3]; the angles are in radians.
    """

    @functools.wraps(diffusers.UNetSpatioTemporalConditionModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, added_time_ids: Tensor, **more: Any
    ) -> Any:
        """Run diffusers' forward, which repeats one embedding for all frames, with per-frame embeddings added at the
        blocks."""
        batch, frames = sample.shape[:2]
        if tuple(added_time_ids.shape) != (batch, frames, len(VIEW_WIDTHS)):
            expected = f"three for each of {frames} frames"
            raise unusable_field("numbers", tuple(added_time_ids.shape), expected)
        told_N3 = added_time_ids.flatten(0, 1).float()
        parts = [
            get_timestep_embedding(told_N3[:, i], width, flip_sin_to_cos=True, downscale_freq_shift=0)
            for i, width in enumerate(VIEW_WIDTHS)
        ]
        views_ND = self.add_embedding(torch.cat(parts, dim=1).to(sample.dtype))
        hooks = [self.add_embedding.register_forward_hook(lambda _, __, embedded: torch.zeros_like(embedded))]

        def viewed(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, given | {"temb": given["temb"] + views_ND}

        blocks = (*self.down_blocks, self.mid_block, *self.up_blocks)
        hooks += [block.register_forward_pre_hook(viewed, with_kwargs=True) for block in blocks]
        # # the width that the class embeds; the hook zeroes the embedding
        width = self.config.projection_class_embeddings_input_dim // self.config.addition_time_embed_dim
        try:
            return super().forward(
                sample, timestep, encoder_hidden_states, sample.new_zeros(batch, width, dtype=torch.float32), **more
            )
        finally:
            for hook in hooks:
                hook.remove()
