"""HiDream I1: mixture of experts that reads two CLIPs, T5 and every layer of Llama; and HiDream E1, the same model
trained to edit an image that it reads beside its latents. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head, which no tensor tells. Source: the published code
_HEAD = 128
#: layers of the language model; blocks beyond them all read the last
_TEXT_LAYERS = 32
_TOKENS = 128

#: both namings are equal
_LAYOUT = fam.Layout(
    "HiDream",
    (
        fam.published(
            "caption_projection.0.linear.weight",
            "double_stream_blocks.0.block.adaLN_modulation.1.weight",
            measure=fam.sizes(
                patch_size=fam.always(2),
                in_channels=fam.dim("x_embedder.proj.weight", 1, divide=fam.PATCH),
                out_channels=fam.dim("final_layer.linear.weight", 0, divide=fam.PATCH),
                hidden_size=fam.dim("x_embedder.proj.weight", 0),
                num_layers=fam.count("double_stream_blocks."),
                num_single_layers=fam.count("single_stream_blocks."),
                text_emb_dim=fam.dim("p_embedder.pooled_embedder.linear_1.weight", 1),
                num_routed_experts=fam.maybe("double_stream_blocks.0.block.ff_i.gate.weight", 0),
                text_layers=fam.count("caption_projection."),
            ),
        ),
    ),
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.HiDreamImageTransformer2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden = measured["hidden_size"]
    head = min(hidden, _HEAD)
    blocks = measured["num_layers"] + measured["num_single_layers"]
    return {
        "patch_size": measured["patch_size"],
        "in_channels": measured["in_channels"],
        "out_channels": measured["out_channels"],
        "num_layers": measured["num_layers"],
        "num_single_layers": measured["num_single_layers"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        # of the encoder of which only the last layer is read, and of the one of which all layers are
        "caption_channels": [shapes[f"caption_projection.{n}.linear.weight"][1] for n in (blocks, 0)],
        "text_emb_dim": measured["text_emb_dim"],
        "num_routed_experts": measured["num_routed_experts"] or 0,
        "axes_dims_rope": (head // 2, head // 4, head // 4),
        "llama_layers": [min(block, _TEXT_LAYERS - 1) for block in range(blocks)],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The output of the module runs from noise to image. An image to edit is to the right of
    the latents, with room for as many tokens more, or for a larger image. Source: HiDream-ai/HiDream-E1,
    `HiDreamImageEditingPipeline`."""
    if "reference" not in kwargs:
        return _predicted(module, x_BCHW, level_B, kwargs)
    import torch

    plain: Any = module
    most = plain.max_seq
    beside_BCHW = torch.cat([x_BCHW, kwargs["reference"].to(x_BCHW)], dim=-1)
    tokens = beside_BCHW.shape[-2] * beside_BCHW.shape[-1] // plain.config.patch_size**2
    plain.max_seq = max(2 * most, tokens)
    try:
        return _predicted(module, beside_BCHW, level_B, kwargs)[..., : x_BCHW.shape[-1]]
    finally:
        plain.max_seq = most


def _predicted(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    return -fam.sample_of(
        module(
            hidden_states=x_BCHW,
            timesteps=level_B * fam.TIMESTEPS,
            encoder_hidden_states_t5=kwargs["context"],
            encoder_hidden_states_llama3=kwargs["context_2"].transpose(0, 1),
            pooled_embeds=kwargs["pooled"],
            return_dict=False,
        )
    )


def _join(read: Sequence[fam.ReadText]) -> fam.Joined:
    """T5's states, Llama's of every layer, and the pooled vectors of both CLIPs."""
    small, large, t5, llama = read
    return {"context": t5.context_LD, "context_2": llama.context_LD, "pooled": fam.joined_pooled(small, large)}


FAMILIES = (
    fam.Family(
        name="hidream_i1",
        title="HiDream I1",
        detect=fam.Detection(_LAYOUT, fam.anything, "HiDream"),
        build=fam.ModelBuild(
            "HiDreamImageTransformer2DModel",
            config,
            "hidream",
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"reference"}),
        ),
        text=fam.TextInputs(
            # the model reads the states of several of Llama's layers, one per block
            (
                fam.Reading("clip_l", 768, chunk_tokens=_TOKENS, pooled=fam.Pooled.PROJECTED, reads_states=False),
                fam.Reading(
                    "clip_g",
                    1280,
                    clip_pad_id=fam.OPEN_CLIP_PAD,
                    chunk_tokens=_TOKENS,
                    pooled=fam.Pooled.PROJECTED,
                    reads_states=False,
                ),
                fam.fixed_length("t5xxl", _TOKENS, is_masked=True),
                fam.fixed_length("llama3_8b", _TOKENS, is_masked=True, every_layer=True, pad="<|eot_id|>"),
            ),
            set_name="hidream",
            join=fam.TextJoin(_join),
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "context_2", "pooled", "reference"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=5.0, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            routes_tokens=True,
            reference_covers=True,
            blank_reference=True,
            not_divided="each of its blocks reads other words of the text",
        ),
        sources="diffusers' HiDreamImagePipeline; HiDream-ai/HiDream-I1-Full and HiDream-E1; at most 4096 patches",
        folder=fam.DiffusersFolder("HiDreamImagePipeline"),
        lora=fam.TRANSFORMER,
    ),
)
