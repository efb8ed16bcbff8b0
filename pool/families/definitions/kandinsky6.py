"""Kandinsky 6: text-to-video and image-to-video with an audio track, with the text encoders of Kandinsky 5 and a branch
for each of video and audio. Torch-free.

Patches attend to text states that blocks of the branch have refined. A first frame is appended as one more latent
frame, which has the position of the first one and a type of its own, and which is not sampled. Distilled models predict
the clean latent at several levels of a step ("pi-Flow", Chen et al. 2025), and thus know a complete step.

Sources: diffusers' Kandinsky6TI2VAPipeline; the published configurations of kandinskylab/Kandinsky-6.0-Pro-5s-Diffusers
and kandinskylab/Kandinsky-6.0-Lite-5s-Diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.definitions import kandinsky5_video
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.audio_tracks import MOST_SOUND, SoundTrack, cells_of_frames, joined, sound_length
from modelpool.pool.families.parts.video_calls import frame_rate
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from torch import Tensor, nn

(_KANDINSKY_5,) = kandinsky5_video.FAMILIES
#: misspelled, as in training; and its tokens before the prompt
_TEMPLATE = kandinsky5_video.TEMPLATE.replace(" prompt engineer", " promt engineer")
_BEFORE, _TOKENS = 129, 1024
#: cells of a patch, along time, rows and columns
_PATCH = (1, 2, 2)
_CELLS_OF_PATCH = 4
#: frames of a latent frame
_CELL_FRAMES = 4
#: a position is two spectra of 512 of 44,100 samples per second. Source: the published configurations of its parts; the
#: scales are from models before and after their distillation
SOUND = fam.SoundFacts(cells_per_second=44100 / 1024, width=40, rounds_up=True, scale=0.5302)
_DISTILLED_SOUND = replace(SOUND, scale=0.417)
#: what no shape determines, of the published configurations
_AUDIO_FREQUENCIES = 0.144
_POSITION_SCALE = (1.0, 2.0, 2.0)
#: type of a latent frame that is appended
_FIRST_FRAME = 1
#: of distilled models: parts of the range before the shift in which a step is computed, and the least level. Source:
#: diffusers' `PiflowScheduler`
_SUBSTEPS, _LEAST_LEVEL = 128, 1e-6
_SHIFT = 5.0

_VIDEO_BLOCK = "video_dec_block."
#: patterns of the names of the original code, and what diffusers has in their place
_NAMES = (
    (r"^visual_blocks\.", "visual_transformer_blocks."),
    (r"\.videoT\.", f".{_VIDEO_BLOCK}"),
    (r"\.audioT\.", ".audio_dec_block."),
    (r"^audio_outLayer\.", "audio_out_layer."),
    (r"^(video|audio)_time_embeddings\.in_layer\.", r"\1_time_embeddings.timestep_embedder.linear_1."),
    (r"^(video|audio)_time_embeddings\.out_layer\.", r"\1_time_embeddings.timestep_embedder.linear_2."),
    (r"\.feed_forward\.in_layer\.", ".feed_forward.net.0.proj."),
    (r"\.feed_forward\.out_layer\.", ".feed_forward.net.2."),
    (r"^((?:video|audio)_text_transformer_blocks\.\d+)\.self_attention\.", r"\1.attn."),
)


def _measure(blocks: str) -> Callable[[fam.ShapeReader], fam.Config]:
    return fam.sizes(
        model_dim=fam.dim("visual_embeddings.in_layer.weight", 0),
        visual_embed_dim=fam.dim("visual_embeddings.in_layer.weight", 1),
        out_visual_dim=fam.dim("out_layer.out_layer.weight", 0, divide=_CELLS_OF_PATCH),
        audio_model_dim=fam.dim("audio_embeddings.in_layer.weight", 0),
        context_dim=fam.dim("video_text_embeddings.in_layer.weight", 1),
        num_text_blocks=fam.count("video_text_transformer_blocks."),
        num_visual_blocks=fam.count(blocks),
    )


LAYOUT = fam.Layout(
    "Kandinsky 6",
    (
        fam.published(
            "audio_embeddings.in_layer.weight",
            "visual_embeddings.in_layer.weight",
            "visual_blocks.0.videoT.self_attention.query_norm.weight",
            measure=_measure("visual_blocks."),
        ),
        fam.diffusers(
            "audio_embeddings.in_layer.weight",
            "visual_embeddings.in_layer.weight",
            f"visual_transformer_blocks.0.{_VIDEO_BLOCK}self_attention.query_norm.weight",
            measure=_measure("visual_transformer_blocks."),
        ),
    ),
)


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters, of tensors under the names of the original code."""
    converted = {}
    for key, tensor in tensors.items():
        for pattern, name in _NAMES:
            key = re.sub(pattern, name, key)
        converted[key] = tensor
    return converted


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.Kandinsky6Transformer3DModel`. A quarter of a head is rotated by the frame, the rest
    by row and column, as in the published configurations (32, 48 and 48 of 128)."""
    measured: dict[str, Any] = dict(found)
    block = "visual_transformer_blocks.0."
    width, audio_width = measured["model_dim"], measured["audio_model_dim"]
    types = shapes.get("visual_token_type_embeddings.weight")
    heads = {
        part: shapes[f"{block}{part}_dec_block.self_attention.query_norm.weight"][0] for part in ("video", "audio")
    }
    axes = {part: (head // 4, head * 3 // 8, head * 3 // 8) for part, head in heads.items()}
    return {
        "in_visual_dim": _channels(found),
        "out_visual_dim": measured["out_visual_dim"],
        "in_text_dim": measured["context_dim"],
        "in_text_dim2": shapes["video_pooled_text_embeddings.in_layer.weight"][1],
        "time_dim": shapes["video_time_embeddings.timestep_embedder.linear_2.weight"][0],
        "patch_size": _PATCH,
        "model_dim": width,
        "ff_dim": shapes[f"{block}{_VIDEO_BLOCK}feed_forward.net.0.proj.weight"][0],
        "num_text_blocks": measured["num_text_blocks"],
        "num_visual_blocks": measured["num_visual_blocks"],
        "axes_dims": axes["video"],
        "visual_cond": _reads_mask(found),
        "in_audio_dim": shapes["audio_embeddings.in_layer.weight"][1],
        "out_audio_dim": shapes["audio_out_layer.out_layer.weight"][0],
        "model_dim_a": audio_width,
        "time_dim_a": shapes["audio_time_embeddings.timestep_embedder.linear_2.weight"][0],
        "ff_dim_a": shapes[f"{block}audio_dec_block.feed_forward.net.0.proj.weight"][0],
        "axes_dims_a": axes["audio"],
        "audio_freqs_scaling": _AUDIO_FREQUENCIES,
        "scale_factor": _POSITION_SCALE,
        "text_token_padding": True,
        "ca_rope": True,
        "cross_gates": shapes[f"{block}va_modulation.out_layer.weight"][0] == 2 * width + audio_width,
        "fix_modulation": True,
        "visual_token_type_num_embeddings": types[0] if types else 0,
    }


def _read(found: fam.Config) -> int:
    return int(dict[str, Any](found)["visual_embed_dim"]) // _CELLS_OF_PATCH


def _reads_mask(found: fam.Config) -> bool:
    """Return whether a model with these sizes reads the latent, one that is empty, and a mask of one channel."""
    return _read(found) % 2 == 1


def _channels(found: fam.Config) -> int:
    """Return the channels of a latent."""
    return (_read(found) - 1) // 2 if _reads_mask(found) else _read(found)


def is_distilled(found: fam.Config) -> bool:
    """Return whether a model with these sizes predicts the latent at several levels."""
    return found["out_visual_dim"] != _channels(found)


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean, of frames and audio; what fills up the last cell of audio becomes zeros. "image" is the
    latent of a first frame, [B,C,1,H,W]. Raises UnusableField for one that the model cannot tell from the others, and
    for videos with too much audio."""
    track = _track(x_BCTHW, kwargs)
    video_BCTHW, sound_BLA = _predict(module, *track.parted(x_BCTHW), level_B, kwargs)
    return joined(video_BCTHW, sound_BLA, track.rest(x_BCTHW) / level_B.unsqueeze(-1))


def _track(x_BCTHW: Tensor, kwargs: fam.ModelKwargs) -> SoundTrack:
    """Return where a latent has its audio."""
    _, channels, total, rows, columns = x_BCTHW.shape
    rate = frame_rate(kwargs)
    cells = cells_of_frames(SOUND, total, channels * rows * columns, _CELL_FRAMES, rate)
    length = sound_length(SOUND, 1 + (cells - 1) * _CELL_FRAMES, rate)
    if length > MOST_SOUND:
        most = MOST_SOUND / SOUND.cells_per_second
        raise unusable_field("frames", 1 + (cells - 1) * _CELL_FRAMES, f"a video of at most {most:.0f} seconds")
    return SoundTrack(SOUND, cells, length)


def _predict(
    module: nn.Module, x_BCTHW: Tensor, sound_BLA: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs
) -> tuple[Tensor, Tensor]:
    """Return the predictions for frames and audio."""
    import torch

    own, image = fam.config_of(module), kwargs.get("image")
    x_BTHWC = x_BCTHW.movedim(1, -1)
    batch, frames, rows, columns, _ = x_BTHWC.shape
    shown: dict[str, Any] = {}
    if image is not None:
        if not own.visual_cond or own.visual_token_type_num_embeddings <= _FIRST_FRAME:
            raise unusable_field("image", "a first frame", "no image: the model has no type of latent frames for it")
        x_BTHWC = torch.cat((x_BTHWC, image.movedim(1, -1)), dim=1)
        times = torch.arange(frames + 1, device=x_BCTHW.device)
        shown = {
            "visual_token_type_ids": (times == frames).long().expand(batch, -1) * _FIRST_FRAME,
            "visual_rope_pos": (
                times * (times < frames),
                *(torch.arange(side // _PATCH[1], device=x_BCTHW.device) for side in (rows, columns)),
            ),
        }
    if own.visual_cond:
        empty = torch.zeros_like(x_BTHWC)
        mask = torch.zeros_like(x_BTHWC[..., :1])
        mask[:, frames:] = 1.0
        x_BTHWC = torch.cat((x_BTHWC, empty, mask), dim=-1)
    out_BTHWC, out_BLA = module(
        hidden_states=x_BTHWC,
        audio_hidden_states=sound_BLA,
        encoder_hidden_states=kwargs["context"],
        encoder_attention_mask=kwargs.get("context_mask"),
        pooled_projections=kwargs["pooled"],
        timestep=level_B * fam.TIMESTEPS,
        **shown,
        return_dict=False,
    )
    return out_BTHWC[:, :frames].movedim(-1, 1), out_BLA


def distilled_forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the mean of noise - clean over the step "step", of frames and audio: the model predicts it at several
    levels of the step, of which the clean latents at the levels between follow. Raises as `forward`.

    Source: diffusers' `PiflowScheduler`, with its defaults.
    """
    start, end, shift = kwargs["step"][0].tolist()
    track = _track(x_BCTHW, kwargs)
    x, sound = track.parted(x_BCTHW)
    predicted, predicted_sound = _predict(module, x, sound, level_B, kwargs)
    return joined(
        mean_over_step(x, predicted.unflatten(1, (-1, x.shape[1])), start, end, shift),
        mean_over_step(sound, predicted_sound.unflatten(2, (-1, sound.shape[2])).movedim(2, 1), start, end, shift),
        track.rest(x_BCTHW) / level_B.unsqueeze(-1),
    )


def mean_over_step(x_B: Tensor, predicted_BN: Tensor, start: float, end: float, shift: float) -> Tensor:
    """Return the mean of noise - clean from the level `start` to `end`, for predictions of it at N levels between."""
    x = x_B.float()
    clean_BN = x.unsqueeze(1) - start * predicted_BN.float()
    last = clean_BN.shape[1] - 1
    first_time, last_time = _time(start, shift), max(_time(end, shift), _LEAST_LEVEL)
    span = max(first_time - last_time, _LEAST_LEVEL)
    count = max(1, round((first_time - last_time) * _SUBSTEPS))
    level, there = start, x
    for done in range(1, count + 1):
        place = min(max((_time(level, shift) - last_time) / span, 0.0), 1.0) * last
        below = min(int(place), last - 1)
        clean = clean_BN[:, below] * (below + 1 - place) + clean_BN[:, below + 1] * (place - below)
        time = max(first_time - (first_time - last_time) * done / count, 0.0)
        next_level = shift * time / (1.0 + (shift - 1.0) * time)
        there = there + (there - clean) * ((next_level - level) / max(level, _LEAST_LEVEL))
        level = next_level
    return (x - there) * (1.0 / (start - end))


def _time(level: float, shift: float) -> float:
    """Return the place of a level in the range before the shift, 0 to 1."""
    return level / (shift - (shift - 1.0) * level)


_BASE = fam.Family(
    name="kandinsky6",
    title="Kandinsky 6",
    detect=fam.Detection(LAYOUT, fam.anything, "", sound_prefixes=("audio_vae.", "vocoder.")),
    build=fam.ModelBuild(
        "Kandinsky6Transformer3DModel",
        config,
        fam.LayoutNames("kandinsky6", converter=convert),
        forward,
        dtypes=fam.NO_FLOAT16,
        optional_inputs=frozenset({"context_mask", "image"}),
    ),
    text=fam.TextInputs(
        (
            replace(_KANDINSKY_5.text.readings[0], cleaning=fam.Cleaning.NONE),
            replace(
                _KANDINSKY_5.text.readings[1],
                template=_TEMPLATE,
                cleaning=fam.Cleaning.NONE,
                dropped_tokens=_BEFORE,
                most_tokens=_TOKENS + _BEFORE,
            ),
        ),
        set_name="kandinsky6",
    ),
    latent="hunyuan_video",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=_SHIFT),
        reads=frozenset({"context", "pooled", "frame_rate", "context_mask", "image"}),
        side_multiple=16,
        video=fam.VideoFacts(frames=121, multiple=4, rate=24.0, begins=fam.FirstFrameMode.APPENDED, sound=SOUND),
        defaults=fam.SamplingDefaults(
            steps=50, cfg=5.0, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.KANDINSKY6,
    ),
    size=(768, 512),
    sources="diffusers' Kandinsky6TI2VAPipeline",
    folder=fam.DiffusersFolder(
        "Kandinsky6TI2VAPipeline",
        text_folders=_KANDINSKY_5.folder.text_folders,
        # without what decodes audio, videos are silent
        entries={"audio_vae": fam.NOTHING, "vocoder": fam.NOTHING},
    ),
    lora=fam.GENERIC,
)

FAMILIES = (
    replace(
        _BASE,
        name="kandinsky6_distilled",
        title="Kandinsky 6 distilled",
        detect=replace(_BASE.detect, when=is_distilled),
        build=replace(_BASE.build, forward=distilled_forward),
        sampling=replace(
            _BASE.sampling,
            reads=frozenset({"context", "pooled", "frame_rate", "step", "context_mask", "image"}),
            video=fam.video_like(_BASE.sampling, sound=_DISTILLED_SOUND),
            defaults=fam.defaults_like(
                _BASE.sampling, steps=10, cfg=1.0, schedule="half_last", guidance=fam.Guidance.NONE
            ),
        ),
        sources="diffusers' Kandinsky6TI2VAPipeline; the steps of kandinskylab/kandinsky-6",
        folder=replace(
            _BASE.folder,
            scheduler=fam.SchedulerFacts(
                "PiflowScheduler",
                {
                    "shift": _SHIFT,
                    "n_grid": 10,
                    "eps": _LEAST_LEVEL,
                    "final_step_size_scale": 0.5,
                    "num_policy_substeps": _SUBSTEPS,
                },
            ),
        ),
    ),
    _BASE,
)
