"""Wan 2.2 animate: a character with the poses of one video and the face of another. Torch-free.

The character is in a cell before the video, which is not decoded, and in the states of CLIP's vision encoder. Videos
are made in one piece: the pipeline makes longer ones in segments of 77 frames, each of which begins with the end of the
one before, and can put the character into a video; both are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.definitions import wan
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.video_calls import FACE_SIDE, MASK_CHANNELS
from modelpool.pool.values.core.errors import UnknownArchitecture

if TYPE_CHECKING:
    from torch import Tensor, nn

_I2V = next(family for family in wan.FAMILIES if family.name == "wan21_i2v")

#: patterns of published names, and what diffusers has in their place; the first that matches a part counts
_NAMES: tuple[tuple[str, str], ...] = (
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
    (r"^img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
    (r"^img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
    (r"^img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
    (r"^img_emb\.emb_pos$", "condition_embedder.image_embedder.pos_embed"),
    (r"^head\.head\.", "proj_out."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
    (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),
    (r"^(blocks\.\d+)\.ffn\.0\.", r"\1.ffn.net.0.proj."),
    (r"^(blocks\.\d+)\.ffn\.2\.", r"\1.ffn.net.2."),
    (r"^(blocks\.\d+)\.self_attn\.norm_", r"\1.attn1.norm_"),
    (r"^(blocks\.\d+)\.cross_attn\.norm_k_img\.", r"\1.attn2.norm_added_k."),
    (r"^(blocks\.\d+)\.cross_attn\.norm_", r"\1.attn2.norm_"),
    (r"^(blocks\.\d+)\.cross_attn\.([kv])_img\.", r"\1.attn2.add_\2_proj."),
    (r"^(blocks\.\d+)\.self_attn\.o\.", r"\1.attn1.to_out.0."),
    (r"^(blocks\.\d+)\.cross_attn\.o\.", r"\1.attn2.to_out.0."),
    (r"^(blocks\.\d+)\.self_attn\.", r"\1.attn1.to_"),
    (r"^(blocks\.\d+)\.cross_attn\.", r"\1.attn2.to_"),
    (r"^face_adapter\.fuser_blocks\.(\d+)\.linear1_q\.", r"face_adapter.\1.to_q."),
    (r"^face_adapter\.fuser_blocks\.(\d+)\.linear2\.", r"face_adapter.\1.to_out."),
    (r"^face_adapter\.fuser_blocks\.(\d+)\.([qk])_norm\.", r"face_adapter.\1.norm_\2."),
    (r"^face_encoder\.(conv1_local|conv2|conv3)\.conv\.", r"face_encoder.\1."),
    (r"^motion_encoder\.dec\.direction\.weight$", "motion_encoder.motion_synthesis_weight"),
    (r"^motion_encoder\.enc\.fc\.", "motion_encoder.motion_network."),
)
#: keys and values of a face adapter, which are one tensor; a convolution of the motion encoder: its biases have the
#: dimensions of an image, its kernels that blur are fixed
_BOTH = re.compile(r"^face_adapter\.fuser_blocks\.(\d+)\.linear1_kv\.")
_CONVOLUTION = re.compile(r"^motion_encoder\.enc\.net_app\.convs\.(\d+)\.(?:(conv1|conv2|skip)\.)?(?:(\d)\.)?(\w+)$")
#: levels of the motion encoder below the one of 4 pixels
_LEVELS = 2


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters."""
    converted: dict[str, Tensor] = {}
    places = [int(found[1]) for key in tensors if (found := _CONVOLUTION.match(key))]
    for key, tensor in tensors.items():
        if found := _BOTH.match(key):
            start, rest = f"face_adapter.{found[1]}", key[found.end() :]
            converted[f"{start}.to_k.{rest}"], converted[f"{start}.to_v.{rest}"] = tensor.chunk(2)
        elif found := _CONVOLUTION.match(key):
            if found[4] != "kernel":
                name = _convolution(int(found[1]), max(places), found[2] or "", found[4])
                converted[name] = tensor.reshape(-1) if found[4] == "bias" else tensor
        else:
            converted[_renamed(key)] = tensor
    return converted


