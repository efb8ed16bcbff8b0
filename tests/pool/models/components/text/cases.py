"""Tiny text encoders of every kind: transformers' own module, and the file that one of them is published as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers.models.glm_image.modeling_glm_image import GlmImageTextModel

#: tokens of CLIP, whose vocabulary is its tokenizer's
CLIP_TOKENS = 49408
WORDS = 120
DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WIDE_DECODER = {**DECODER, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
SEED = 11


@dataclass(frozen=True)
class Case:
    """One kind of text encoder.

    name    as recognition has it
    module  transformers' own, of a tiny size, with the facts of the published one
    file    the tensors of that module as a file has them
    unused  keys of the file that are no part of the module
    layout  whose naming the file has
    """

    name: str
    module: Callable[[], nn.Module]
    file: Callable[[nn.Module], dict[str, Tensor]]
    unused: tuple[str, ...] = ()
    layout: str = "transformers"


def seeded(module: nn.Module) -> nn.Module:
    """`module` with weights that all matter, the same each time."""
    generator = torch.Generator().manual_seed(SEED)
    for name, value in module.named_parameters():
        spread = torch.randn(value.shape, generator=generator) * 0.4 / max(1, value.shape[-1]) ** 0.5
        value.data = spread + 1 if "norm" in name.lower() and name.endswith("weight") else spread
    return module.eval().requires_grad_(False)


def clip(layers: int = 2, *, act: str = "quick_gelu", projection: int = 0, width: int = 32) -> nn.Module:
    """A CLIP text model, with a projection where one is asked for."""
    config = transformers.CLIPTextConfig(
        vocab_size=CLIP_TOKENS, hidden_size=width, intermediate_size=40, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), max_position_embeddings=77, hidden_act=act, eos_token_id=49407,
        projection_dim=projection or 512,
    )  # fmt: skip
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return seeded(cls(config))


def t5(*, gated: bool = True, words: int = WORDS, heads: int = 4, width: int = 32) -> nn.Module:
    """The encoder of a T5."""
    return seeded(transformers.T5EncoderModel(transformers.T5Config(**_t5(gated, words, heads, width))))


def umt5(*, words: int = WORDS) -> nn.Module:
    """The encoder of a UMT5."""
    return seeded(transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5(True, words, 4, 32))))


def _t5(gated: bool, words: int, heads: int, width: int) -> dict[str, object]:
    return {
        "vocab_size": words, "d_model": width, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_heads": heads,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu" if gated else "relu", "use_cache": False,
    }  # fmt: skip


def bert(*, words: int = WORDS, width: int = 32) -> nn.Module:
    """A BERT."""
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=width, intermediate_size=40, num_hidden_layers=2, num_attention_heads=1,
        max_position_embeddings=128, layer_norm_eps=1e-12,
    )  # fmt: skip
    return seeded(transformers.BertModel(config, add_pooling_layer=False))


def t5gemma(*, words: int = WORDS, width: int = 64) -> nn.Module:
    """The encoder of a T5Gemma B."""
    own = {
        **DECODER, "vocab_size": words, "hidden_size": width, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 4096,
    }  # fmt: skip
    config = transformers.T5GemmaConfig(
        encoder=own, decoder=own, hidden_size=width, num_hidden_layers=3, vocab_size=words, is_encoder_decoder=False
    )
    return seeded(transformers.T5GemmaEncoderModel(config))


def llama(*, words: int = WORDS, layers: int = 3) -> nn.Module:
    """A Llama 3.1: the stretched positions of its published configuration."""
    own = {**DECODER, "vocab_size": words, "num_hidden_layers": layers, "num_key_value_heads": 1}
    stretched = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **own, rms_norm_eps=1e-5, rope_parameters=stretched, max_position_embeddings=131072
    )
    return seeded(transformers.LlamaModel(config))


def mistral(*, words: int = WORDS, layers: int = 3) -> nn.Module:
    """A Mistral Small 3."""
    own = {**DECODER, "vocab_size": words, "num_hidden_layers": layers, "num_key_value_heads": 1}
    config = transformers.MistralConfig(
        **own, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e9}, sliding_window=None
    )
    return seeded(transformers.MistralModel(config))


def ministral3(*, words: int = WORDS) -> nn.Module:
    """A Ministral 3."""
    own = {**DECODER, "vocab_size": words, "num_key_value_heads": 1}
    return seeded(transformers.Ministral3Model(transformers.Ministral3Config(**own, rms_norm_eps=1e-5)))


def qwen2(*, words: int = WORDS) -> nn.Module:
    """The language model of a Qwen 2.5 VL, as its own class has it."""
    own = {**DECODER, "vocab_size": words, "num_key_value_heads": 1}
    positions = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2_5_VLTextConfig(**own, rms_norm_eps=1e-6, rope_parameters=positions)
    return seeded(transformers.Qwen2_5_VLTextModel(config))


def qwen3(*, words: int = WORDS, layers: int = 3) -> nn.Module:
    """A Qwen 3."""
    config = transformers.Qwen3Config(
        **{**DECODER, "vocab_size": words, "num_hidden_layers": layers},
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return seeded(transformers.Qwen3Model(config))


def qwen3_vl(*, words: int = WORDS, layers: int = 3) -> nn.Module:
    """The language model of a Qwen 3 VL."""
    positions = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = transformers.Qwen3VLTextConfig(
        **{**DECODER, "vocab_size": words, "num_hidden_layers": layers}, rms_norm_eps=1e-6, rope_parameters=positions
    )
    return seeded(transformers.Qwen3VLTextModel(config))


def glm(*, words: int = WORDS) -> nn.Module:
    """A GLM 4."""
    own = {**DECODER, "vocab_size": words, "num_key_value_heads": 1}
    positions = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return seeded(transformers.GlmModel(transformers.GlmConfig(**own, rope_parameters=positions)))


#: the language part of a GLM-Image, which knows so many tokens of images
GLM_IMAGE = {
    "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vision_vocab_size": 32, "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3],
    },
}  # fmt: skip


def glm_image() -> nn.Module:
    """The language model of a GLM-Image, with its head."""
    config = transformers.GlmImageConfig(text_config={**GLM_IMAGE, "vocab_size": WORDS}).text_config
    module = GlmImageTextModel(config)
    module.lm_head = nn.Linear(config.hidden_size, config.vision_vocab_size, bias=False)
    return seeded(module)


def glm_image_file(module: nn.Module) -> dict[str, Tensor]:
    """Its names in folders, where the head is beside the language model, and a part that sees images."""
    file = under("model.language_model.", "model.visual.x.weight")(module)
    return {"lm_head.weight": file.pop("model.language_model.lm_head.weight"), **file}


def gemma2(*, words: int = WORDS) -> nn.Module:
    """A Gemma 2."""
    config = transformers.Gemma2Config(
        **{**DECODER, "vocab_size": words, "num_key_value_heads": 1},
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, sliding_window=4096,
    )  # fmt: skip
    return seeded(transformers.Gemma2Model(config))


def gemma3(*, words: int = WORDS) -> nn.Module:
    """A Gemma 3, with a layer that sees all tokens."""
    config = transformers.Gemma3TextConfig(
        **{**DECODER, "vocab_size": words, "num_hidden_layers": 7},
        query_pre_attn_scalar=256, sliding_window=1024,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    return seeded(transformers.Gemma3TextModel(config))


def plain(module: nn.Module) -> dict[str, Tensor]:
    """The module's own names."""
    return {key: value.clone() for key, value in module.state_dict().items()}


