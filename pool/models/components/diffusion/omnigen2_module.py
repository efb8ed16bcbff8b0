"""`OmniGen2Transformer2DModel`: Lumina 2 that reads reference images between the words and the patches of the output.

diffusers has no class for it. Source of the computation, the names and the arguments: transformer_omnigen2.py and
repo.py of VectorSpaceLab/OmniGen2.

Legend: B batch, L words, N tokens, D width of a token, C channels, H W cells of a latent.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from torch import Tensor, nn

from modelpool.pool.values.core.errors import counted

#: reference images that the model tells apart
MOST_REFERENCES = 5
_THETA = 10000.0
#: arguments of Lumina 2's class that this one has not, and its own with their defaults
_NOT_TAKEN = ("sample_size", "scaling_factor", "cap_feat_dim")
_OWN: dict[str, Any] = {"text_feat_dim": 1024, "timestep_scale": 1.0}


class _Positions(nn.Module):
    """Rotary positions on three axes, computed for each call: tables end at a size, and would be copied to the device.

    Word l is at (l, l, l). Patches are at (p, row, column), where p is the number of words for the first image, and
    grows by the longer side of each image before, in patches.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes = tuple(axes)

    def forward(self, words_BL: Tensor, images: Sequence[tuple[int, int]]) -> Tensor:
        """Return the rotations of all tokens, [B,N,D/2] complex, for words of which some are real, and images of these
        rows and columns. Words that only fill a text up have positions that nothing reads."""
        device = words_BL.device
        batch, length = words_BL.shape
        place_L3 = torch.arange(length, device=device)[:, None].expand(-1, len(self.axes))
        parts, shift_B = [place_L3.expand(batch, -1, -1)], words_BL.sum(dim=1)
        for rows, columns in images:
            grid = torch.meshgrid(
                torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
            )
            place_N2 = torch.stack(grid, dim=-1).reshape(rows * columns, 2)
            first_BN1 = shift_B[:, None, None].expand(-1, rows * columns, 1)
            parts.append(torch.cat((first_BN1, place_N2.expand(batch, -1, -1)), dim=-1))
            shift_B = shift_B + max(rows, columns)
        # an axis of n numbers has n/2 rates; MPS has no double precision
        kind = torch.float32 if device.type == "mps" else torch.float64
        place_BN3 = torch.cat(parts, dim=1).to(kind)
        angles = [
            place_BN3[..., axis, None] / _THETA ** (torch.arange(0, size, 2, device=device, dtype=kind) / size)
            for axis, size in enumerate(self.axes)
        ]
        angles_BND = torch.cat(angles, dim=-1)
        return torch.complex(angles_BND.cos().float(), angles_BND.sin().float())


