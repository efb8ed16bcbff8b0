"""LTX-Video: each cell is a patch; its time position depends on the frame rate. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.video_layouts import LTX, LTX_HEADS
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask
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

if TYPE_CHECKING:
    from torch import Tensor, nn

#: blocks of the first LTX-Video; all models with more count frames as since 0.9.5. Source: the metadata of
#: Lightricks/LTX-Video's files
FIRST_BLOCKS = 28
#: entry of the configuration with the position rule of frames
CAUSAL = "causal_temporal_positioning"
#: metadata entry with the configuration in the files, and the part that is used
_METADATA = ("config", "transformer")
#: frames, height and width of a latent cell. Source: LTXPipeline
CELL = (8, 32, 32)
#: inputs of images and frames that guide a video
GUIDES = ("guide", "guide_mask", "guide_frames", "guide_cells", "guide_places")


def video_config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments that LTX-Video and LTX-2 share: the sizes of what reads the video."""
    sizes: dict[str, Any] = dict(found)
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0],
        "num_attention_heads": LTX_HEADS,
        "attention_head_dim": sizes["hidden_size"] // LTX_HEADS,
        "cross_attention_dim": sizes["cross_attention_dim"],
        "num_layers": sizes["num_layers"],
    }


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.LTXVideoTransformer3DModel`, for all versions of LTX-Video."""
    sizes: dict[str, Any] = dict(found)
    return {
        **video_config(found, shapes),
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        "attention_bias": "transformer_blocks.0.attn1.to_q.bias" in shapes,
        CAUSAL: sizes["num_layers"] > FIRST_BLOCKS,
    }


def metadata_configuration(metadata: Mapping[str, str]) -> fam.Arguments:
    """Return the facts in the metadata of an LTX-Video file that shapes do not tell, for `plan_diffusion_model`'s
    `config`.

    Empty for metadata without them, or in another form.
    """
    entry, part = _METADATA
    try:
        configuration = json.loads(metadata.get(entry, "{}"))
    except ValueError:
        return {}
    found = configuration.get(part) if isinstance(configuration, dict) else None
    value = found.get(CAUSAL) if isinstance(found, dict) else None
    return {CAUSAL: value} if isinstance(value, bool) else {}


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Kept frames of an image have no noise."""
    _, _, frames, height, width = x_BCTHW.shape
    causal = fam.config_of(module).get(CAUSAL, False)
    timestep, read_BCTHW = level_B * fam.TIMESTEPS, with_image(x_BCTHW, kwargs)
    if "image_mask" in kwargs:
        timestep = timestep.unsqueeze(-1) * (1 - kwargs["image_mask"].to(timestep.dtype)[:, 0].flatten(1))
    if "guide" in kwargs:
        read_BCTHW, timestep = with_guides(x_BCTHW, kwargs), guided_timestep(timestep, kwargs)
    given = causal or "guide_frames" in kwargs
    coordinates = _places(x_BCTHW, frame_rate(kwargs), kwargs, causal) if given else None
    out_BNC = fam.sample_of(
        module(
            hidden_states=read_tokens(read_BCTHW.flatten(2).transpose(1, 2), kwargs),
            encoder_hidden_states=kwargs["context"],
            timestep=timestep if "guide" not in kwargs else read_tokens(timestep, kwargs),
            encoder_attention_mask=text_mask(kwargs, "context"),
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(CELL[0] / frame_rate(kwargs), *CELL[1:]),
            video_coords=None if coordinates is None else read_tokens(coordinates, kwargs, dim=2),
            return_dict=False,
        )
    )
    out_BNC = at_all_places(out_BNC, frames * height * width, kwargs)
    predicted = out_BNC.transpose(1, 2).unflatten(2, (frames, height, width))
    if "guide" in kwargs:
        return from_guided(predicted, x_BCTHW, read_BCTHW, level_B)
    return towards_image(predicted, x_BCTHW, level_B, kwargs)


def _places(x_BCTHW: Tensor, rate: float, kwargs: fam.ModelKwargs, causal: bool) -> Tensor:
    """Return the start of each cell, [B,3,N], in seconds and pixels; the first time cell is a single frame, if the
    model counts so. Leading cells of images and of frames are at their frames."""
    import torch

    batch, _, frames, height, width = x_BCTHW.shape
    guide_frames = kwargs.get("guide_frames")
    leading = 0 if guide_frames is None else guide_frames.shape[1]
    axes = [torch.arange(size, device=x_BCTHW.device) for size in (frames, height, width)]
    in_time, down, across = torch.meshgrid(*axes, indexing="ij")
    frame = ((in_time - leading) * CELL[0] + (1 - CELL[0] if causal else 0)).clamp(min=0)
    if guide_frames is not None:  # equal for all of a batch
        starts_K = guide_bounds(kwargs, CELL[0], causal)[0, :, 0].to(frame.dtype)
        frame = torch.cat((starts_K[:, None, None].expand(-1, height, width), frame[leading:]))
    places = torch.stack((frame.float() * (1.0 / rate), (down * CELL[1]).float(), (across * CELL[2]).float()))
    return places.reshape(1, len(CELL), -1).expand(batch, -1, -1)


FAMILIES = (
    fam.Family(
        name="ltxv",
        title="LTX-Video",
        detect=fam.Detection(LTX, fam.having(audio=False), "LTXV"),
        build=fam.ModelBuild(
            "LTXVideoTransformer3DModel",
            config,
            "ltxv",
            forward,
            metadata_config=metadata_configuration,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask", "image", "image_mask", *GUIDES}),
        ),
        text=fam.TextInputs(
            # padding is visible to T5, not to the model
            (fam.fixed_length("t5xxl", 128, mask=fam.MaskMode.REAL),)
        ),
        latent="ltxv",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            sequence=sequence_plans.LTX,
            noise=fam.NoiseFacts(
                fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((1024, 4096), (0.95, 2.05)), last_share=0.1
            ),
            reads=frozenset({"context", "frame_rate", "context_mask", "image", "image_mask", *GUIDES}),
            side_multiple=32,
            video=fam.VideoFacts(frames=161, multiple=8, rate=25.0, begins=fam.FirstFrameMode.KEPT, guided=True),
            defaults=fam.SamplingDefaults(
                steps=50, cfg=3.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
        ),
        size=(704, 512),
        sources="diffusers' LTXPipeline; scheduler_config.json of Lightricks/LTX-Video; ComfyUI's class has 2.37 "
        "as shift",
        folder=fam.DiffusersFolder("LTXPipeline", config_pipelines={CAUSAL: "LTXConditionPipeline"}),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(
            teacache=(
                fam.TeaCacheFacts(
                    (2.14700694e01, -1.28016453e01, 2.31279151e00, 7.92487521e-01, 9.69274326e-03), 0.03, 28
                ),
            ),
            skips_blocks=True,
        ),
    ),
)