def _renamed(key: str) -> str:
    for pattern, name in _NAMES:
        if re.match(pattern, key):
            return re.sub(pattern, name, key)
    # norms of blocks are numbered in the order of the file, not of their use
    return re.sub(r"^(blocks\.\d+)\.norm2\.", r"\1.norm3.", key)


def _convolution(place: int, last: int, part: str, kind: str) -> str:
    """Return the name of a parameter of the motion encoder's convolutions."""
    if not part:
        start = "motion_encoder.conv_in" if place == 0 else "motion_encoder.conv_out"
        assert place in (0, last), f"a convolution alone is the first or the last one, found {place} of {last}"
    else:
        start = f"motion_encoder.res_blocks.{place - 1}.{'conv_skip' if part == 'skip' else part}"
    return f"{start}.weight" if kind == "weight" else f"{start}.act_fn.bias"


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.WanAnimateTransformer3DModel`."""
    measured: dict[str, Any] = wan.config(found, shapes)
    reader = fam.ShapeReader(shapes)
    blocks = len(reader.numbers("motion_encoder.res_blocks."))
    side = 2 ** (blocks + _LEVELS)
    if side != FACE_SIDE:
        raise UnknownArchitecture(f"Wan animate: found faces of {side} pixels a side, expected {FACE_SIDE}")
    widths = [shapes["motion_encoder.conv_in.weight"][0]]
    widths += [shapes[f"motion_encoder.res_blocks.{block}.conv2.weight"][0] for block in range(blocks)]
    motion, hidden = shapes["motion_encoder.motion_synthesis_weight"], shapes["face_encoder.conv2.weight"][0]
    return measured | {
        "latent_channels": shapes["pose_patch_embedding.weight"][1],
        "motion_encoder_size": side,
        "motion_encoder_channel_sizes": {str(side >> level): width for level, width in enumerate(widths)},
        "motion_style_dim": shapes["motion_encoder.conv_out.weight"][0],
        "motion_encoder_dim": motion[0],
        "motion_dim": motion[1],
        "face_encoder_hidden_dim": hidden,
        "face_encoder_num_heads": shapes["face_encoder.conv1_local.weight"][0] // hidden,
        "inject_face_latents_blocks": measured["num_layers"] // len(reader.numbers("face_adapter.")),
    }


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. "control" has mask and latent of the character, and the latents of the poses."""
    import torch

    kept = MASK_CHANNELS + x_BCTHW.shape[1]
    control = kwargs["control"]
    return fam.sample_of(
        module(
            hidden_states=torch.cat((x_BCTHW, control[:, :kept]), dim=1),
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=wan.padded_text(kwargs),
            encoder_hidden_states_image=kwargs["image_context"],
            # the character has no pose
            pose_hidden_states=control[:, kept:, 1:],
            face_pixel_values=kwargs["face"],
            return_dict=False,
        )
    )


FAMILIES = (
    replace(
        _I2V,
        name="wan22_animate",
        title="Wan 2.2 animate",
        detect=replace(_I2V.detect, when=fam.having(model_type="animate"), comfyui="WAN22_Animate"),
        build=replace(
            _I2V.build,
            module="WanAnimateTransformer3DModel",
            config=config,
            convert=fam.LayoutNames("wan22_animate", converter=convert),
            forward=forward,
        ),
        sampling=replace(
            _I2V.sampling,
            sequence=sequence_plans.WAN_ANIMATE,
            noise=wan.flow_noise(5.0),
            reads=frozenset({"context", "control", "face", "image_context", "context_mask"}),
            vision_use=fam.VisionEncoderUse.PENULTIMATE,
            video=fam.video_like(_I2V.sampling, frames=77, rate=30.0, begins=None),
            defaults=fam.defaults_like(_I2V.sampling, steps=20, cfg=1.0),
        ),
        size=(1280, 720),
        sources="diffusers' WanAnimatePipeline; Wan-Video/Wan2.2, wan_animate_14B",
        folder=replace(
            _I2V.folder,
            pipeline="WanAnimatePipeline",
            entries={"image_encoder": fam.NOTHING, "image_processor": fam.NOTHING},
        ),
        options=fam.OptionFacts(),
    ),
)
