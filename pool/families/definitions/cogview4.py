"""CogView 4: one stream of words and patches, with the texts of GLM 4; and the model that follows an image. Torch-free.

The model reads the timestep before the shift, which grows with the size of the image. The latent of an image to follow
is concatenated with the noisy one. No single file of the original code has been published: files have the names of
diffusers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import COGVIEW
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import output_size
from modelpool.pool.families.parts.video_calls import joined

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head of CogView 3+, which has the same tensor names; CogView 4 is no multiple of it wide
OLDER_HEAD = 40
#: width of a head; one that is narrower is the only one
_HEAD = 128
#: channels of latents
CHANNELS = 16
#: sizes, and a crop, that the model reads; each is two numbers
_CONDITIONS = 6
#: largest error of a timestep that is computed from its level
_ROUNDING = 2e-3
#: grows with the size of the image
SHIFT = fam.ShiftByRoot(256, 0.25, 0.75)
#: the scheduler of its folders, with that shift
SCHEDULER = fam.SchedulerFacts(
    "FlowMatchEulerDiscreteScheduler",
    {
        "use_dynamic_shifting": True,
        "time_shift_type": "linear",
        "base_image_seq_len": 256,
        "base_shift": 0.25,
        "max_shift": 0.75,
    },
)
#: tokens of a prompt
_TOKENS = 1024
#: the number of tokens is a multiple of this
_MULTIPLE = 16
_PATCH = 2


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.CogView4Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, channels = sizes["hidden_size"], sizes["in_channels"]
    head = min(_HEAD, hidden)
    return {
        "patch_size": _PATCH,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // _PATCH**2,
        "num_layers": sizes["depth"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "text_embed_dim": sizes["context_dim"],
        "time_embed_dim": shapes["time_condition_embed.timestep_embedder.linear_1.weight"][0],
        "condition_dim": shapes["time_condition_embed.condition_embedder.linear_1.weight"][1] // _CONDITIONS,
    }


def is_version_4(found: fam.Config) -> bool:
    """Return whether a model with these sizes is neither a CogView 3+ nor one that reads an image."""
    return not is_older(found) and found["in_channels"] == CHANNELS


def follows_image(found: fam.Config) -> bool:
    """Return whether a model with these sizes is a CogView 4 that reads an image."""
    return not is_older(found) and found["in_channels"] == 2 * CHANNELS


def is_older(found: fam.Config) -> bool:
    """Return whether a model with these sizes is as wide as CogView 3+."""
    sizes: dict[str, Any] = dict(found)
    return not sizes["hidden_size"] % OLDER_HEAD


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Texts of different lengths run one after the other: the mask of diffusers' class does not
    hide words, but adds 1 to the weights of the others. "image" adds channels to the latent."""
    import torch

    x_BCHW = joined(x_BCHW, kwargs)
    mask, context, size = kwargs.get("context_mask"), kwargs["context"], output_size(x_BCHW, kwargs)
    timestep = timestep_before_shift(x_BCHW, level_B)
    if mask is None:
        return call(module, x_BCHW, timestep, context, size)
    rows = [slice(row, row + 1) for row in range(len(x_BCHW))]
    return torch.cat([call(module, x_BCHW[i], timestep[i], context[i, : int(mask[i].sum())], size[i]) for i in rows])


def timestep_before_shift(x_BCHW: Tensor, level_B: Tensor) -> Tensor:
    """Return the timestep that the shift for these latents moves to this level. Whole ones, which the usual schedules
    step through, are exact, although levels are rounded."""
    import torch

    shift = SHIFT.shift(x_BCHW.shape[-2] * x_BCHW.shape[-1] // _PATCH**2, 0)
    timestep_B = fam.TIMESTEPS * level_B / (shift - (shift - 1.0) * level_B)
    whole_B = timestep_B.round()
    return torch.where((timestep_B - whole_B).abs() < _ROUNDING, whole_B, timestep_B)


def call(module: nn.Module, x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, size_B2: Tensor) -> Tensor:
    """Return the output of a CogView for images that were not cropped."""
    import torch

    return fam.sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=context_BLD,
            timestep=timestep_B,
            original_size=size_B2,
            target_size=size_B2,
            crop_coords=torch.zeros_like(size_B2),
            return_dict=False,
        )
    )


_PLAIN = fam.Family(
    name="cogview4",
    title="CogView 4",
    detect=fam.Detection(COGVIEW, is_version_4, ""),
    build=fam.ModelBuild(
        "CogView4Transformer2DModel",
        config,
        fam.unchanged(),
        forward,
        dtypes=fam.NO_FLOAT16,
        optional_inputs=frozenset({"context_mask", "size"}),
    ),
    text=fam.TextInputs(
        (
            fam.Reading(
                "glm4_9b",
                4096,
                most_tokens=_TOKENS,
                multiple=_MULTIPLE,
                pads_left=True,
                is_masked=True,
                layers_left_out=1,
                final_norm=False,
                padding=fam.Padding.DROPPED,
            ),
        )
    ),
    latent="cogview4",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=SHIFT),
        reads=frozenset({"context", "context_mask", "size"}),
        side_multiple=16,
        defaults=fam.SamplingDefaults(
            steps=50, cfg=5.0, sampler="euler", schedule="linspace", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.COGVIEW4,
    ),
    sources="diffusers' CogView4Pipeline; THUDM/CogView4-6B",
    folder=fam.DiffusersFolder("CogView4Pipeline", scheduler=SCHEDULER),
    lora=fam.TRANSFORMER,
)

FAMILIES = (
    replace(
        _PLAIN,
        name="cogview4_control",
        title="CogView 4 control",
        detect=replace(_PLAIN.detect, when=follows_image),
        sampling=replace(
            _PLAIN.sampling,
            reads=frozenset({"context", "image", "context_mask", "size"}),
            image_concat=fam.ImageConcat.LATENT,
        ),
        sources="diffusers' CogView4ControlPipeline; THUDM/CogView4-6B-Control",
        folder=replace(_PLAIN.folder, pipeline="CogView4ControlPipeline"),
    ),
    _PLAIN,
)
