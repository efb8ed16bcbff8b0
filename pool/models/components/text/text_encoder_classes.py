"""The transformers classes of text encoders, without weights: the only module that names them.

Everything is created on the meta device; `fill_tables` gives values to tables that no file carries (positions, scales).
Reads no files, and knows no prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.glm_image.configuration_glm_image import GlmImageTextConfig
from transformers.models.glm_image.modeling_glm_image import GlmImageTextModel

from modelpool.pool.models.components.text.configs import Config
from modelpool.pool.values.core.errors import UnknownArchitecture


class WordTable(nn.Module):
    """The token embedding of a language model; `config` has its sizes."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table."""
        return self.embed_tokens

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Return the embedding of each token as `last_hidden_state`, as text encoders do."""
        return SimpleNamespace(last_hidden_state=self.embed_tokens(input_ids))


def _clip(config: Config) -> nn.Module:
    own = transformers.CLIPTextConfig(**config)
    module: nn.Module
    if "projection_dim" in config:
        module = transformers.CLIPTextModelWithProjection(own)
    else:
        module = transformers.CLIPTextModel(own)
    return module


def _t5(config: Config) -> nn.Module:
    return _with_one_table(transformers.T5EncoderModel(transformers.T5Config(**config)))


def _umt5(config: Config) -> nn.Module:
    return _with_one_table(transformers.UMT5EncoderModel(transformers.UMT5Config(**config)))


def _with_one_table(module: Any) -> nn.Module:
    """Share one token embedding module under both names of T5, so that its bytes are counted once."""
    module.encoder.embed_tokens = module.shared
    assert isinstance(module, nn.Module)
    return module


class GlmImageWriter(GlmImageTextModel):  # type: ignore[misc] # transformers is not typed
    """The language part of GLM-Image with the head that predicts tokens of images."""

    def __init__(self, config: GlmImageTextConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vision_vocab_size, bias=False)


def _t5gemma(config: Config) -> nn.Module:
    """The encoder; its configuration has one for a decoder too."""
    halves = {half: dict(config) for half in ("encoder", "decoder")}
    shared = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    own = transformers.T5GemmaConfig(**halves, **shared, is_encoder_decoder=False)
    module: nn.Module = transformers.T5GemmaEncoderModel(own)
    return module


#: by the architecture that `pool.families.detection.text_encoders` names
MODULES: Mapping[str, Callable[[Config], nn.Module]] = {
    "clip": _clip,
    "t5": _t5,
    "umt5": _umt5,
    "bert": lambda config: transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False),
    "t5gemma": _t5gemma,
    "llama": lambda config: transformers.LlamaModel(transformers.LlamaConfig(**config)),
    "mistral": lambda config: transformers.MistralModel(transformers.MistralConfig(**config)),
    "ministral3": lambda config: transformers.Ministral3Model(transformers.Ministral3Config(**config)),
    "qwen2": lambda config: transformers.Qwen2Model(transformers.Qwen2Config(**config)),
    "qwen3": lambda config: transformers.Qwen3Model(transformers.Qwen3Config(**config)),
    # its positions have three axes, which are equal for text, and which its pipelines pass
    "qwen3_vl": lambda config: transformers.Qwen3VLTextModel(transformers.Qwen3VLTextConfig(**config)),
    "glm_image": lambda config: GlmImageWriter(GlmImageTextConfig(**config)),
    "glm": lambda config: transformers.GlmModel(transformers.GlmConfig(**config)),
    "gemma2": lambda config: transformers.Gemma2Model(transformers.Gemma2Config(**config)),
    "gemma3": lambda config: transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**config)),
    "words": lambda config: WordTable(transformers.PreTrainedConfig(**config)),
}


def empty_text_encoder(architecture: str, config: Config) -> nn.Module:
    """Return the module for `config` on the meta device, in evaluation mode.

    Raises UnknownArchitecture if the class rejects the sizes.
    """
    try:
        with torch.device("meta"):
            module = MODULES[architecture](config)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"text encoder: {architecture} cannot have these sizes: {error}") from error
    return module.eval().requires_grad_(False)


def fill_tables(module: nn.Module) -> None:
    """Give values to the buffers that no file carries, from the configuration."""
    for part in module.modules():
        for name, value in list(part._buffers.items()):
            if value is not None and value.is_meta:
                part.register_buffer(name, _table(part, name, value), persistent=False)


def _table(part: nn.Module, name: str, value: Tensor) -> Tensor:
    match name:
        case "position_ids":
            return torch.arange(value.shape[-1]).unsqueeze(0)
        case "token_type_ids":
            return torch.zeros(value.shape, dtype=value.dtype)
        case "embed_scale":
            return torch.tensor(part.scalar_embed_scale, dtype=value.dtype)
        case _ if name.endswith("inv_freq"):  # of rotary positions: the class computes them from its configuration
            own: Any = type(part)(part.config)
            table: Tensor = getattr(own, name)
            return table
        case _:
            raise AssertionError(f"{type(part).__name__} has an unfilled table {name!r}")
