"""JoyImage: two streams of words and patches, in Wan's latents, with the last states of Qwen 3 VL 8B. Torch-free.

Makes images of texts, and edits an image, which its text encoder sees and which has the size of the output: its latent
is a second frame.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: both namings are equal
LAYOUT = fam.Layout(
    "JoyImage",
    (
        fam.published(
            "double_blocks.0.attn.img_attn_qkv.weight",
            "condition_embedder.time_embedder.linear_1.weight",
            "img_in.weight",
            measure=fam.sizes(
                in_channels=fam.dim("img_in.weight", 1, 5),
                hidden_size=fam.dim("img_in.weight", 0, 5),
                num_layers=fam.count("double_blocks."),
                context_dim=fam.dim("condition_embedder.text_embedder.linear_1.weight", 1),
            ),
        ),
    ),
)
#: with a backslash and an n, as in training
_TEMPLATE = (
    "<|im_start|>system\n \\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_IMAGE_TEMPLATE = _TEMPLATE.replace("{}", f"<|vision_start|>{fam.IMAGE_TOKEN}<|vision_end|>{{}}")
#: first tokens, dropped after encoding, and the others that are read
_BEFORE, _TOKENS = 34, 2048
#: base of the rotations, of the published configuration; the default of the class is another one
_THETA = 10000


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.JoyImageEditTransformer3DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden, patch = measured["hidden_size"], list(shapes["img_in.weight"][2:])
    head = shapes["double_blocks.0.attn.img_attn_q_norm.weight"][0]
    return {
        "patch_size": patch,
        "in_channels": measured["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "hidden_size": hidden,
        "num_attention_heads": hidden // head,
        "text_dim": measured["context_dim"],
        "mlp_width_ratio": shapes["double_blocks.0.img_mlp.net.0.proj.weight"][0] / hidden,
        "num_layers": measured["num_layers"],
        "rope_dim_list": list(fam.rope_axes(head)),
        "theta": _THETA,
    }


def forward(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The module has no mask: texts of different lengths run one after the other. A latent of
    one frame is accepted as an image."""
    import torch

    mask, context, reference = kwargs.get("context_mask"), kwargs["context"], kwargs.get("reference")
    items = [x] if reference is None else [reference, x]
    # [B, items, C, T, H, W]: the one to denoise is the last
    items_BN = torch.stack([item if item.dim() == 5 else item.unsqueeze(2) for item in items], dim=1)
    if mask is None:
        return _predict(module, items_BN, level_B, context).reshape(x.shape)
    rows = [
        _predict(module, items_BN[row:][:1], level_B[row:][:1], context[row:][:1, : int(mask[row].sum())])
        for row in range(len(x))
    ]
    return torch.cat(rows).reshape(x.shape)


def _predict(module: nn.Module, items_BN: Tensor, level_B: Tensor, context_BLD: Tensor) -> Tensor:
    """Return the prediction for texts of one length."""
    out_BN = fam.sample_of(
        module(
            hidden_states=items_BN,
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=context_BLD,
            return_dict=False,
        )
    )
    return out_BN[:, -1]


FAMILIES = (
    fam.Family(
        name="joyimage",
        title="JoyImage",
        detect=fam.Detection(LAYOUT, fam.anything, "JoyImage"),
        build=fam.ModelBuild(
            "JoyImageEditTransformer3DModel",
            config,
            fam.unchanged(),
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask", "reference"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3vl_8b",
                    4096,
                    _TEMPLATE,
                    dropped_tokens=_BEFORE,
                    most_tokens=_TOKENS + _BEFORE,
                    is_masked=True,
                    padding=fam.Padding.DROPPED,
                    final_norm=False,
                    image_template=_IMAGE_TEMPLATE,
                ),
            ),
            vision=fam.TextVision(
                {fam.ReferenceMode.WHOLE: "JoyImageEditPipeline"},
                {"processor": "a checkpoint has none, expected the processor of Qwen/Qwen3-VL-8B-Instruct"},
                part=fam.VisionPart.QWEN_3,
            ),
        ),
        latent="wan21",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=1.5),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=32,
            patch_side=16,
            cfg_rescale=fam.CfgRescale.CELLS,
            reference_covers=True,
            defaults=fam.SamplingDefaults(
                steps=40,
                cfg=4.0,
                sampler="euler",
                # the pipeline leaves the levels to the scheduler, which ends slightly above the last step
                schedule="normal",
                guidance=fam.Guidance.CLASSIFIER_FREE,
            ),
            sequence=sequence_plans.JOYIMAGE,
        ),
        sources="diffusers' JoyImageEditPipeline, which rescales each cell to its norm before guidance, and makes "
        "images of about a million pixels; the shift of SGLang",
        folder=fam.DiffusersFolder(
            "JoyImageEditPipeline",
            missing={"processor": "a checkpoint has none, expected the processor of Qwen/Qwen3-VL-8B-Instruct"},
        ),
        # diffusers has the names of the original code
        lora=fam.GENERIC,
    ),
)
