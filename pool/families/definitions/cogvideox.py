"""CogVideoX: text-to-video in two sizes, image-to-video, both in version 1.5, and models that follow a video (Fun).
Torch-free.

The smaller model has 30 heads and adds positions to its patches; the larger one has 48 and rotates queries and keys.
Their latents have different scales, and their noise levels different shifts. The image-to-video model also has a
learned table of positions, and thus one size. Version 1.5 reads pairs of latent frames: one that is not decoded
precedes the video.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.video_layouts import COGVIDEOX
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.video_calls import fixed_extent, joined
from modelpool.pool.values.core.errors import UnknownArchitecture, unusable_field

if TYPE_CHECKING:
    from torch import Tensor, nn

#: heads of the smaller model
_SMALL_HEADS = 30
#: width, height and frames of its training, and pixels and frames of a latent cell
_WIDTH, _HEIGHT, _FRAMES = 720, 480, 49
_CELL, _CELL_FRAMES = 8, 4
#: the same of version 1.5
_WIDTH_15, _HEIGHT_15, _FRAMES_15 = 1360, 768, 81
#: what the image-to-video model of version 1.5 reads in addition to the timestep. Source: its pipeline
_OFFSET = 2.0
#: frames of two cells: the decoder reads pairs of them after the first cell, and makes more frames of an even number
_PAIR = 2 * _CELL_FRAMES
_TOKENS = 226
_PATCH = 2
#: base of the wavelengths of rotary positions
_THETA = 10000.0
#: table of learned positions
_TABLE = "patch_embed.pos_embedding"

#: the names of single files, which are ComfyUI's
_NAMES = fam.LayoutTable(
    outer=(
        ("patch_embed.", "patch_embed."),
        ("time_embedding_linear_1.", "time_embedding.linear_1."),
        ("time_embedding_linear_2.", "time_embedding.linear_2."),
        ("ofs_embedding_linear_1.", "ofs_embedding.linear_1."),
        ("ofs_embedding_linear_2.", "ofs_embedding.linear_2."),
        ("norm_final.", "norm_final."),
        ("norm_out.", "norm_out."),
        ("proj_out.", "proj_out."),
    ),
    swapped=(),
    blocks="transformer_blocks",
    block={
        "q": ("attn1.to_q",),
        "k": ("attn1.to_k",),
        "v": ("attn1.to_v",),
        "norm_q": ("attn1.norm_q",),
        "norm_k": ("attn1.norm_k",),
        "attn_out": ("attn1.to_out.0",),
        "ff_proj": ("ff.net.0.proj",),
        "ff_out": ("ff.net.2",),
    },
)
#: the names of the files of the original code, in the folders of a block. Source: the key lists in diffusers'
#: convert_cogvideox_to_diffusers.py
_ORIGINAL = fam.LayoutTable(
    outer=(
        ("mixins.patch_embed.", "patch_embed."),
        ("mixins.pos_embed.pos_embedding", "patch_embed.pos_embedding"),
        ("time_embed.0.", "time_embedding.linear_1."),
        ("time_embed.2.", "time_embedding.linear_2."),
        ("ofs_embed.0.", "ofs_embedding.linear_1."),
        ("ofs_embed.2.", "ofs_embedding.linear_2."),
        ("transformer.final_layernorm.", "norm_final."),
        ("mixins.final_layer.norm_final.", "norm_out.norm."),
        ("mixins.final_layer.adaLN_modulation.1.", "norm_out.linear."),
        ("mixins.final_layer.linear.", "proj_out."),
    ),
    swapped=(),
    blocks="transformer_blocks",
    block={
        "attention.query_key_value": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "query_layernorm_list": ("attn1.norm_q",),
        "key_layernorm_list": ("attn1.norm_k",),
        "attention.dense": ("attn1.to_out.0",),
        "mlp.dense_h_to_4h": ("ff.net.0.proj",),
        "mlp.dense_4h_to_h": ("ff.net.2",),
        "input_layernorm": ("norm1.norm",),
        "post_attention_layernorm": ("norm2.norm",),
    },
)
#: modules that the original code lists by kind, not by block
_LISTED = re.compile(r"mixins\.adaln_layer\.(\w+)\.(\d+)\.(?:1\.)?(weight|bias)")
#: vectors that modulate a block: three before the attention and three before the feed-forward, of the video, then of
#: the text
_MODULATIONS = ("adaLN_modulations", 12)


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a single file, or of a file of the original code, under diffusers' names."""
    if not any(key.startswith("transformer.layers.") for key in tensors):
        return _NAMES.convert(tensors)
    import torch

    named: dict[str, Tensor] = {}
    modulations: dict[str, Tensor] = {}
    listed, count = _MODULATIONS
    for key, tensor in tensors.items():
        found = _LISTED.fullmatch(key)
        if found is None:
            named[key.replace("transformer.layers.", "blocks.")] = tensor
        elif found[1] != listed:
            named[f"blocks.{found[2]}.{found[1]}.{found[3]}"] = tensor
        else:
            parts, block = tensor.chunk(count), f"transformer_blocks.{found[2]}"
            modulations[f"{block}.norm1.linear.{found[3]}"] = torch.cat([*parts[0:3], *parts[6:9]])
            modulations[f"{block}.norm2.linear.{found[3]}"] = torch.cat([*parts[3:6], *parts[9:12]])
    return _ORIGINAL.convert(named) | modulations


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.CogVideoXTransformer3DModel`."""
    sizes: dict[str, Any] = dict(found)
    has_table, patch_frames = _TABLE in shapes, sizes["patch_frames"]
    width, height, frames = _WIDTH, _HEIGHT, _FRAMES
    if has_table:
        width, height, frames = _table_sides(shapes[_TABLE])
    elif patch_frames > 1:
        width, height, frames = _WIDTH_15, _HEIGHT_15, _FRAMES_15
    offset = shapes.get("ofs_embedding.linear_1.weight")
    return {
        "num_attention_heads": sizes["num_heads"],
        "attention_head_dim": sizes["hidden_size"] // sizes["num_heads"],
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // (_PATCH**2 * patch_frames),
        "time_embed_dim": shapes["time_embedding.linear_1.weight"][0],
        "text_embed_dim": shapes["patch_embed.text_proj.weight"][1],
        "num_layers": sizes["depth"],
        "patch_size": _PATCH,
        "patch_size_t": patch_frames if patch_frames > 1 else None,
        "ofs_embed_dim": None if offset is None else offset[1],
        "sample_width": width // _CELL,
        "sample_height": height // _CELL,
        "sample_frames": frames,
        "max_text_seq_length": _TOKENS,
        "use_rotary_positional_embeddings": sizes["num_heads"] != _SMALL_HEADS,
        "use_learned_positional_embeddings": has_table,
    }


def _table_sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return width, height and frames of the videos with one row per patch of 2 x 2 cells in a table of `shape`.

    Sides are 3 to 2; a table may fit several sizes: the largest is meant. Raises UnknownArchitecture
    for a table of none.
    """
    patches = shape[1] - _TOKENS
    for unit in range(math.isqrt(max(patches, 0) // 6), 0, -1):
        if patches % (6 * unit**2) == 0:
            side = 2 * _CELL * unit
            return 3 * side, 2 * side, (patches // (6 * unit**2) - 1) * _CELL_FRAMES + 1
    raise UnknownArchitecture(
        f"CogVideoX: {_TABLE}: found {shape[1]} rows, expected {_TOKENS} and one for each patch of a video of 3 to 2"
    )


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the velocity. Raises UnusableField for a size that the table of positions does not have."""
    own = fam.config_of(module)
    more: dict[str, Tensor] = {}
    if own.ofs_embed_dim:
        # images were divided by the scale of latents in its training, instead of multiplied
        kwargs = {**kwargs, "image": kwargs["image"] / _SCALE**2}
        more["ofs"] = x_BCTHW.new_full((1,), _OFFSET)
    x_BTCHW = joined(x_BCTHW, kwargs).transpose(1, 2)
    frames, _, rows, columns = x_BTCHW.shape[1:]
    requested, fixed = (columns * _CELL, rows * _CELL, (frames - 1) * _CELL_FRAMES + 1), fixed_extent(own)
    if fixed is not None and requested != fixed:
        found, expected = (f"{w} x {h} pixels, {f} frames" for w, h, f in (requested, fixed))
        raise unusable_field("width, height and frames", found, f"{expected}, for which the model has positions")
    rotary = None
    if own.use_rotary_positional_embeddings:
        rotary = _rotary(own, frames, rows // own.patch_size, columns // own.patch_size, x_BCTHW.device)
    out_BTCHW = fam.sample_of(
        module(
            hidden_states=x_BTCHW,
            encoder_hidden_states=kwargs["context"],
            timestep=level_B,
            image_rotary_emb=rotary,
            **more,
            return_dict=False,
        )
    )
    return out_BTCHW.transpose(1, 2)


def _rotary(own: Any, frames: int, rows: int, columns: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions of all patches, [N,head]: a quarter of a head for time, the rest for
    rows and columns. Positions are of the training size, cropped to the form of the video; in version 1.5, the
    numbers of patches.

    Source: diffusers' CogVideoXPipeline, `_prepare_rotary_positional_embeddings`.
    """
    import torch

    base_rows, base_columns = own.sample_height // own.patch_size, own.sample_width // own.patch_size
    if rows / columns > base_rows / base_columns:
        fitting = base_rows, round(base_rows / rows * columns)
    else:
        fitting = round(base_columns / columns * rows), base_columns
    head, bases = own.attention_head_dim, (base_rows, base_columns)
    if own.patch_size_t:
        frames //= own.patch_size_t
        bases = fitting = rows, columns
    places = [(0.0, float(frames), frames, head // 4)]
    for base, size, count in zip(bases, fitting, (rows, columns), strict=True):
        start = round((base - size) / 2.0)
        places.append((float(start), float(start + size), count, head // 8 * 3))
    tables = []
    for axis, (start, stop, count, width) in enumerate(places):
        # positions end where the next patch would be
        last = start + (stop - start) * (count - 1) / count if axis == 0 else stop * (count - 1) / count
        grid = torch.linspace(start, last, count, device=device, dtype=torch.float32)
        rates = 1.0 / _THETA ** (torch.arange(0, width, 2, device=device, dtype=torch.float32)[: width // 2] / width)
        angles = torch.outer(grid, rates).repeat_interleave(2, dim=1)
        shape = [1, 1, 1, width]
        shape[axis] = count
        tables.append(angles.reshape(shape).expand(frames, rows, columns, width))
    angles = torch.cat(tables, dim=-1).reshape(frames * rows * columns, -1)
    return angles.cos(), angles.sin()


def _having(channels: int, patch_frames: int, *, small: bool = False) -> fam.Condition:
    def condition(found: fam.Config) -> bool:
        sizes = found["in_channels"], found["patch_frames"], found["num_heads"] == _SMALL_HEADS
        return sizes == (channels, patch_frames, small)

    return condition


def _reads_offset(found: fam.Config) -> bool:
    """Return whether a model with these sizes is version 1.5 and reads an image, and is no relative of it."""
    return _having(2 * _CHANNELS, 2)(found) and bool(found["reads_offset"])


def _learned(found: fam.Config) -> bool:
    """Return whether a model with these sizes reads an image, and has a table of positions."""
    return found["in_channels"] == 2 * _CHANNELS and found["patch_frames"] == 1 and bool(found["learned_positions"])


def _follows(*, small: bool) -> fam.Condition:
    """Return the condition of a model that reads the latent of a video, and computes its positions."""
    sizes = _having(2 * _CHANNELS, 1, small=small)
    return lambda found: sizes(found) and not found["learned_positions"]


def _noise(shift: float) -> fam.NoiseFacts:
    return fam.NoiseFacts(fam.NoiseKind.ZERO_TERMINAL, sigma_max=_PURE_NOISE, shift=shift)


def scheduler(shift: float) -> fam.SchedulerFacts:
    """The published scheduler, with this shift of its signal-to-noise ratio."""
    return fam.SchedulerFacts(
        "CogVideoXDDIMScheduler",
        {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "clip_sample": False,
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
            "rescale_betas_zero_snr": True,
            "snr_shift_scale": shift,
        },
    )


#: the level of pure noise, of which the pipeline begins: an image in it is beyond the precision of its prediction
_PURE_NOISE = 1e5
#: channels of latents, and their scale
_CHANNELS = 16
_SCALE = fam.LATENT_FORMATS["cogvideox"].scale
_SMALL_SHIFT, _LARGE_SHIFT = 3.0, 1.0
_LAYOUT_NAMES = fam.LayoutNames(
    "cogvideox",
    # positions that the model computes, and tables of the language model that it was made from
    without=("mixins.pos_embed.freqs_", "transformer.word_embeddings", "transformer.position_embeddings"),
    converter=convert,
)


def _teacache(*coefficients: float) -> tuple[fam.TeaCacheFacts, ...]:
    return (fam.TeaCacheFacts(coefficients, 0.1, of_vector=True),)


_LARGE = fam.Family(
    name="cogvideox",
    title="CogVideoX 5B",
    detect=fam.Detection(COGVIDEOX, _having(_CHANNELS, 1), "CogVideoX_T2V"),
    build=fam.ModelBuild(
        "CogVideoXTransformer3DModel",
        config,
        _LAYOUT_NAMES,
        forward,
        dtypes=fam.BFLOAT16_FIRST,
    ),
    text=fam.TextInputs((fam.fixed_length("t5xxl", _TOKENS),), set_name="cogvideox"),
    latent="cogvideox",
    sampling=fam.SamplingFacts(
        fam.Prediction.VELOCITY,
        noise=_noise(_LARGE_SHIFT),
        reads=frozenset({"context"}),
        side_multiple=16,
        video=fam.VideoFacts(frames=_FRAMES, multiple=_PAIR, rate=8.0, cell=_CELL_FRAMES),
        defaults=fam.SamplingDefaults(
            steps=50, cfg=6.0, sampler="euler", schedule="trailing", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.COGVIDEOX,
    ),
    size=(_WIDTH, _HEIGHT),
    sources="diffusers' CogVideoXPipeline; THUDM/CogVideoX-5b",
    folder=fam.DiffusersFolder("CogVideoXPipeline", scheduler=scheduler(_LARGE_SHIFT)),
    lora=fam.TRANSFORMER,
    options=fam.OptionFacts(
        teacache=_teacache(-1.53880483e03, 8.43202495e02, -1.34363087e02, 7.97131516e00, -5.23162339e-02),
        skips_blocks=True,
    ),
)

_SMALL = replace(
    _LARGE,
    name="cogvideox_2b",
    title="CogVideoX 2B",
    detect=replace(_LARGE.detect, when=_having(_CHANNELS, 1, small=True)),
    build=replace(
        _LARGE.build,
        # its code keeps the sines that the model computes in a parameter, which is not trained
        convert=replace(_LAYOUT_NAMES, without=(*_LAYOUT_NAMES.without, "mixins.pos_embed.pos_embedding")),
        dtypes=fam.HALF_FIRST,
    ),
    latent="cogvideox_2b",
    sampling=replace(_LARGE.sampling, noise=_noise(_SMALL_SHIFT)),
    sources="diffusers' CogVideoXPipeline; THUDM/CogVideoX-2b",
    folder=replace(_LARGE.folder, scheduler=scheduler(_SMALL_SHIFT)),
    options=replace(
        _LARGE.options,
        teacache=_teacache(-3.10658903e01, 2.54732368e01, -5.92380459e00, 1.75769064e00, -3.61568434e-03),
    ),
)


def _following(base: fam.Family, name: str, title: str, small: bool, source: str) -> fam.Family:
    """Return the model that follows a video, with the sizes of `base`."""
    return replace(
        base,
        name=name,
        title=title,
        detect=replace(base.detect, when=_follows(small=small), comfyui="CogVideoX_I2V"),
        sampling=replace(base.sampling, reads=frozenset({"context", "followed"})),
        sources=f"diffusers' CogVideoXFunControlPipeline; {source}",
        folder=replace(base.folder, pipeline="CogVideoXFunControlPipeline"),
        options=replace(base.options, teacache=()),
    )


FAMILIES = (
    _following(
        _SMALL, "cogvideox_2b_fun_control", "CogVideoX 2B Fun control", True, "alibaba-pai/CogVideoX-Fun-V1.1-2b-Pose"
    ),
    _following(
        _LARGE, "cogvideox_fun_control", "CogVideoX Fun control", False, "alibaba-pai/CogVideoX-Fun-V1.1-5b-Pose"
    ),
    _SMALL,
    _LARGE,
    replace(
        _LARGE,
        name="cogvideox_i2v",
        title="CogVideoX image-to-video",
        detect=replace(_LARGE.detect, when=_learned, comfyui="CogVideoX_I2V"),
        sampling=replace(
            _LARGE.sampling,
            reads=frozenset({"context", "image"}),
            video=fam.video_like(_LARGE.sampling, begins=fam.FirstFrameMode.FIRST_CELL),
        ),
        sources="diffusers' CogVideoXImageToVideoPipeline; THUDM/CogVideoX-5b-I2V",
        folder=replace(_LARGE.folder, pipeline="CogVideoXImageToVideoPipeline"),
    ),
    replace(
        _LARGE,
        name="cogvideox_15",
        title="CogVideoX 1.5",
        detect=replace(_LARGE.detect, when=_having(_CHANNELS, 2)),
        sampling=replace(
            _LARGE.sampling, video=fam.video_like(_LARGE.sampling, frames=_FRAMES_15, rate=16.0, unseen=1)
        ),
        size=(_WIDTH_15, _HEIGHT_15),
        sources="diffusers' CogVideoXPipeline; THUDM/CogVideoX1.5-5B",
        options=replace(
            _LARGE.options,
            teacache=_teacache(2.50210439e02, -1.65061612e02, 3.57804877e01, -7.81551492e-01, 3.58559703e-02),
        ),
    ),
    replace(
        _LARGE,
        name="cogvideox_15_i2v",
        title="CogVideoX 1.5 image-to-video",
        detect=replace(_LARGE.detect, when=_reads_offset, comfyui="CogVideoX_I2V"),
        sampling=replace(
            _LARGE.sampling,
            reads=frozenset({"context", "image"}),
            video=fam.video_like(
                _LARGE.sampling, frames=_FRAMES_15, rate=16.0, begins=fam.FirstFrameMode.FIRST_CELL, unseen=1
            ),
        ),
        size=(_WIDTH_15, _HEIGHT_15),
        sources="diffusers' CogVideoXImageToVideoPipeline; THUDM/CogVideoX1.5-5B-I2V",
        folder=replace(
            _LARGE.folder, pipeline="CogVideoXImageToVideoPipeline", vae_entries={"invert_scale_latents": True}
        ),
        options=replace(
            _LARGE.options,
            teacache=_teacache(1.22842302e02, -1.04088754e02, 2.62981677e01, -3.06009921e-01, 3.71213220e-02),
        ),
    ),
)
