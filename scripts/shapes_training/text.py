"""Converts captions to token ids, and builds the text encoder of the example model.

Knows the CLIP text configuration, the 77-token layout of SD1 and the phrasings used in training. Takes the tokenizer as
a callable. Does not know images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

Encode = Callable[[str], list[int]]

START_TOKEN = 49406
END_TOKEN = 49407
TOKENS_PER_CAPTION = 77
WIDTH = 32
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": TOKENS_PER_CAPTION,
    "vocab_size": 49408,
    "projection_dim": WIDTH,
    "hidden_act": "quick_gelu",
    "bos_token_id": START_TOKEN,
    "eos_token_id": END_TOKEN,
    "pad_token_id": END_TOKEN,
}
PHRASINGS: tuple[str, ...] = ("a {}", "{}", "the {}", "an image of a {}")


def token_rows(captions: Sequence[str], encode: Encode) -> torch.Tensor:
    """Return token ids of each caption: start, tokens, end, padded with end to 77; int64 [N, 77]."""
    rows = []
    for caption in captions:
        ids = [START_TOKEN, *encode(caption)[: TOKENS_PER_CAPTION - 2], END_TOKEN]
        rows.append(ids + [END_TOKEN] * (TOKENS_PER_CAPTION - len(ids)))
    return torch.tensor(rows)


def phrase(caption: str, rng: np.random.Generator) -> str:
    """Return a caption in a random phrasing; the plain one with probability 0.7."""
    chosen = PHRASINGS[0] if rng.random() < 0.7 else PHRASINGS[rng.integers(1, len(PHRASINGS))]
    return chosen.format(caption.removeprefix("a "))


def embedding(table: torch.Tensor) -> nn.Embedding:
    """Return a trainable token table [V, W] as a module."""
    return nn.Embedding(len(table), table.shape[1], _weight=table.clone())


class SmallVocabulary:
    """Trains a text encoder on the few tokens that occur, then copies their rows back to the full table."""

    def __init__(self, encoder: CLIPTextModel, rows: torch.Tensor) -> None:
        self.encoder = encoder
        self.tokens, self.small_rows = torch.unique(rows, return_inverse=True)
        self.full_table = encoder.get_input_embeddings().weight.detach().clone()
        encoder.set_input_embeddings(embedding(self.full_table[self.tokens]))

    def restore(self) -> CLIPTextModel:
        """Return the encoder with the full table and the trained rows. Effects: changes the encoder."""
        table = self.full_table.clone()
        table[self.tokens] = self.encoder.get_input_embeddings().weight.detach()
        self.encoder.set_input_embeddings(embedding(table))
        return self.encoder


def new_encoder() -> CLIPTextModel:
    """Return a text encoder with random weights, in the configuration of the example model."""
    return CLIPTextModel(CLIPTextConfig(**CONFIG))
