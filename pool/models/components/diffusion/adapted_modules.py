"""diffusers' classes, adapted to run here.

Each has the parameters of diffusers' class. One with its name replaces it wherever a family names it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.transformers.transformer_chroma import ChromaCombinedTimestepTextProjEmbeddings
from diffusers.models.transformers.transformer_glm_image import GlmImageRotaryPosEmbed
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedLayer3DRope, QwenEmbedRope
from torch import Tensor, nn

from modelpool.pool.devices.pinned_memory import sent
from modelpool.pool.families.parts.audio_tracks import MOST_SOUND
from modelpool.pool.families.parts.inner_models import COMPANION, SILENCE_CELLS, TIMBRE_CELLS, UNCONDITIONAL
from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.models.components.diffusion.camera_rays import rays_of_cells
from modelpool.pool.models.components.diffusion.omnigen2_module import OmniGen2Transformer2DModel
from modelpool.pool.values.core.errors import CorruptFile, unusable_field

#: of families that came after the oldest supported version
_AceStepConditionEncoder: Any = of_library("diffusers", "AceStepConditionEncoder")
_AceStepTransformer1DModel: Any = of_library("diffusers", "AceStepTransformer1DModel")
_Ideogram4Transformer2DModel: Any = of_library("diffusers", "Ideogram4Transformer2DModel")
_Kandinsky6Transformer3DModel: Any = of_library("diffusers", "Kandinsky6Transformer3DModel")
_KANDINSKY_6 = "diffusers.models.transformers.transformer_kandinsky6"
_PlainModulation: Any = of_library(_KANDINSKY_6, "Kandinsky6Modulation")
_PlainTimes: Any = of_library(_KANDINSKY_6, "Kandinsky6TimeEmbeddings")


class _ChromaNumbers(ChromaCombinedTimestepTextProjEmbeddings):  # type: ignore[misc]
    """Chroma's embedding of the noise level, of guidance, which is 0, and of the number of each modulation.

    diffusers' class embeds the 0 on the host: the copy to the device would wait for all of its work, in each call.
    """

    def forward(self, timestep: Tensor) -> Tensor:
        """Return a row per modulation, [B, modulations, D]."""
        embedded = (self.time_proj(timestep), self.guidance_proj(torch.zeros_like(timestep)))
        numbers_BD = torch.cat([each.to(timestep.dtype) for each in embedded], dim=1)
        places_ND: Tensor = self.mod_proj.to(numbers_BD)
        shape = (len(timestep), len(places_ND), -1)
        return torch.cat([numbers_BD.unsqueeze(1).expand(shape), places_ND.unsqueeze(0).expand(shape)], dim=-1)


class ChromaTransformer2DModel(diffusers.ChromaTransformer2DModel):  # type: ignore[misc]
    """Chroma, with calls that copy nothing to the device."""

    @functools.wraps(diffusers.ChromaTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.time_text_embed.__class__ = _ChromaNumbers


class _GlmImageAngles(GlmImageRotaryPosEmbed):  # type: ignore[misc]
    """GLM-Image's rotary positions, which diffusers' class copies to the device again in every block."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of a latent's patches."""
        cosines, sines = super().forward(hidden_states)
        return sent(cosines, hidden_states.device), sent(sines, hidden_states.device)


