"""Mochi: time runs from noise to clean, with noise levels of its own. Torch-free."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask
from modelpool.pool.values.core.errors import UnknownArchitecture, counted

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYOUT = fam.Layout(
    "Mochi",
    (
        fam.published(
            "t5_yproj.weight",
            measure=fam.sizes(
                in_channels=fam.dim("x_embedder.proj.weight", 1, 4),
                patch_size=fam.dim("x_embedder.proj.weight", 2, 4),
                hidden_size_x=fam.dim("x_embedder.proj.weight", 0, 4),
                hidden_size_y=fam.dim("t5_yproj.weight", 0),
                t5_feat_dim=fam.dim("t5_yproj.weight", 1),
                depth=fam.count("blocks."),
                num_heads=fam.maybe("pos_frequencies", 1, 3),
                qk_norm=fam.has("blocks.0.attn.q_norm_x.weight"),
                qkv_bias=fam.has("blocks.0.attn.qkv_x.bias"),
                out_bias=fam.has("blocks.0.attn.proj_x.bias"),
            ),
        ),
        fam.diffusers(
            "time_embed.caption_proj.weight",
            "pos_frequencies",
            measure=fam.sizes(
                in_channels=fam.dim("patch_embed.proj.weight", 1, 4),
                patch_size=fam.dim("patch_embed.proj.weight", 2, 4),
                hidden_size_x=fam.dim("patch_embed.proj.weight", 0, 4),
                hidden_size_y=fam.dim("time_embed.caption_proj.weight", 0),
                t5_feat_dim=fam.dim("time_embed.caption_proj.weight", 1),
                depth=fam.count("transformer_blocks."),
                num_heads=fam.maybe("pos_frequencies", 1, 3),
                qk_norm=fam.has("transformer_blocks.0.attn1.norm_q.weight"),
            ),
        ),
    ),
)

_OUTER = (
    ("pos_frequencies", "pos_frequencies"),
    ("x_embedder.proj.", "patch_embed.proj."),
    ("t_embedder.mlp.0.", "time_embed.timestep_embedder.linear_1."),
    ("t_embedder.mlp.2.", "time_embed.timestep_embedder.linear_2."),
    ("t5_y_embedder.", "time_embed.pooler."),
    ("t5_yproj.", "time_embed.caption_proj."),
    ("final_layer.mod.", "norm_out.linear."),
    ("final_layer.linear.", "proj_out."),
)
#: a block's modules and their new names; several names split the tensor into equal parts
_BLOCK: dict[str, tuple[str, ...]] = {
    "mod_x": ("norm1.linear",),
    "mod_y": ("norm1_context.linear",),
    "attn.qkv_x": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.qkv_y": ("attn1.add_q_proj", "attn1.add_k_proj", "attn1.add_v_proj"),
    "attn.q_norm_x": ("attn1.norm_q",),
    "attn.k_norm_x": ("attn1.norm_k",),
    "attn.q_norm_y": ("attn1.norm_added_q",),
    "attn.k_norm_y": ("attn1.norm_added_k",),
    "attn.proj_x": ("attn1.to_out.0",),
    "attn.proj_y": ("attn1.to_add_out",),
    "mlp_x.w1": ("ff.net.0.proj",),
    "mlp_x.w2": ("ff.net.2",),
    "mlp_y.w1": ("ff_context.net.0.proj",),
    "mlp_y.w2": ("ff_context.net.2",),
}
#: modules with swapped halves: gate and value, shift and scale
_SWAPPED = ("mlp_x.w1", "mlp_y.w1", "final_layer.mod")


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.MochiTransformer3DModel`."""
    sizes: dict[str, Any] = dict(found)
    _, heads, half_head = shapes["pos_frequencies"]
    return {
        "patch_size": sizes["patch_size"],
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // sizes["patch_size"] ** 2,
        "num_attention_heads": heads,
        "attention_head_dim": 2 * half_head,
        "num_layers": sizes["depth"],
        "pooled_projection_dim": sizes["hidden_size_y"],
        "qk_norm": "rms_norm" if sizes["qk_norm"] else None,
        "text_embed_dim": sizes["t5_feat_dim"],
        "time_embed_dim": shapes["time_embed.timestep_embedder.linear_1.weight"][1],
    }


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters. diffusers' converter handles exactly 48 blocks.

    Sources: the key lists of the published files (tests/golden/detection_keys.json.gz) and of the module. Raises
    UnknownArchitecture for tensors without a block.
    """
    blocks = [int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key)) is not None]
    if not blocks:
        raise UnknownArchitecture(f"Mochi: found {counted(len(tensors), 'tensor')}, expected some of 'blocks.0'")
    last = max(blocks)
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", key)
        if found is None:
            for theirs, ours in _OUTER:
                if key.startswith(theirs):
                    converted[ours + key.removeprefix(theirs)] = _swapped(key, tensor)
            continue
        number, module, end = int(found[1]), found[2], found[3]
        names = _BLOCK.get(module, ())
        if module == "mod_y" and number == last:  # the text path ends here, with a different norm
            names = ("norm1_context.linear_1",)
        parts = tensor.chunk(len(names)) if len(names) > 1 else (_swapped(module, tensor),)
        for name, part in zip(names, parts, strict=True) if names else ():
            converted[f"transformer_blocks.{number}.{name}.{end}"] = part
    return converted


def _swapped(key: str, tensor: Tensor) -> Tensor:
    import torch

    return torch.cat(tensor.chunk(2)[::-1]) if key.startswith(_SWAPPED) else tensor


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean; the module predicts clean - noise."""
    return -fam.sample_of(
        module(
            hidden_states=x_BCTHW,
            encoder_hidden_states=kwargs["context"],
            timestep=(1 - level_B) * fam.TIMESTEPS,
            encoder_attention_mask=text_mask(kwargs, "context"),
            return_dict=False,
        )
    )


FAMILIES = (
    fam.Family(
        name="mochi",
        title="Mochi",
        detect=fam.Detection(LAYOUT, fam.anything, "GenmoMochi"),
        build=fam.ModelBuild(
            "MochiTransformer3DModel",
            config,
            convert,
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs((fam.fixed_length("t5xxl", 256, is_masked=True, mask=fam.MaskMode.REAL),)),
        latent="mochi",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=6.0),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            video=fam.VideoFacts(frames=163, multiple=6, rate=30.0),
            defaults=fam.SamplingDefaults(
                steps=64, cfg=4.5, sampler="euler", schedule="linear_quadratic", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.MOCHI,
        ),
        size=(848, 480),
        sources="diffusers' MochiPipeline, which has its own levels instead of a shift: linear, then quadratic",
        folder=fam.DiffusersFolder(
            "MochiPipeline",
            entries={"force_zeros_for_empty_prompt": False},
            scheduler_entries={"shift": 1.0, "invert_sigmas": True},
        ),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(
            teacache=(
                fam.TeaCacheFacts((-3.51241319e03, 8.11675948e02, -6.09400215e01, 2.42429681e00, 3.05291719e-03), 0.06),
            ),
            skips_blocks=True,
        ),
    ),
)
