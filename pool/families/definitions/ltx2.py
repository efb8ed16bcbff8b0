"""LTX-2: videos with their audio track, sampled together; each cell of the frames and each position of the audio is a
token. Torch-free.

A part that is published with the model joins the states of all layers of Gemma 3, once for the frames and once for the
audio: the model reads both, one behind the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.definitions.ltxv import CELL, GUIDES, video_config
from modelpool.pool.families.detection.layouts.video_layouts import LTX, LTX_HEADS
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.audio_tracks import (
    KEPT_SOUND,
    VOICE,
    SoundTrack,
    cells_of_frames,
    joined,
    sound_length,
)
from modelpool.pool.families.parts.video_calls import (
    at_all_places,
    frame_rate,
    from_guided,
    guide_bounds,
    guided_timestep,
    read_tokens,
    towards_image,
    with_guides,
    with_image,
)
from modelpool.pool.files.formats import folder_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

#: the part that joins the states of the text encoder, as the name of a text encoder
CONNECTORS = "ltx2_connectors"
#: four spectra of 16,000 / 160 per second are one position. Source: diffusers' LTX2Pipeline, also for the guidance
SOUND = fam.SoundFacts(cells_per_second=25.0, width=128, cfg=7.0, rescale=0.7)
_TOKENS = 1024
#: beginnings of names, and modules of blocks, in the original and in diffusers
_OUTER = (
    ("patchify_proj.", "proj_in."),
    ("audio_patchify_proj.", "audio_proj_in."),
    ("adaln_single.", "time_embed."),
    ("audio_adaln_single.", "audio_time_embed."),
    ("av_ca_video_scale_shift_adaln_single.", "av_cross_attn_video_scale_shift."),
    ("av_ca_audio_scale_shift_adaln_single.", "av_cross_attn_audio_scale_shift."),
    ("av_ca_a2v_gate_adaln_single.", "av_cross_attn_video_a2v_gate."),
    ("av_ca_v2a_gate_adaln_single.", "av_cross_attn_audio_v2a_gate."),
)
_INNER = (
    (".scale_shift_table_a2v_ca_video", ".video_a2v_cross_attn_scale_shift_table"),
    (".scale_shift_table_a2v_ca_audio", ".audio_a2v_cross_attn_scale_shift_table"),
    (".q_norm.", ".norm_q."),
    (".k_norm.", ".norm_k."),
)


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters from tensors under the published names."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = next((new + key.removeprefix(old) for old, new in _OUTER if key.startswith(old)), key)
        for old, new in _INNER:
            name = name.replace(old, new)
        converted[name] = tensor
    return converted


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.LTX2VideoTransformer3DModel`. Position arguments are the published ones."""
    return {
        **video_config(found, shapes),
        "audio_in_channels": shapes["audio_proj_in.weight"][1],
        "audio_out_channels": shapes["audio_proj_out.weight"][0],
        "audio_num_attention_heads": LTX_HEADS,
        "audio_attention_head_dim": shapes["audio_proj_in.weight"][0] // LTX_HEADS,
        "audio_cross_attention_dim": shapes["transformer_blocks.0.audio_attn2.to_k.weight"][1],
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        "rope_type": "split",
    }


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean, of frames and audio; what fills up the last cell of audio becomes zeros. Kept frames of an
    image have no noise, nor has audio that is kept.

    Source of the latter: the audio-to-video pipeline of Lightricks (`frozen` audio: noise level 0 for it, and where
    frames read it). Audio of a voice leads the audio, without noise and before its beginning. Source: ID-LoRA."""
    import torch

    rate = frame_rate(kwargs)
    _, channels, total, height, width = x_BCTHW.shape
    leading = kwargs["guide_frames"].shape[1] if "guide_frames" in kwargs else 0
    cells = cells_of_frames(SOUND, total - leading, channels * height * width, CELL[0], rate)
    own = leading + cells
    track = SoundTrack(SOUND, own, sound_length(SOUND, 1 + (cells - 1) * CELL[0], rate))
    video_BCTHW, sound_BLA = track.parted(x_BCTHW)
    names = ("image", "image_mask", "guide", "guide_mask")
    kept = {name: kwargs[name][:, :, :own] for name in names if name in kwargs}
    timestep_B = level_B * fam.TIMESTEPS
    timestep, read_BCTHW = timestep_B, with_image(video_BCTHW, kept)
    if "image_mask" in kept:
        timestep = timestep_B.unsqueeze(-1) * (1 - kept["image_mask"].to(timestep_B.dtype)[:, 0].flatten(1))
    if "guide" in kept:
        read_BCTHW = with_guides(video_BCTHW, kept)
        timestep = read_tokens(guided_timestep(timestep_B, kept), kwargs)
    # audio that is kept has no noise: neither as the model reads it, nor as the frames read it
    sound_timestep_B, read_BLA = timestep_B, sound_BLA
    if KEPT_SOUND in kwargs:
        sound_timestep_B, read_BLA = timestep_B * 0, kwargs[KEPT_SOUND].to(sound_BLA.dtype)
    voice_BRA = kwargs[VOICE].to(sound_BLA.dtype) if VOICE in kwargs else None
    coordinates = _places(module, video_BCTHW, kwargs, rate) if leading else None
    context, sound_context = kwargs["context"].chunk(2, dim=-1)
    video_BNC, audio_BLA = module(
        hidden_states=read_tokens(read_BCTHW.flatten(2).transpose(1, 2), kwargs),
        audio_hidden_states=read_BLA if voice_BRA is None else torch.cat((voice_BRA, read_BLA), dim=1),
        encoder_hidden_states=context,
        audio_encoder_hidden_states=sound_context,
        timestep=timestep,
        audio_timestep=sound_timestep_B if voice_BRA is None else _with_voice(sound_timestep_B, track, voice_BRA),
        # frames and audio read each other at the noise level of the other, as in the pipelines
        sigma=timestep_B,
        audio_sigma=sound_timestep_B,
        use_cross_timestep=True,
        num_frames=cells,
        height=height,
        width=width,
        fps=rate,
        audio_num_frames=track.length,
        audio_coords=None if voice_BRA is None else _voice_places(module, voice_BRA, track),
        video_coords=None if coordinates is None else read_tokens(coordinates, kwargs, dim=2),
        return_dict=False,
    )
    video_BNC = at_all_places(video_BNC, own * height * width, kwargs)
    predicted = video_BNC.transpose(1, 2).unflatten(2, (own, height, width))
    predicted = towards_image(predicted, video_BCTHW, level_B, kept)
    if "guide" in kept:
        predicted = from_guided(predicted, video_BCTHW, read_BCTHW, level_B)
    if voice_BRA is not None:
        audio_BLA = audio_BLA[:, voice_BRA.shape[1] :]
    if KEPT_SOUND in kwargs:
        audio_BLA = ((sound_BLA - read_BLA) / level_B.view(-1, 1, 1)).to(audio_BLA.dtype)
    return joined(predicted, audio_BLA, track.rest(x_BCTHW) / level_B.unsqueeze(-1))


def _with_voice(timestep_B: Tensor, track: SoundTrack, voice_BRA: Tensor) -> Tensor:
    """Return the timestep of each position of a voice, which has none, and of the audio behind it, [B, N]."""
    import torch

    none_BR = timestep_B.new_zeros(voice_BRA.shape[:2])
    return torch.cat((none_BR, timestep_B.unsqueeze(-1).expand(-1, track.length)), dim=1)


def _voice_places(module: nn.Module, voice_BRA: Tensor, track: SoundTrack) -> Tensor:
    """Return start and end in seconds of each position of a voice, and of the audio, [B, 1, N, 2]: the voice ends one
    position before the audio begins."""
    import torch

    rope: Any = module.audio_rope
    batch, length = voice_BRA.shape[:2]
    own = rope.prepare_audio_coords(batch, track.length, voice_BRA.device)
    voice = rope.prepare_audio_coords(batch, length, voice_BRA.device)
    return torch.cat((voice - voice[..., -1:, 1:] - 1.0 / track.facts.cells_per_second, own), dim=2)


def _places(module: nn.Module, x_BCTHW: Tensor, kwargs: fam.ModelKwargs, rate: float) -> Tensor:
    """Return start and end of each cell, [B,3,N,2], in seconds and pixels, of a latent that cells of guides lead: each
    image is at one frame, and a place of frames of a lower resolution ends where the next one starts."""
    import torch

    batch, _, own, height, width = x_BCTHW.shape
    rope: Any = module.rope
    leading, tokens = kwargs["guide_frames"].shape[1], height * width
    places = rope.prepare_video_coords(batch, own - leading, height, width, x_BCTHW.device, fps=rate)
    images = places[:, :, :tokens].repeat(1, 1, leading, 1)
    bounds_BK2 = guide_bounds(kwargs, CELL[0], causal=True).to(images.dtype)
    images[:, 0] = bounds_BK2.repeat_interleave(tokens, dim=1) / rate
    if "guide_cells" in kwargs:
        more_BN = (kwargs["guide_cells"][..., 1].to(images.dtype) - 1).repeat_interleave(tokens, dim=1)
        images[:, 1:, :, 1] += more_BN.unsqueeze(1) * torch.tensor(CELL[1:], device=images.device).view(1, 2, 1)
    return torch.cat((images, places), dim=2)


FAMILIES = (
    fam.Family(
        name="ltx2",
        title="LTX-2",
        detect=fam.Detection(
            LTX,
            fam.having(audio=True, gated=False),
            "LTXAV",
            sound_prefixes=tuple(f"{folder}." for folder in folder_header.AUDIO_FOLDERS),
        ),
        build=fam.ModelBuild(
            "LTX2VideoTransformer3DModel",
            config,
            convert,
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"image", "image_mask", KEPT_SOUND, VOICE, *GUIDES}),
        ),
        text=fam.TextInputs(
            (
                fam.fixed_length(
                    "gemma3_12b",
                    _TOKENS,
                    3840,
                    cleaning=fam.Cleaning.STRIPPED,
                    pads_left=True,
                    is_masked=True,
                    mask=fam.MaskMode.REAL,
                    every_layer=True,
                    first_state=True,
                ),
                fam.fixed_length(CONNECTORS, _TOKENS, 7680, connects=True),
            ),
            join=fam.TextJoin(lambda read: {"context": read[-1].context_LD}),
            connector=fam.Connector(
                "text_embedding_projection.", ("video_embeddings_connector.", "audio_embeddings_connector.")
            ),
        ),
        latent="ltxv",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            sequence=sequence_plans.LTX_2,
            noise=fam.NoiseFacts(
                fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((1024, 4096), (0.95, 2.05)), last_share=0.1
            ),
            reads=frozenset({"context", "frame_rate", "image", "image_mask", KEPT_SOUND, VOICE, *GUIDES}),
            side_multiple=32,
            video=fam.VideoFacts(
                frames=121, multiple=8, rate=24.0, begins=fam.FirstFrameMode.KEPT, sound=SOUND, guided=True
            ),
            defaults=fam.SamplingDefaults(
                steps=30, cfg=3.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
        ),
        size=(768, 512),
        sources="diffusers' LTX2Pipeline; scheduler_config.json of Lightricks/LTX-2",
        folder=fam.DiffusersFolder(
            "LTX2Pipeline",
            libraries=dict.fromkeys((folder_header.CONNECTORS, folder_header.VOCODER), "ltx2"),
            text_folders={fam.Role.TEXT_ENCODER: "text_encoder", fam.Role.TEXT_ENCODER_2: folder_header.CONNECTORS},
        ),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(isolates_sound=True),
    ),
)
