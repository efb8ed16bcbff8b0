"""Qwen-Image, and editing models with a text encoder that sees the reference images. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import QWEN_IMAGE
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import packed, references, unpacked

if TYPE_CHECKING:
    from torch import Tensor, nn

#: a tensor in some files of Qwen-Image-Edit 2511, which was trained with numbered images
_NUMBERED_KEY = "__index_timestep_zero__"
#: "edit" as a word of a name, not as a part of "credit" or "edited"
_EDIT = r"(?:(?<![A-Za-z])(?i:edit)|(?<=[a-z])Edit|(?i:(?:qwen|image)edit))"
#: names of its editing models, and of the ones that were trained with numbered images: Qwen-Image-Edit 2509 (year,
#: month) and later ones
_EDIT_NAMES = rf"{_EDIT}(?![a-z])|{_EDIT}(?i:plus)"
_NUMBERED_NAMES = (
    rf"{_EDIT}[^A-Za-z0-9]?(?i:plus)(?![a-z])"
    rf"|{_EDIT}(?![a-z]).*(?<!\d)(?:25(?:09|1[0-2])|(?:2[6-9]|3\d)(?:0[1-9]|1[0-2]))(?!\d)"
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.QwenImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"] // fam.PATCH,
        "num_layers": sizes["num_layers"],
        "attention_head_dim": head,
        "num_attention_heads": sizes["num_attention_heads"],
        "joint_attention_dim": sizes["context_dim"],
        "axes_dims_rope": fam.rope_axes(head),
        # the reference image is marked as clean
        "zero_cond_t": bool(sizes["clean_reference"]),
        "use_additional_t_cond": bool(sizes["layered"]),
        "use_layer3d_rope": bool(sizes["layered"]),
    }


def forward(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Layers are frames of a video, the complete image first. A latent of one frame is accepted
    as an image."""
    import torch

    config = fam.config_of(module)
    frames = list(x.unbind(2)) if x.dim() == 5 else [x]
    rows = torch.cat([packed(frame) for frame in frames], dim=1)
    cells, shapes = rows.shape[1], [_patches(frame) for frame in frames]
    for given in references(kwargs):
        reference = given.squeeze(2) if given.dim() == 5 else given
        rows, shapes = torch.cat((rows, packed(reference)), dim=1), [*shapes, _patches(reference)]
    if config.use_layer3d_rope and "reference" not in kwargs:
        raise KeyError("reference")  # its position table treats the last image as the one to split
    out_BND = fam.sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            encoder_hidden_states=kwargs["context"],
            encoder_hidden_states_mask=kwargs.get("context_mask"),
            img_shapes=[shapes] * x.shape[0],
            # whether the image has no transparency, which the pipeline never sets
            additional_t_cond=x.new_zeros(x.shape[0], dtype=torch.long) if config.use_additional_t_cond else None,
            return_dict=False,
        )
    )
    parts = out_BND[:, :cells].chunk(len(frames), dim=1)
    return torch.stack([unpacked(part, *x.shape[-2:]) for part in parts], dim=2).reshape(x.shape)


def _patches(x_BCHW: Tensor) -> tuple[int, int, int]:
    return 1, x_BCHW.shape[-2] // 2, x_BCHW.shape[-1] // 2


_QWEN_IMAGE = fam.Family(
    name="qwen_image",
    title="Qwen-Image",
    detect=fam.Detection(QWEN_IMAGE, fam.anything, "QwenImage"),
    build=fam.ModelBuild(
        "QwenImageTransformer2DModel",
        config,
        fam.unchanged(_NUMBERED_KEY),
        forward,
        dtypes=fam.NO_FLOAT16,
        optional_inputs=frozenset({"context_mask", "reference"}),
    ),
    text=fam.TextInputs(
        (
            fam.Reading(
                "qwen25_7b",
                3584,
                fam.QWEN_IMAGE,
                dropped_tokens=fam.QWEN_IMAGE_BEFORE,
                most_tokens=512 + fam.QWEN_IMAGE_BEFORE,
                is_masked=True,
                padding=fam.Padding.DROPPED,
            ),
        ),
        set_name="qwen_image",
        vision=fam.TextVision(
            {fam.ReferenceMode.WHOLE: "QwenImageEditPipeline", fam.ReferenceMode.NUMBERED: "QwenImageEditPlusPipeline"},
            {"processor": "a checkpoint has none, expected the processor of Qwen/Qwen-Image-Edit"},
            _NUMBERED_KEY,
            edit_names=_EDIT_NAMES,
            numbered_names=_NUMBERED_NAMES,
        ),
    ),
    latent="wan21",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        sequence=sequence_plans.QWEN_IMAGE,
        noise=fam.NoiseFacts(
            fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((256, 8192), (0.5, 0.9)), last_share=0.02
        ),
        reads=frozenset({"context", "context_mask"}),
        side_multiple=16,
        cfg_rescale=fam.CfgRescale.PATCHES,
        defaults=fam.SamplingDefaults(
            steps=50, cfg=4.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
    ),
    size=(1328, 1328),
    sources="diffusers' QwenImagePipeline, which rescales each patch to its norm before guidance; "
    "Qwen/Qwen-Image, scheduler. ComfyUI has a shift of 1.15 at every size",
    folder=fam.DiffusersFolder("QwenImagePipeline", vae_class="AutoencoderKLQwenImage"),
    # diffusers has the names of the original code
    lora=fam.GENERIC,
    options=fam.OptionFacts(controlnets="qwen_image", skips_blocks=True),
)

FAMILIES = (_QWEN_IMAGE,)
