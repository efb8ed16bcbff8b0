"""The published language models are recognised from their shapes, and planned with the configuration that they have.

The configurations are the contents of each model's config.json, written here once more; modules are made on the
meta device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from modelpool.pool.families.detection.text_encoders import recognise_text_encoder
from modelpool.pool.models.components.text.build_text_encoder import plan_text_encoder

#: layers do not differ from each other: as many as recognition looks at, and those that tell Gemma's pattern
LAYERS = 8


def _sizes(width: int, inner: int, heads: int, groups: int, head: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": head, "vocab_size": words, "num_hidden_layers": LAYERS, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None, **more,
    }  # fmt: skip


def _plain(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


_LLAMA_31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_MISTRAL = _sizes(5120, 32768, 32, 8, 128, 131072, rms_norm_eps=1e-5, rope_parameters=_plain(1e9), sliding_window=None)
_QWEN25 = {"rms_norm_eps": 1e-6, "rope_parameters": _plain(1e6)}
_QWEN3 = {"rms_norm_eps": 1e-6, "rope_parameters": _plain(1e6)}
#: by name: the classes of configuration and model, and config.json
DECODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama3_8b": (  # meta-llama/Llama-3.1-8B-Instruct
        transformers.LlamaConfig, transformers.LlamaModel,
        _sizes(4096, 14336, 32, 8, 128, 128256, rms_norm_eps=1e-5, rope_parameters=_LLAMA_31),
    ),
    "gemma2_2b": (  # google/gemma-2-2b
        transformers.Gemma2Config, transformers.Gemma2Model,
        _sizes(2304, 9216, 8, 4, 256, 256000, query_pre_attn_scalar=256, sliding_window=4096,
               attn_logit_softcapping=50.0, rope_parameters=_plain(1e4)),
    ),
    "gemma3_4b": (  # google/gemma-3-4b-it
        transformers.Gemma3TextConfig, transformers.Gemma3TextModel,
        _sizes(2560, 10240, 8, 4, 256, 262208, query_pre_attn_scalar=256, sliding_window=1024,
               rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                "sliding_attention": _plain(1e4)}),
    ),
    "gemma3_12b": (  # google/gemma-3-12b-it
        transformers.Gemma3TextConfig, transformers.Gemma3TextModel,
        _sizes(3840, 15360, 16, 8, 256, 262208, query_pre_attn_scalar=256, sliding_window=1024,
               rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                "sliding_attention": _plain(1e4)}),
    ),
    "qwen25_3b": (  # Qwen/Qwen2.5-VL-3B-Instruct
        transformers.Qwen2Config, transformers.Qwen2Model, _sizes(2048, 11008, 16, 2, 128, 151936, **_QWEN25),
    ),
    "qwen25_7b": (  # Qwen/Qwen2.5-VL-7B-Instruct
        transformers.Qwen2Config, transformers.Qwen2Model, _sizes(3584, 18944, 28, 4, 128, 152064, **_QWEN25),
    ),
    "qwen3_2b": (  # Qwen/Qwen3-1.7B
        transformers.Qwen3Config, transformers.Qwen3Model, _sizes(2048, 6144, 16, 8, 128, 151936, **_QWEN3),
    ),
    "qwen3_4b": (  # Qwen/Qwen3-4B
        transformers.Qwen3Config, transformers.Qwen3Model, _sizes(2560, 9728, 32, 8, 128, 151936, **_QWEN3),
    ),
    "glm4_9b": (  # THUDM/glm-4-9b-hf
        transformers.GlmConfig, transformers.GlmModel,
        _sizes(4096, 13696, 32, 2, 128, 151552, rope_parameters=_plain(1e4) | {"partial_rotary_factor": 0.5}),
    ),
    "qwen3vl_4b": (  # Qwen/Qwen3-VL-4B-Instruct
        transformers.Qwen3VLTextConfig, transformers.Qwen3VLTextModel,
        _sizes(2560, 9728, 32, 8, 128, 151936, rms_norm_eps=1e-6, rope_parameters={
            **_plain(5e6), "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        }),
    ),
    "qwen3vl_8b": (  # Qwen/Qwen3-VL-8B-Instruct
        transformers.Qwen3VLTextConfig, transformers.Qwen3VLTextModel,
        _sizes(4096, 12288, 32, 8, 128, 151936, rms_norm_eps=1e-6, rope_parameters={
            **_plain(5e6), "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        }),
    ),
    "qwen3_8b": (  # Qwen/Qwen3-8B
        transformers.Qwen3Config, transformers.Qwen3Model, _sizes(4096, 12288, 32, 8, 128, 151936, **_QWEN3),
    ),
    "ministral3_3b": (  # mistralai/Ministral-3-3B-Instruct-2512
        transformers.Ministral3Config, transformers.Ministral3Model,
        _sizes(3072, 9216, 32, 8, 128, 131072, rms_norm_eps=1e-5, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }),
    ),
    "mistral3_24b_pruned": (transformers.MistralConfig, transformers.MistralModel, _MISTRAL),
    "mistral3_24b": (  # mistralai/Mistral-Small-3.2-24B-Instruct-2506
        transformers.MistralConfig, transformers.MistralModel, {**_MISTRAL, "num_hidden_layers": 40},
    ),
}  # fmt: skip

#: what a published configuration says that changes a number
FACTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "num_hidden_layers", "rms_norm_eps", "rope_parameters", "hidden_act", "hidden_activation", "sliding_window",
    "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "attention_bias", "use_sliding_window",
)  # fmt: skip


def _shapes_of(model_class: Any, config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = model_class(config)
    return {f"model.{key}": tuple(value.shape) for key, value in module.state_dict().items()}


@pytest.mark.parametrize("name", list(DECODERS))
def test_a_language_model_is_recognised_and_configured(name: str) -> None:
    config_class, model_class, published = DECODERS[name]
    theirs = config_class(**published)
    shapes = _shapes_of(model_class, theirs)
    shapes |= {"visual.patch_embed.proj.weight": (1024, 3, 2, 16, 16)} if name.startswith("qwen3vl") else {}
    plan = plan_text_encoder(shapes)
    assert plan.facts.name == name
    assert (plan.facts.width, plan.facts.layers) == (published["hidden_size"], published["num_hidden_layers"])
    ours = plan.empty()
    differing = {fact for fact in FACTS if getattr(ours.config, fact, None) != getattr(theirs, fact, None)}
    assert not differing
    assert getattr(ours.config, "head_dim", None) in (None, published["head_dim"])


def test_llama_3_2_3b_is_not_taken_for_ministral_3() -> None:
    """Both have states of 3072 and keys of 1024 numbers; no model reads this Llama."""
    llama = transformers.LlamaConfig(**_sizes(3072, 8192, 24, 8, 128, 128256))  # meta-llama/Llama-3.2-3B-Instruct
    config_class, model_class, published = DECODERS["ministral3_3b"]
    found = [
        recognise_text_encoder(shapes)
        for shapes in (
            _shapes_of(transformers.LlamaModel, llama), _shapes_of(model_class, config_class(**published))
        )
    ]  # fmt: skip
    assert [each and each.name for each in found] == [None, "ministral3_3b"]


#: width, inner width, layers, heads, width of a head, tokens, gated, positions in every layer
T5S = {
    "t5xxl": (4096, 10240, 24, 64, 64, 32128, True, False),  # google/t5-v1_1-xxl
    "umt5_xxl": (4096, 10240, 24, 64, 64, 256384, True, True),  # google/umt5-xxl
    "t5xl": (2048, 5120, 24, 32, 64, 32128, True, True),  # EleutherAI/pile-t5-xl, as AuraFlow has it
    "t5xxl_old": (1024, 65536, 24, 128, 128, 32128, False, False),  # google-t5/t5-11b
    "t5_base": (768, 3072, 12, 12, 64, 32128, False, False),  # google-t5/t5-base
    "byt5_small_glyph": (1472, 3584, 12, 6, 64, 1510, True, False),  # Glyph-ByT5 of HunyuanImage
}


@pytest.mark.parametrize("name", list(T5S))
def test_a_t5_is_recognised_and_configured(name: str) -> None:
    width, inner, layers, heads, head, words, gated, everywhere = T5S[name]
    published = {
        "d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads, "d_kv": head, "vocab_size": words,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }  # fmt: skip
    config = (transformers.UMT5Config if everywhere else transformers.T5Config)(**published)
    with torch.device("meta"):
        module = (transformers.UMT5EncoderModel if everywhere else transformers.T5EncoderModel)(config)
    shapes = {key: tuple(x.shape) for key, x in module.state_dict().items() if key != "encoder.embed_tokens.weight"}
    plan = plan_text_encoder(shapes)
    assert plan.facts.name == name
    ours = plan.empty()
    assert isinstance(ours, type(module))
    facts = (
        *published, "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
        "dense_act_fn", "is_gated_act",
    )  # fmt: skip
    assert not {fact for fact in facts if getattr(ours.config, fact) != getattr(config, fact)}