class GlmImageTransformer2DModel(diffusers.GlmImageTransformer2DModel):  # type: ignore[misc]
    """GLM-Image, with blocks that copy nothing to the device."""

    @functools.wraps(diffusers.GlmImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.rope.__class__ = _GlmImageAngles


class CosmosTransformer3DModel(diffusers.CosmosTransformer3DModel):  # type: ignore[misc]
    """Cosmos, called with latents that include the mask channels.

    diffusers' class creates the padding channel itself, with a library that is not a dependency of this project.
    diffusers folders are written with the plan's configuration, not this module's, which counts that channel.
    """

    @functools.wraps(diffusers.CosmosTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        if self.config.concat_padding_mask:
            self.register_to_config(concat_padding_mask=False, in_channels=self.config.in_channels + 1)


class HunyuanVideo15Transformer3DModel(diffusers.HunyuanVideo15Transformer3DModel):  # type: ignore[misc]
    """HunyuanVideo 1.5, with the noise level in full precision.

    diffusers' class embeds it in the precision of the latents; 16 bits cannot tell 737 from 739.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run diffusers' forward."""
        hook = self.time_embed.register_forward_hook(lambda _, __, embedded: embedded.to(hidden_states.dtype))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            hook.remove()


class Ideogram4Transformer2DModel(_Ideogram4Transformer2DModel):  # type: ignore[misc]
    """Ideogram 4 with its second model, if the file has one, and texts without padding.

    diffusers' class projects 53,248 numbers for each patch too, which are zeros, and masks tokens that do not exist.
    """

    @functools.wraps(_Ideogram4Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, has_unconditional: bool = False, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.register_to_config(has_unconditional=has_unconditional)
        if has_unconditional:
            self.add_module(UNCONDITIONAL, Ideogram4Transformer2DModel(*args, **sizes))

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None,
        position_ids: Tensor,
        segment_ids: Tensor | None = None,
        indicator: Tensor | None = None,
        **more: Any,
    ) -> Any:
        """Run diffusers' forward if there is an `indicator`. Else return the velocities of the patches `hidden_states`:
        `encoder_hidden_states` are of the words before them; None: the second model predicts, which reads no words.
        Tokens read each other if their `segment_ids` are equal; None: all do."""
        named = {"hidden_states": hidden_states, "timestep": timestep, "position_ids": position_ids}
        if indicator is not None:
            more |= {"encoder_hidden_states": encoder_hidden_states, "segment_ids": segment_ids, "indicator": indicator}
            return super().forward(**named, **more)
        if encoder_hidden_states is None and self.config.has_unconditional:
            return self.get_submodule(UNCONDITIONAL)(**named, encoder_hidden_states=None)
        word_D, patch_D = self.embed_image_indicator(torch.arange(2, device=hidden_states.device))
        tokens = self.input_proj(hidden_states) + patch_D
        if encoder_hidden_states is not None:
            words = self.llm_cond_proj(self.llm_cond_norm(encoder_hidden_states)) + word_D
            tokens = torch.cat((words, tokens), dim=1)
        level_B1D = nn.functional.silu(self.adaln_proj(self.t_embedding(timestep).unsqueeze(1))).to(tokens.dtype)
        rotations = tuple(each.to(tokens.dtype) for each in self.rotary_emb(position_ids))
        mask = None if segment_ids is None else (segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)).unsqueeze(1)
        for block in self.layers:
            tokens = block(tokens, mask, rotations, level_B1D)
        return (self.final_layer(tokens[:, -hidden_states.shape[1] :], conditioning=level_B1D),)


#: latent frames of the longest video that requests may name, one that begins it, and patches of 2x2 cells along a side
#: of the largest
_KANDINSKY_FRAMES, _KANDINSKY_PATCHES = (1 << 12) + 1, 1024


class Kandinsky5Transformer3DModel(diffusers.Kandinsky5Transformer3DModel):  # type: ignore[misc]
    """Kandinsky 5 with positions for every size that a request may name; diffusers' tables end at 2,048 pixels and 128
    latent frames.

    The tables are computed, not weights.
    """

    @functools.wraps(diffusers.Kandinsky5Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        shorter = self.get_submodule("visual_rope_embeddings")
        self.visual_rope_embeddings = _larger_tables(shorter, self.config.axes_dims)


def _larger_tables(positions: Any, axes: Sequence[int]) -> Any:
    """Return tables of positions like `positions`, for heads of `axes`, that are large enough for all requests."""
    return type(positions)(axes, (_KANDINSKY_FRAMES, _KANDINSKY_PATCHES, _KANDINSKY_PATCHES))


class _Kandinsky6Times(_PlainTimes):  # type: ignore[misc]
    """Embeds noise levels in full precision, whatever the precision of the weights."""

    def forward(self, timestep: Tensor) -> Tensor:
        """Return a row per level, [B, D]."""
        embedded: Tensor = self.timestep_embedder(self.time_proj(timestep))
        return embedded


class _Kandinsky6Modulation(_PlainModulation):  # type: ignore[misc]
    """Modulates in full precision, whatever the precision of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return shifts, scales and gates, [B, D]."""
        modulation: Tensor = self.out_layer(self.activation(x.float()))
        return modulation


class Kandinsky6Transformer3DModel(_Kandinsky6Transformer3DModel):  # type: ignore[misc]
    """Kandinsky 6 with positions for every size that a request may name, as Kandinsky 5. Levels and modulations are
    computed in full precision, in which diffusers keeps their weights; its class reads the type of the weights, which
    here may be one in which nothing is computed.
    """

    @functools.wraps(_Kandinsky6Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        shorter = self.get_submodule("visual_rope_embeddings")
        self.visual_rope_embeddings = _larger_tables(shorter, self.config.axes_dims)
        audio: Any = self.get_submodule("audio_rope_embeddings")
        self.audio_rope_embeddings = type(audio)(audio.dim, MOST_SOUND, freqs_scaling=audio.freqs_scaling)
        for part in self.modules():
            if type(part) is _PlainTimes:
                part.__class__ = _Kandinsky6Times
            elif type(part) is _PlainModulation:
                part.__class__ = _Kandinsky6Modulation


class LTXVideoTransformer3DModel(diffusers.LTXVideoTransformer3DModel):  # type: ignore[misc]
    """LTX-Video with the position rule of its frames as an argument (`causal_temporal_positioning` in its files).

    Models since 0.9.5 count from the single frame of the first cell, not from the eight of the others. In diffusers, a
    separate pipeline sets this.
    """

    def __init__(self, *args: Any, causal_temporal_positioning: bool = False, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.register_to_config(causal_temporal_positioning=causal_temporal_positioning)

    # allowed in a configuration: diffusers' arguments, and this one
    __init__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        diffusers.LTXVideoTransformer3DModel.__init__
    ).replace(
        parameters=[
            *inspect.signature(diffusers.LTXVideoTransformer3DModel.__init__).parameters.values(),
            inspect.Parameter("causal_temporal_positioning", inspect.Parameter.KEYWORD_ONLY, default=False),
        ]
    )


class _OmniGenPositions(nn.Module):
    """Rotary positions of OmniGen, with other wavelengths in longer sequences.

    diffusers' class reads the length of the sequence back from the device, and waits for a copy to it.
    """

    def __init__(self, known: Any) -> None:
        """`known` is diffusers' class. Raises ValueError for another number of factors than of wavelengths."""
        super().__init__()
        factors, self.short_length = (known.short_factor, known.long_factor), known.original_max_position_embeddings
        if any(len(each) != known.dim // 2 for each in factors):
            raise ValueError(f"rope_scaling: found {[len(each) for each in factors]}, expected {known.dim // 2} each")
        shares = torch.arange(0, known.dim, 2, dtype=torch.int64).float() / known.dim
        self.rates = tuple(1.0 / (torch.tensor(each) * known.base**shares) for each in factors)
        scale = known.max_position_embeddings / self.short_length
        self.scale = 1.0 if scale <= 1.0 else math.sqrt(1 + math.log(scale) / math.log(self.short_length))

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [N,D], of the positions in the first row of `position_ids`, which are 0 to N-1 in
        all of them."""
        rates = sent(self.rates[position_ids.shape[-1] > self.short_length], position_ids.device)
        angles_ND = torch.outer(position_ids[0].float(), rates).repeat(1, 2)
        return angles_ND.cos() * self.scale, angles_ND.sin() * self.scale


class OmniGenTransformer2DModel(diffusers.OmniGenTransformer2DModel):  # type: ignore[misc]
    """OmniGen, called with embedded words (`input_ids`), some of which are replaced by images: by the latents
    `input_img_latents` at the places `input_image_sizes`, for all texts of a batch.

    diffusers' class embeds the words, and computes a table of positions of 450 MB that files have. Both stay parts of
    the model.
    """

    @functools.wraps(diffusers.OmniGenTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, pos_embed_max_size: int = 192, **sizes: Any) -> None:
        super().__init__(*args, pos_embed_max_size=1, **sizes)
        self.register_to_config(pos_embed_max_size=pos_embed_max_size)
        table_BND = torch.empty(1, pos_embed_max_size**2, self.config.hidden_size)
        self.patch_embedding.register_buffer("pos_embed", table_BND)
        self.patch_embedding.pos_embed_max_size = pos_embed_max_size
        self.rope = _OmniGenPositions(self.get_submodule("rope"))

    def _get_multimodal_embeddings(
        self, input_ids: Tensor, input_img_latents: list[Tensor], input_image_sizes: list[int]
    ) -> Tensor:
        parts, done = list[Tensor](), 0
        for place, latent_BCHW in zip(input_image_sizes, input_img_latents, strict=True):
            parts += [input_ids[:, done:place], self.patch_embedding(latent_BCHW, is_input_image=True)]
            done = place + 1
        return torch.cat([*parts, input_ids[:, done:]], dim=1)


class _SentTables:
    """Sends the tables of positions to the device without waiting for it, in each call: they are kept on no device."""

    pos_freqs: Tensor
    neg_freqs: Tensor

    def _get_device_freqs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return sent(self.pos_freqs, device), sent(self.neg_freqs, device)


class _QwenPositions(_SentTables, QwenEmbedRope):  # type: ignore[misc]
    """Positions of Qwen-Image."""


class _QwenLayerPositions(_SentTables, QwenEmbedLayer3DRope):  # type: ignore[misc]
    """Positions of the model of Qwen-Image that splits layers."""


class QwenImageTransformer2DModel(diffusers.QwenImageTransformer2DModel):  # type: ignore[misc]
    """Qwen-Image, with calls that do not wait for the device."""

    @functools.wraps(diffusers.QwenImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        is_plain = type(self.pos_embed) is QwenEmbedRope
        self.pos_embed.__class__ = _QwenPositions if is_plain else _QwenLayerPositions


class StableAudioDiTModel(diffusers.StableAudioDiTModel):  # type: ignore[misc]
    """diffusers' class, also for files without biases of norms; published biases are zero.

    `norm_bias` is false for such files; all else is unchanged.
    """

    @functools.wraps(diffusers.StableAudioDiTModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, norm_bias: bool = True, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        for block in self.transformer_blocks if not norm_bias else ():
            for norm in (block.norm1, block.norm2, block.norm3):
                norm.bias = None


class StableCascadeUNet(diffusers.StableCascadeUNet):  # type: ignore[misc]
    """diffusers' class with the time embedding in full precision, which 16 bits cannot represent."""

    def _down_encode(self, x_BCHW: Tensor, time_embedding: Tensor, clip: Tensor) -> Any:
        return super()._down_encode(x_BCHW, time_embedding.to(x_BCHW.dtype), clip)

    def _up_decode(self, levels: list[Tensor], time_embedding: Tensor, clip: Tensor) -> Any:
        return super()._up_decode(levels, time_embedding.to(levels[0].dtype), clip)


class AceStepConditionEncoder(_AceStepConditionEncoder):  # type: ignore[misc]
    """diffusers' class for texts without padding and without a reference audio, each called once for a run.

    `silence_latent` is a parameter; it is None with `silence_cells` 0, for files without it.
    """

    silence_latent: nn.Parameter | None

    @functools.wraps(_AceStepConditionEncoder.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, silence_cells: int = SILENCE_CELLS, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        del self.silence_latent
        shape = (1, silence_cells, self.config.timbre_hidden_dim)
        silence_1LC = nn.Parameter(torch.empty(shape)) if silence_cells else None
        self.register_parameter("silence_latent", silence_1LC)
        # one state for each reference: diffusers' counts them on the host, which waits for the device
        self.timbre_encoder.unpack_timbre_embeddings = lambda states_ND, _: (states_ND[:, None], None)

    def forward(
        self, text_BLD: Tensor, lyrics_BLD: Tensor, cells: int, silence_1LC: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the context of lyrics, reference and text, [B,L,D], the learned state, [1,1,D], and the latent of
        silence of `cells`, [1,L,C]. `silence_1LC` is for a model that has none.

        Raises CorruptFile if there is neither.
        """
        own = self.silence_latent if silence_1LC is None else silence_1LC
        if own is None:
            if not text_BLD.is_meta:
                raise CorruptFile("the model has no latent of silence, expected silence_latent")
            own = torch.empty((1, 1, self.config.timbre_hidden_dim), device=text_BLD.device)
        own = own.to(device=text_BLD.device, dtype=text_BLD.dtype)
        timbre_11D, _ = self.timbre_encoder(_as_long(own, TIMBRE_CELLS), None)
        lyrics_BLD = self.lyric_encoder(inputs_embeds=lyrics_BLD, attention_mask=None)
        parts = (lyrics_BLD, timbre_11D.expand(len(text_BLD), -1, -1), self.text_projector(text_BLD))
        return torch.cat(parts, dim=1), self.null_condition_emb.to(text_BLD.dtype), _as_long(own, cells)


def _as_long(silence_1LC: Tensor, cells: int) -> Tensor:
    """Return the latent of silence of `cells`: its last one is repeated."""
    missing = cells - silence_1LC.shape[1]
    if missing > 0:
        silence_1LC = torch.cat((silence_1LC, silence_1LC[:, -1:].expand(-1, missing, -1)), dim=1)
    return silence_1LC[:, :cells]


class AceStepTransformer1DModel(_AceStepTransformer1DModel):  # type: ignore[misc]
    """diffusers' class with its condition encoder, which is a component of its own there. Arguments of that begin with
    the name of the part."""

    def __init__(self, *args: Any, **sizes: Any) -> None:
        own = f"{COMPANION}_"
        super().__init__(*args, **{name: value for name, value in sizes.items() if not name.startswith(own)})
        self.condition_encoder = AceStepConditionEncoder(
            **{name.removeprefix(own): value for name, value in sizes.items() if name.startswith(own)}
        )

    __init__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        _AceStepTransformer1DModel.__init__
    ).replace(
        parameters=[
            *inspect.signature(_AceStepTransformer1DModel.__init__).parameters.values(),
            *(
                inspect.Parameter(f"{COMPANION}_{name}", inspect.Parameter.KEYWORD_ONLY, default=one.default)
                for name, one in inspect.signature(_AceStepConditionEncoder.__init__).parameters.items()
                if name != "self"
            ),
        ]
    )


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
        # the width that the class embeds; the hook zeroes the embedding
        width = self.config.projection_class_embeddings_input_dim // self.config.addition_time_embed_dim
        try:
            return super().forward(
                sample, timestep, encoder_hidden_states, sample.new_zeros(batch, width, dtype=torch.float32), **more
            )
        finally:
            for hook in hooks:
                hook.remove()


class WanReferenceTransformer3DModel(diffusers.WanTransformer3DModel):  # type: ignore[misc]
    """Wan that also reads a reference image: tokens of the latent of an image, by a convolution of its own, which have
    the places of a frame before the video.

    Source: `ref_conv` of WanTransformer3DModel of aigc-apps/VideoX-Fun.
    """

    def __init__(self, *args: Any, reference_channels: int = 16, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        width, patch = self.patch_embedding.out_channels, self.config.patch_size[1:]
        self.ref_conv = nn.Conv2d(reference_channels, width, kernel_size=patch, stride=patch)

    __init__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        diffusers.WanTransformer3DModel.__init__
    ).replace(
        parameters=[
            *inspect.signature(diffusers.WanTransformer3DModel.__init__).parameters.values(),
            inspect.Parameter("reference_channels", inspect.Parameter.KEYWORD_ONLY, default=16),
        ]
    )

    def forward(self, hidden_states: Tensor, reference: Tensor, **more: Any) -> Any:
        """Run diffusers' forward with the tokens of `reference`, [B,C,H,W], before the tokens of the video; return the
        prediction of the video, as a tuple."""
        tokens_BDHW = self.ref_conv(reference)

        def led(_: Any, __: Any, patches_BDTHW: Tensor) -> Tensor:
            return torch.cat([tokens_BDHW.unsqueeze(2), patches_BDTHW[:, :, 1:]], dim=2)

        leading_BCTHW = torch.cat([torch.zeros_like(hidden_states[:, :, :1]), hidden_states], dim=2)
        hook = self.patch_embedding.register_forward_hook(led)
        try:
            (predicted_BCTHW,) = super().forward(leading_BCTHW, **{**more, "return_dict": False})
        finally:
            hook.remove()
        return (predicted_BCTHW[:, :, 1:],)


#: cells along a side of the patches that the camera's rays are read in, and numbers of the rays of a cell of frames
_RAY_CELL, _RAY_NUMBERS = 8, 24


class _RayBlock(nn.Module):
    """Two convolutions next to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, states_BDHW: Tensor) -> Tensor:
        """Return the states plus what the convolutions make of them."""
        found: Tensor = self.conv2(torch.relu(self.conv1(states_BDHW)))
        return states_BDHW + found


class _RayReader(nn.Module):
    """What reads the rays of a camera: one state for each patch of the video."""

    def __init__(self, width: int, patch: Sequence[int]) -> None:
        super().__init__()
        high, wide = patch
        self.conv = nn.Conv2d(_RAY_NUMBERS * _RAY_CELL**2, width, kernel_size=(high, wide), stride=(high, wide))
        self.residual_blocks = nn.Sequential(_RayBlock(width))

    def forward(self, rays_BCHW: Tensor) -> Tensor:
        """Return the states of the rays of one cell of frames, [B,24,H,W] in pixels."""
        found: Tensor = self.residual_blocks(self.conv(nn.functional.pixel_unshuffle(rays_BCHW, _RAY_CELL)))
        return found


class WanCameraTransformer3DModel(diffusers.WanTransformer3DModel):  # type: ignore[misc]
    """Wan that also reads the path of a camera: states of its rays are added to the patches.

    Source: `control_adapter` of WanTransformer3DModel of aigc-apps/VideoX-Fun.
    """

    @functools.wraps(diffusers.WanTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.control_adapter = _RayReader(self.patch_embedding.out_channels, self.config.patch_size[1:])

    def forward(self, hidden_states: Tensor, camera: Tensor | None = None, **more: Any) -> Any:
        """Run diffusers' forward with the rays of `camera`, its numbers in each frame [B,F,16]; without one, as it
        is."""
        if camera is None:
            return super().forward(hidden_states, **more)
        sides = [side * _RAY_CELL for side in hidden_states.shape[-2:]]
        states = [self.control_adapter(rays.to(hidden_states.dtype)) for rays in rays_of_cells(camera, *sides)]

        def seen(_: Any, __: Any, patches_BDTHW: Tensor) -> Tensor:
            return patches_BDTHW + torch.stack(states, dim=2)

        hook = self.patch_embedding.register_forward_hook(seen)
        try:
            return super().forward(hidden_states, **more)
        finally:
            hook.remove()


#: by the name of the class
ADAPTED: Mapping[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        AceStepTransformer1DModel,
        ChromaTransformer2DModel,
        CosmosTransformer3DModel,
        HunyuanVideo15Transformer3DModel,
        Ideogram4Transformer2DModel,
        Kandinsky5Transformer3DModel,
        Kandinsky6Transformer3DModel,
        LTXVideoTransformer3DModel,
        OmniGenTransformer2DModel,
        OmniGen2Transformer2DModel,
        QwenImageTransformer2DModel,
        StableAudioDiTModel,
        WanCameraTransformer3DModel,
        WanReferenceTransformer3DModel,
        StableCascadeUNet,
        ViewedUNet,
    )
}
