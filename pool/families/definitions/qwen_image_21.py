"""Qwen-Image 2.1: one causal stream of text and of cells of 16 x 16 pixels, with the last states of Qwen 3 VL 8B.
Torch-free.

Words are read at level 0 and do not see the image. Its autoencoder has a channel of transparency: images are on white.
Models that are distilled to levels of their own (Turbo) have the same tensors: folders name their levels, and for files
requests do. Images to edit, which the text encoder has to see, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

_SIZES = fam.sizes(
    in_channels=fam.dim("img_in.weight", 1),
    hidden_size=fam.dim("img_in.weight", 0),
    depth=fam.count("transformer_blocks."),
    context_dim=fam.dim("txt_in.in_layer.weight", 1),
)
LAYOUT = fam.Layout(
    "Qwen-Image 2.1",
    (
        fam.published("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_up.weight", measure=_SIZES),
        fam.diffusers("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.proj.weight", measure=_SIZES),
    ),
)
#: gates and values of the feed-forward, which are one tensor in single files
_GATED = ".img_mlp.gate_up.weight"
_TEMPLATE = (
    "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
#: tokens of the system's turn, dropped after encoding
_BEFORE = 14
#: cells of a slot of the text encoder, which stands for 2x2 of them
_CELLS = 4
_PIXELS = 16


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key.endswith(_GATED):
            start = key.removesuffix("gate_up.weight")
            converted[f"{start}gate_layer.weight"], converted[f"{start}proj.weight"] = tensor.chunk(2)
        else:
            converted[key] = tensor
    return converted


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.QwenImage21Transformer2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden, head = measured["hidden_size"], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "in_channels": measured["in_channels"],
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": measured["depth"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "context_in_dim": measured["context_dim"],
        "mlp_ratio": shapes["transformer_blocks.0.img_mlp.proj.weight"][0] // hidden,
        "axes_dims_rope": fam.rope_axes(head),
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The position of the image is that after its text: texts of different lengths run one after
    the other."""
    import torch

    mask, context = kwargs.get("context_mask"), kwargs["context"]
    if mask is None:
        return _predict(module, x_BCHW, level_B, context)
    return torch.cat(
        [
            _predict(module, x_BCHW[row:][:1], level_B[row:][:1], context[row:][:1, : int(mask[row].sum())])
            for row in range(len(x_BCHW))
        ]
    )


def _predict(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, context_BLD: Tensor) -> Tensor:
    """Return the prediction for texts of one length. The image follows its text, with a slot for each 2x2 cells."""
    import torch

    b, _, height, width = x_BCHW.shape
    words = torch.zeros(context_BLD.shape[:2], dtype=torch.bool, device=x_BCHW.device)
    slots = torch.ones((b, height * width // _CELLS), dtype=torch.bool, device=x_BCHW.device)
    out_BND = fam.sample_of(
        module(
            hidden_states=x_BCHW.flatten(2).transpose(1, 2),
            timestep=level_B,
            encoder_hidden_states=context_BLD,
            img_shapes=[[(1, height, width)]] * b,
            img_mask=torch.cat((words, slots), dim=1),
            return_dict=False,
        )
    )
    return out_BND[:, -height * width :].transpose(1, 2).reshape(x_BCHW.shape)


FAMILIES = (
    fam.Family(
        name="qwen_image_21",
        title="Qwen-Image 2.1",
        detect=fam.Detection(LAYOUT, fam.anything, ""),
        build=fam.ModelBuild(
            "QwenImage21Transformer2DModel",
            config,
            fam.LayoutNames("qwen_image_21", converter=convert),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3vl_8b",
                    4096,
                    _TEMPLATE,
                    cleaning=fam.Cleaning.NEVER_EMPTY,
                    dropped_tokens=_BEFORE,
                    is_masked=True,
                    padding=fam.Padding.DROPPED,
                    final_norm=False,
                ),
            )
        ),
        latent="qwen_image_21",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(
                fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((256, 8192), (0.5, 0.9)), last_share=0.02
            ),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=2 * _PIXELS,
            patch_side=_PIXELS,
            defaults=fam.SamplingDefaults(
                steps=40, cfg=1.0, sampler="euler", schedule="simple", guidance=fam.Guidance.NONE
            ),
            not_divided="its words see only the words before them",
        ),
        sources="diffusers' QwenImage21Pipeline; Qwen/Qwen-Image-2.1, scheduler",
        folder=fam.DiffusersFolder(
            "QwenImage21Pipeline",
            missing={"processor": "a checkpoint has none, expected the processor of Qwen/Qwen-Image-2.1"},
        ),
        lora=fam.TRANSFORMER,
    ),
)
