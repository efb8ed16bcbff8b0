"""Allegro: text-to-video, diffusion over timesteps with the texts of T5. Torch-free.

Its tensors have the names of PixArt, and it predicts the noise alone. A third of a head is rotated by each of time,
row and column. The first latent frame is four frames, as all others: the last three of a video are not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import PIXART
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of an attention head, which cannot be read from shapes
_HEAD = 96
#: width of PixArt, of which some have learned no variance either
_PIXART = 1152
_TOKENS = 512
#: variances that the first and the last level of the noise add
_FIRST_BETA, _LAST_BETA = 0.0001, 0.02


def is_allegro(found: fam.Config) -> bool:
    """Return whether a model with these sizes, and the names of PixArt, is an Allegro that reads texts alone."""
    hidden, channels = found["hidden_size"], found["in_channels"]
    has_heads = isinstance(hidden, int) and hidden % _HEAD == 0 and hidden != _PIXART
    return has_heads and found.get("out_channels") == channels and not found.get("reads_frames")


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.AllegroTransformer3DModel`. Those that scale positions are the published ones."""
    sizes: dict[str, Any] = dict(found)
    return {
        "patch_size": sizes["patch_size"],
        "num_attention_heads": sizes["hidden_size"] // _HEAD,
        "attention_head_dim": _HEAD,
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_layers": sizes["depth"],
        "cross_attention_dim": sizes["hidden_size"],
        "caption_channels": sizes["context_dim"],
    }


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the noise."""
    return fam.sample_of(
        module(
            hidden_states=x_BCTHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            timestep=level_B,
            image_rotary_emb=_rotary(fam.config_of(module), x_BCTHW),
            return_dict=False,
        )
    )


def _rotary(own: Any, x_BCTHW: Tensor) -> tuple[Any, Tensor]:
    """Return cosines and sines of each axis, and the position of each patch along it, [3,1,N].

    Source: diffusers' AllegroPipeline, `_prepare_rotary_positional_embeddings`. Its positions are rounded down from
    numbers that are not exact, and may be one less than the number of the patch: so are these.
    """
    import torch
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    frames, *sides = x_BCTHW.shape[2:]
    rows, columns = (side // own.patch_size for side in sides)
    *tables, times, downs, acrosses = get_3d_rotary_pos_embed_allegro(
        embed_dim=own.attention_head_dim,
        crops_coords=((0, 0), (rows, columns)),
        grid_size=(rows, columns),
        temporal_size=frames,
        interpolation_scale=(own.interpolation_scale_t, own.interpolation_scale_h, own.interpolation_scale_w),
        device=x_BCTHW.device,
    )
    places = torch.cartesian_prod(*(axis.to(torch.long) for axis in (times, downs, acrosses)))
    return tuple(tables), places.T.reshape(3, 1, -1).contiguous()


FAMILIES = (
    fam.Family(
        name="allegro",
        title="Allegro",
        detect=fam.Detection(PIXART, is_allegro, ""),
        build=fam.ModelBuild(
            "AllegroTransformer3DModel",
            config,
            fam.unchanged(),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (fam.fixed_length("t5xxl", _TOKENS, cleaning=fam.Cleaning.LOWERED, is_masked=True, mask=fam.MaskMode.REAL),)
        ),
        latent="allegro",
        sampling=fam.SamplingFacts(
            fam.Prediction.NOISE,
            noise=fam.NoiseFacts(fam.NoiseKind.LINEAR, beta_start=_FIRST_BETA, beta_end=_LAST_BETA),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            video=fam.VideoFacts(
                # the published 88 are as many latent frames
                frames=85,
                multiple=4,
                rate=15.0,
            ),
            defaults=fam.SamplingDefaults(
                steps=100, cfg=7.5, sampler="euler_ancestral", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.ALLEGRO,
        ),
        size=(1280, 720),
        sources="diffusers' AllegroPipeline; rhymes-ai/Allegro",
        folder=fam.DiffusersFolder(
            "AllegroPipeline",
            scheduler=fam.SchedulerFacts(
                "EulerAncestralDiscreteScheduler",
                {
                    "beta_start": _FIRST_BETA,
                    "beta_end": _LAST_BETA,
                    "beta_schedule": "linear",
                    "prediction_type": "epsilon",
                    "timestep_spacing": "linspace",
                },
            ),
        ),
        lora=fam.TRANSFORMER,
    ),
)
