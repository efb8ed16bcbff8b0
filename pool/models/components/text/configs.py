"""Configurations of text encoders from the shapes of a file, and the facts that no shape determines. Torch-free.

Every function takes shapes under the names of transformers, without prefix
(`pool.models.components.text.text_encoder_names`), and returns the arguments of the configuration that
`pool.models.components.text.text_encoder_classes` builds.

Facts that shapes do not tell
1. Head width is `HEAD_WIDTHS`, or the width of the query norm. A model narrower than one head has one.
2. T5's table of relative positions gives the number of heads; it reaches 128 tokens.
3. CLIP-L was trained with an approximation of GELU, open_clip's models with exact GELU.
4. Rotary bases and norm epsilons: in `FACTS`, from each model's published config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from modelpool.pool.families.detection.text_encoders import TextEncoderFacts
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.infer_config import clip_text_config
from modelpool.pool.values.core.errors import UnknownArchitecture, counted

Config: TypeAlias = dict[str, Any]
Shapes: TypeAlias = Mapping[str, Shape]

#: width of one head if the file does not tell. Source: config.json of google-bert/bert-base, meta-llama,
#: mistralai/Mistral-Small-3.2-24B-Instruct-2506, google/gemma-2-2b, Qwen/Qwen2.5-VL-7B-Instruct
HEAD_WIDTHS: Mapping[str, int] = {
    "bert": 64, "llama": 128, "mistral": 128, "ministral3": 128, "qwen2": 128, "qwen3": 128, "qwen3_vl": 128,
    "glm": 128, "glm_image": 128, "gemma2": 256, "gemma3": 256, "t5gemma": 64,
}  # fmt: skip
#: T5's largest distinguished token distance, and its norm epsilon. Source: google/t5-v1_1-xxl
T5_MAX_DISTANCE, T5_EPSILON = 128, 1e-6

#: Llama 3 as in llava-llama-3-8b-v1_1 (HunyuanVideo) has rows for image tokens, 3.1 has not
LLAMA_3_VOCABULARY = 128320
#: position scaling of Llama 3.1. Source: config.json of meta-llama/Llama-3.1-8B-Instruct
LLAMA_31_POSITIONS: Config = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
#: Gemma 3: every sixth layer attends to all tokens, the others to a window. Source: config.json of
#: google/gemma-3-4b-it
GEMMA_3_PATTERN, GEMMA_3_WINDOW = 6, 1024
GEMMA_3_POSITIONS: Config = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

#: GLM-Image turns half of a head. Source: as in `FACTS`
GLM_IMAGE_POSITIONS: Config = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

#: facts of the published config.json of each kind of language model that shapes do not tell
FACTS: Mapping[str, Config] = {
    # meta-llama/Meta-Llama-3-8B-Instruct
    "llama": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    # mistralai/Mistral-Small-3.2-24B-Instruct-2506
    "mistral": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000_000.0},
    },
    # mistralai/Ministral-3-3B-Instruct-2512
    "ministral3": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    # Qwen/Qwen2.5-VL-3B-Instruct and 7B. Its three position axes are equal for text
    "qwen2": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    # Qwen/Qwen3-4B
    "qwen3": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    # Qwen/Qwen3-VL-4B-Instruct and 8B
    "qwen3_vl": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    },
    # THUDM/glm-4-9b-hf
    "glm": {
        "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    # vision_language_encoder of zai-org/GLM-Image
    "glm_image": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_bias": True},
    # google/gemma-2-2b
    "gemma2": {
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "sliding_window": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    # google/t5gemma-b-b-ul2
    "t5gemma": {
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0, "sliding_window": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    # google/gemma-3-4b-it
    "gemma3": {
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": GEMMA_3_WINDOW,
        "rope_parameters": GEMMA_3_POSITIONS,
    },
}  # fmt: skip


def clip_config(facts: TextEncoderFacts, shapes: Shapes) -> Config:
    """Return the arguments of `CLIPTextConfig`; `shapes` have no `text_model.` level."""
    config = clip_text_config(shapes)
    config["hidden_act"] = "quick_gelu" if facts.name == "clip_l" else "gelu"
    if "text_projection.weight" in shapes:
        config["projection_dim"] = _shape(shapes, "text_projection.weight", 2)[0]
    return config


def t5_config(facts: TextEncoderFacts, shapes: Shapes) -> Config:
    """Return the arguments of `T5Config` and of `UMT5Config`."""
    vocabulary, width = _shape(shapes, "shared.weight", 2)
    attention, feed = "encoder.block.0.layer.0.SelfAttention.", "encoder.block.0.layer.1.DenseReluDense."
    buckets, heads = _shape(shapes, f"{attention}relative_attention_bias.weight", 2)
    inner = _shape(shapes, f"{attention}q.weight", 2)[0]
    if not heads or inner % heads:
        raise UnknownArchitecture(f"{facts.title}: found {inner} rows of queries, expected a multiple of {heads} heads")
    gated = f"{feed}wi_0.weight" in shapes
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": _shape(shapes, f"{feed}wi_0.weight" if gated else f"{feed}wi.weight", 2)[0],
        "num_layers": count(shapes, r"encoder\.block\.(\d+)\."),
        "num_decoder_layers": 0,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": T5_MAX_DISTANCE,
        "layer_norm_epsilon": T5_EPSILON,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "use_cache": False,
    }


def bert_config(facts: TextEncoderFacts, shapes: Shapes) -> Config:
    """Return the arguments of `BertConfig`. Source of its facts: text_encoder/config.json of
    Tencent-Hunyuan/HunyuanDiT."""
    vocabulary, width = _shape(shapes, "embeddings.word_embeddings.weight", 2)
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_attention_heads": _heads(facts, width, min(HEAD_WIDTHS["bert"], width)),
        "num_hidden_layers": count(shapes, r"encoder\.layer\.(\d+)\."),
        "intermediate_size": _shape(shapes, "encoder.layer.0.intermediate.dense.weight", 2)[0],
        "max_position_embeddings": _shape(shapes, "embeddings.position_embeddings.weight", 2)[0],
        "type_vocab_size": _shape(shapes, "embeddings.token_type_embeddings.weight", 2)[0],
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }


def decoder_config(facts: TextEncoderFacts, shapes: Shapes) -> Config:
    """Return the configuration arguments of a language model: Llama, Mistral, Gemma, Qwen or GLM."""
    kind = facts.architecture
    vocabulary, width = _shape(shapes, "embed_tokens.weight", 2)
    queries = _shape(shapes, "layers.0.self_attn.q_proj.weight", 2)[0]
    keys = _shape(shapes, "layers.0.self_attn.k_proj.weight", 2)[0]
    normed = shapes.get("layers.0.self_attn.q_norm.weight")
    head = normed[0] if normed else min(HEAD_WIDTHS[kind], keys)
    layers = count(shapes, r"layers\.(\d+)\.")
    # GLM has gates and values in one tensor
    parts = 2 if kind in ("glm", "glm_image") else 1
    inner = _shape(shapes, f"layers.0.mlp.{'gate_up_proj' if parts == 2 else 'gate_proj'}.weight", 2)[0]
    config = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner // parts,
        "num_hidden_layers": layers,
        "num_attention_heads": _heads(facts, queries, head),
        "num_key_value_heads": _heads(facts, keys, head),
        "head_dim": head,
        "use_cache": False,
        # token ids of the published vocabulary may not exist in a smaller model
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        **FACTS[kind],
    }  # fmt: skip
    if kind == "llama" and vocabulary != LLAMA_3_VOCABULARY:
        config["rope_parameters"] = LLAMA_31_POSITIONS
    if kind == "gemma3":
        config["layer_types"] = [
            "sliding_attention" if (i + 1) % GEMMA_3_PATTERN else "full_attention" for i in range(layers)
        ]
    if kind == "glm_image":
        config |= {
            "vision_vocab_size": _shape(shapes, "lm_head.weight", 2)[0],
            "pad_token_id": 0,  # the class wants one; it changes nothing in evaluation
            "rope_parameters": {**GLM_IMAGE_POSITIONS, "mrope_section": axes_of(head)},
        }
    if kind == "qwen2":  # its class derives the head width from the others
        del config["head_dim"]
        if config["num_attention_heads"] * head != width:
            raise UnknownArchitecture(f"{facts.title}: found {queries} rows of queries, expected {width}, its width")
    return config


def words_config(facts: TextEncoderFacts, shapes: Shapes) -> Config:
    """Return the sizes of a table of words."""
    vocabulary, width = _shape(shapes, "embed_tokens.weight", 2)
    return {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": 0, "num_layers": 0}


def t5gemma_config(facts: TextEncoderFacts, shapes: Shapes) -> Config:
    """Return the configuration arguments of the encoder of T5Gemma."""
    return decoder_config(facts, {key.removeprefix("encoder."): shape for key, shape in shapes.items()})


#: by the architecture that `pool.families.detection.text_encoders` names
CONFIGS: Mapping[str, Callable[[TextEncoderFacts, Shapes], Config]] = {
    "clip": clip_config,
    "t5": t5_config,
    "umt5": t5_config,
    "bert": bert_config,
    "words": words_config,
    "t5gemma": t5gemma_config,
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_vl", "glm", "glm_image", "gemma2", "gemma3"),
        decoder_config,
    ),
}


def axes_of(head: int) -> list[int]:
    """Return how many frequencies of a head of GLM-Image turn with time, rows and columns: 8, 12 and 12 of the
    published one."""
    frequencies = head // 4
    time = frequencies // 4
    rows = (frequencies - time) // 2
    return [time, rows, frequencies - time - rows]


def count(keys: Iterable[str], pattern: str) -> int:
    """Return how many numbers, from 0, `pattern` finds at the beginning of keys.

    Raises UnknownArchitecture if one is missing: otherwise one key could request any number of layers.
    """
    compiled = re.compile(pattern)
    found = {match[1] for key in keys if (match := compiled.match(key))}
    missing = next((number for number in range(len(found)) if str(number) not in found), None)
    if missing is not None:
        raise UnknownArchitecture(
            f"text encoder: found {counted(len(found), 'layer')} without number {missing}, expected all"
        )
    return len(found)


def _heads(facts: TextEncoderFacts, rows: int, head: int) -> int:
    if not head or rows % head:
        raise UnknownArchitecture(f"{facts.title}: found {rows} rows of attention, expected a multiple of {head}")
    return rows // head


def _shape(shapes: Shapes, key: str, dimensions: int) -> Shape:
    shape = shapes.get(key)
    if shape is None or len(shape) != dimensions:
        found = "no such tensor" if shape is None else f"shape {tuple(shape)}"
        raise UnknownArchitecture(f"text encoder: {key}: found {found}, expected one of {dimensions} dimensions")
    return shape