class OmniGen2Transformer2DModel(diffusers.Lumina2Transformer2DModel):  # type: ignore[misc]
    """OmniGen 2. Reference images have an embedding of patches, blocks that refine each by itself, and a state that
    tells which one it is."""

    def __init__(self, *args: Any, text_feat_dim: int = 1024, timestep_scale: float = 1.0, **sizes: Any) -> None:
        lengths = sizes.pop("axes_lens", (300, 512, 512))
        # its tables of positions are replaced
        super().__init__(*args, cap_feat_dim=text_feat_dim, axes_lens=(1, 1, 1), **sizes)
        own = {"text_feat_dim": text_feat_dim, "timestep_scale": timestep_scale, "axes_lens": lengths}
        self.register_to_config(**own)
        found = self.config
        self.rope_embedder = _Positions(found.axes_dim_rope)
        self.get_submodule("time_caption_embed.time_proj").scale = timestep_scale
        width = found.hidden_size
        self.ref_image_patch_embedder = nn.Linear(found.patch_size**2 * found.in_channels, width)
        blocks = [
            Lumina2TransformerBlock(
                width, found.num_attention_heads, found.num_kv_heads, found.multiple_of, found.ffn_dim_multiplier,
                found.norm_eps, modulation=True,
            )
            for _ in range(found.num_refiner_layers)
        ]  # fmt: skip
        self.ref_image_refiner = nn.ModuleList(blocks)
        self.image_index_embedding = nn.Parameter(torch.zeros(MOST_REFERENCES, width))

    __init__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        diffusers.Lumina2Transformer2DModel.__init__
    ).replace(
        parameters=[
            *(
                parameter
                for name, parameter in inspect.signature(
                    diffusers.Lumina2Transformer2DModel.__init__
                ).parameters.items()
                if name not in _NOT_TAKEN
            ),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in _OWN.items()
            ),
        ]
    )

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        references: Sequence[Tensor] = (),
    ) -> tuple[Tensor]:
        """Return the velocity from noise to image of the latent `hidden_states`, [B,C,H,W], as a tuple, at the share of
        image `timestep`, [B]. `references` are latents of reference images, each [B,C,H,W]. A mask tells which words
        are real; None: all are. Raises ValueError for more reference images than the model tells apart."""
        if len(references) > MOST_REFERENCES:
            raise ValueError(f"references: found {counted(len(references), 'image')}, expected up to {MOST_REFERENCES}")
        side = self.config.patch_size
        batch, (height, width) = len(hidden_states), hidden_states.shape[-2:]
        level_BD, words_BLD = self.time_caption_embed(hidden_states, timestep, encoder_hidden_states)
        mask_BL = encoder_attention_mask
        real_BL = torch.ones(words_BLD.shape[:2], dtype=torch.bool, device=words_BLD.device)
        real_BL = real_BL if mask_BL is None else mask_BL.bool()
        sides = [(image.shape[-2] // side, image.shape[-1] // side) for image in (*references, hidden_states)]
        rotations_BND = self.rope_embedder(real_BL, sides)
        of_words, *of_images = rotations_BND.split([words_BLD.shape[1], *(high * wide for high, wide in sides)], dim=1)
        for block in self.context_refiner:
            words_BLD = block(words_BLD, mask_BL, of_words)
        patches_BND = self.x_embedder(_rows(hidden_states, side))
        for block in self.noise_refiner:
            patches_BND = block(patches_BND, None, of_images[-1], level_BD)
        shown = [
            self._refined(reference, number, rotations, level_BD)
            for number, (reference, rotations) in enumerate(zip(references, of_images, strict=False))
        ]
        tokens_BND = torch.cat((words_BLD, *shown, patches_BND), dim=1)
        mask_BN = None
        if mask_BL is not None:
            seen = real_BL.new_ones((batch, tokens_BND.shape[1] - words_BLD.shape[1]))
            mask_BN = torch.cat((real_BL, seen), dim=1)
        for block in self.layers:
            tokens_BND = block(tokens_BND, mask_BN, rotations_BND, level_BD)
        found_BND = self.norm_out(tokens_BND[:, -patches_BND.shape[1] :], level_BD)
        cells = found_BND.reshape(batch, height // side, width // side, side, side, -1).permute(0, 5, 1, 3, 2, 4)
        return (cells.reshape(batch, -1, height, width),)

    def _refined(self, reference_BCHW: Tensor, number: int, rotations_BND: Tensor, level_BD: Tensor) -> Tensor:
        """Return the tokens of the reference image `number`, counted from 0."""
        tokens_BND: Tensor = self.ref_image_patch_embedder(_rows(reference_BCHW, self.config.patch_size))
        tokens_BND = tokens_BND + self.image_index_embedding[number]
        for block in self.ref_image_refiner:
            tokens_BND = block(tokens_BND, None, rotations_BND, level_BD)
        return tokens_BND


def _rows(x_BCHW: Tensor, side: int) -> Tensor:
    """Return patches as rows, [B,N,side*side*C]; the channels of a cell are adjacent."""
    b, c, h, w = x_BCHW.shape
    x = x_BCHW.reshape(b, c, h // side, side, w // side, side).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(b, h * w // side**2, side**2 * c)
