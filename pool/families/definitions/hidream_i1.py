"""HiDream I1: mixture of experts that reads two CLIPs, T5 and every layer of Llama. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts.vocabulary import (
    NO_FLOAT16,
    OPEN_CLIP_PAD,
    PATCH,
    TIMESTEPS,
    TRANSFORMER,
    Arguments,
    Config,
    Detection,
    DiffusersFolder,
    Family,
    Guidance,
    Joined,
    Layout,
    ModelBuild,
    ModelKwargs,
    NoiseFacts,
    NoiseKind,
    Pooled,
    Prediction,
    Reading,
    ReadText,
    SamplingDefaults,
    SamplingFacts,
    Shapes,
    TextInputs,
    TextJoin,
    always,
    anything,
    count,
    dim,
    fixed_length,
    joined_pooled,
    maybe,
    published,
    sample_of,
    sizes,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head, which no tensor tells. Source: the published code
_HEAD = 128
#: layers of the language model; blocks beyond them all read the last
_TEXT_LAYERS = 32
_TOKENS = 128

#: both namings are equal
_LAYOUT = Layout(
    "HiDream",
    (
        published(
            "caption_projection.0.linear.weight",
            "double_stream_blocks.0.block.adaLN_modulation.1.weight",
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("x_embedder.proj.weight", 1, divide=PATCH),
                out_channels=dim("final_layer.linear.weight", 0, divide=PATCH),
                hidden_size=dim("x_embedder.proj.weight", 0),
                num_layers=count("double_stream_blocks."),
                num_single_layers=count("single_stream_blocks."),
                text_emb_dim=dim("p_embedder.pooled_embedder.linear_1.weight", 1),
                num_routed_experts=maybe("double_stream_blocks.0.block.ff_i.gate.weight", 0),
                text_layers=count("caption_projection."),
            ),
        ),
    ),
)


def config(found: Config, shapes: Shapes) -> Arguments:
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


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Predict noise - clean. The output of the module runs from noise to image."""
    return -sample_of(
        module(
            hidden_states=x_BCHW,
            timesteps=level_B * TIMESTEPS,
            encoder_hidden_states_t5=kwargs["context"],
            encoder_hidden_states_llama3=kwargs["context_2"].transpose(0, 1),
            pooled_embeds=kwargs["pooled"],
            return_dict=False,
        )
    )


def _join(read: Sequence[ReadText]) -> Joined:
    """T5's states, Llama's of every layer, and the pooled vectors of both CLIPs."""
    small, large, t5, llama = read
    return {"context": t5.context_LD, "context_2": llama.context_LD, "pooled": joined_pooled(small, large)}


FAMILIES = (
    Family(
        name="hidream_i1",
        title="HiDream I1",
        detect=Detection(_LAYOUT, anything, "HiDream"),
        build=ModelBuild(
            "HiDreamImageTransformer2DModel",
            config,
            "hidream",
            forward,
            dtypes=NO_FLOAT16,
        ),
        text=TextInputs(
            # the model reads the states of several of Llama's layers, one per block
            (
                Reading("clip_l", 768, chunk_tokens=_TOKENS, pooled=Pooled.PROJECTED, reads_states=False),
                Reading(
                    "clip_g",
                    1280,
                    clip_pad_id=OPEN_CLIP_PAD,
                    chunk_tokens=_TOKENS,
                    pooled=Pooled.PROJECTED,
                    reads_states=False,
                ),
                fixed_length("t5xxl", _TOKENS, is_masked=True),
                fixed_length("llama3_8b", _TOKENS, is_masked=True, every_layer=True, pad="<|eot_id|>"),
            ),
            set_name="hidream",
            join=TextJoin(_join),
        ),
        latent="flux",
        sampling=SamplingFacts(
            Prediction.FLOW,
            noise=NoiseFacts(NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "context_2", "pooled"}),
            side_multiple=16,
            defaults=SamplingDefaults(
                steps=50, cfg=5.0, sampler="euler", schedule="normal", guidance=Guidance.CLASSIFIER_FREE
            ),
        ),
        sources="diffusers' HiDreamImagePipeline; HiDream-ai/HiDream-I1-Full; at most 4096 patches",
        folder=DiffusersFolder("HiDreamImagePipeline"),
        lora=TRANSFORMER,
    ),
)