def under(prefix: str, *more: str) -> Callable[[nn.Module], dict[str, Tensor]]:
    """The module's own names below `prefix`, and tensors `more` that are no part of it."""

    def file(module: nn.Module) -> dict[str, Tensor]:
        return {prefix + key: value for key, value in plain(module).items()} | {key: torch.ones(2, 2) for key in more}

    return file


def t5_file(module: nn.Module) -> dict[str, Tensor]:
    """T5 as ComfyUI's files have it: one table of tokens, and the vocabulary as bytes."""
    tensors = plain(module)
    del tensors["encoder.embed_tokens.weight"]
    return tensors | {"spiece_model": torch.arange(9, dtype=torch.uint8)}


def t5_second_name(module: nn.Module) -> dict[str, Tensor]:
    """T5 as some files have it: the table of tokens under its other name."""
    tensors = plain(module)
    del tensors["shared.weight"]
    return tensors


def clip_in_open_clip(module: nn.Module) -> dict[str, Tensor]:
    """CLIP with a projection in the naming of open_clip."""
    state, file = plain(module), {}
    file["positional_embedding"] = state.pop("text_model.embeddings.position_embedding.weight")
    file["token_embedding.weight"] = state.pop("text_model.embeddings.token_embedding.weight")
    file["text_projection"] = state.pop("text_projection.weight").T.contiguous()
    for kind in ("weight", "bias"):
        file[f"ln_final.{kind}"] = state.pop(f"text_model.final_layer_norm.{kind}")
    parts = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    for i in range(len({key.split(".")[3] for key in state})):
        own, theirs = f"text_model.encoder.layers.{i}.", f"transformer.resblocks.{i}."
        for kind in ("weight", "bias"):
            rows = [state.pop(f"{own}self_attn.{name}_proj.{kind}") for name in "qkv"]
            file[f"{theirs}attn.in_proj_{kind}"] = torch.cat(rows)
            file[f"{theirs}attn.out_proj.{kind}"] = state.pop(f"{own}self_attn.out_proj.{kind}")
            for part, named in parts.items():
                file[f"{theirs}{named}.{kind}"] = state.pop(f"{own}{part}.{kind}")
    assert not state
    return file | {"logit_scale": torch.ones(())}


