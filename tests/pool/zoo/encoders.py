"""Encoders of texts and images, from transformers."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from tests.pool.zoo.case import Inputs, Maker

WORDS = 99
SHAPE = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
MARKS = {"bos_token_id": WORDS - 2, "eos_token_id": WORDS - 1, "pad_token_id": WORDS - 1}
DECODER_SHAPE = {"vocab_size": WORDS, "num_key_value_heads": 2, **SHAPE}


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(0, WORDS - 2, (2, 9))}


def _clip_config(**more: object) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(vocab_size=WORDS, max_position_embeddings=16, **SHAPE, **MARKS, **more)


def clip() -> tuple[nn.Module, Inputs]:
    return transformers.CLIPTextModel(_clip_config()), _tokens() | {"output_hidden_states": True}


def clip_g() -> tuple[nn.Module, Inputs]:
    config = _clip_config(projection_dim=24, hidden_act="gelu")
    return transformers.CLIPTextModelWithProjection(config), _tokens() | {"output_hidden_states": True}


def clip_vision() -> tuple[nn.Module, Inputs]:
    config = transformers.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=24, **SHAPE)
    return transformers.CLIPVisionModelWithProjection(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def _t5_options() -> dict[str, object]:
    return {
        "vocab_size": WORDS,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 8,
    }


def t5() -> tuple[nn.Module, Inputs]:
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_options())), _tokens()


def umt5() -> tuple[nn.Module, Inputs]:
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_options())), _tokens()


def llama() -> tuple[nn.Module, Inputs]:
    config = transformers.LlamaConfig(use_cache=False, **DECODER_SHAPE)
    return transformers.LlamaModel(config), _tokens() | {"output_hidden_states": True}


def gemma2() -> tuple[nn.Module, Inputs]:
    config = transformers.Gemma2Config(use_cache=False, head_dim=8, **DECODER_SHAPE)
    return transformers.Gemma2Model(config), _tokens() | {"output_hidden_states": True}


def qwen2() -> tuple[nn.Module, Inputs]:
    config = transformers.Qwen2Config(use_cache=False, **DECODER_SHAPE)
    return transformers.Qwen2Model(config), _tokens() | {"output_hidden_states": True}


def bert() -> tuple[nn.Module, Inputs]:
    return transformers.BertModel(transformers.BertConfig(vocab_size=WORDS, **SHAPE)), _tokens()


ENCODERS: dict[str, Maker] = {f.__name__: f for f in (clip, clip_g, clip_vision, t5, umt5, llama, gemma2, qwen2, bert)}