def clip_file(module: nn.Module) -> dict[str, Tensor]:
    """CLIP as text_encoder files of transformers 4 have it: a level lower, with a table of positions."""
    bare = {key.removeprefix("text_model."): value for key, value in plain(module).items()}
    file = {key if key.startswith("text_projection") else f"text_model.{key}": value for key, value in bare.items()}
    return file | {"text_model.embeddings.position_ids": torch.arange(77).unsqueeze(0)}


_POSITIONS = ("text_model.embeddings.position_ids",)
CASES = {
    "clip_l": Case("clip_l", clip, clip_file, _POSITIONS),
    "clip_l bare": Case("clip_l", clip, plain),
    "clip_l projected": Case("clip_l", lambda: clip(projection=24), clip_file, _POSITIONS),
    "clip_h 23": Case("clip_h", lambda: clip(23, act="gelu"), clip_file, _POSITIONS),
    "clip_g": Case("clip_g", lambda: clip(32, act="gelu", projection=24), clip_file, _POSITIONS),
    "clip_g open": Case(
        "clip_g", lambda: clip(32, act="gelu", projection=24), clip_in_open_clip, ("logit_scale",), "open_clip"
    ),
    "clip_h open": Case(
        "clip_h", lambda: clip(24, act="gelu", projection=32), clip_in_open_clip, ("logit_scale",), "open_clip"
    ),
    "t5xxl": Case("t5xxl", t5, t5_file, ("spiece_model",)),
    "t5xl both names": Case("t5xl", t5, plain, ("encoder.embed_tokens.weight",)),
    "t5_base": Case("t5_base", lambda: t5(gated=False), t5_second_name),
    "t5xxl_old": Case("t5xxl_old", lambda: t5(gated=False, heads=8), t5_file, ("spiece_model",)),
    "byt5": Case("byt5_small_glyph", lambda: t5(heads=6), t5_file, ("spiece_model",)),
    "umt5_xxl": Case("umt5_xxl", umt5, t5_file, ("spiece_model",)),
    "hydit_bert": Case(
        "hydit_bert", bert, under("bert.", "bert.pooler.dense.weight", "cls.predictions.decoder.weight"),
        ("bert.pooler.dense.weight", "cls.predictions.decoder.weight"),
    ),
    "t5gemma_b": Case("t5gemma_b", t5gemma, under("")),
    "t5gemma_b whole": Case(
        "t5gemma_b", t5gemma, under("model.", "model.decoder.x.weight", "lm_head.out_proj.weight"),
        ("model.decoder.x.weight", "lm_head.out_proj.weight"),
    ),
    "llama3_8b": Case("llama3_8b", llama, under("model.", "lm_head.weight"), ("lm_head.weight",)),
    "llava": Case("llama3_8b", llama, under("language_model.model.", "vision_tower.x"), ("vision_tower.x",)),
    "mistral3_24b": Case("mistral3_24b", mistral, under("model.", "tekken_model"), ("tekken_model",)),
    "ministral3_3b": Case("ministral3_3b", ministral3, under("model.")),
    "qwen25_7b": Case("qwen25_7b", qwen2, under("model.", "visual.x.weight"), ("visual.x.weight",)),
    "qwen25_7b new": Case(
        "qwen25_7b", qwen2, under("model.language_model.", "model.visual.x.weight"), ("model.visual.x.weight",)
    ),
    "qwen3_4b": Case("qwen3_4b", qwen3, under("model.")),
    "glm4_9b": Case("glm4_9b", glm, under("model.")),
    "glm_image_9b": Case("glm_image_9b", glm_image, glm_image_file, ("model.visual.x.weight",)),
    "qwen3vl_4b": Case(
        "qwen3vl_4b", qwen3_vl, under("model.language_model.", "model.visual.patch_embed.proj.weight"),
        ("model.visual.patch_embed.proj.weight",),
    ),
    "gemma2_2b": Case("gemma2_2b", gemma2, under("model.", "spiece_model"), ("spiece_model",)),
    "gemma3_4b": Case("gemma3_4b", gemma3, under("model.", "vision_model.x"), ("vision_model.x",)),
}  # fmt: skip
