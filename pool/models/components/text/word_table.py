"""`WordTable`: a table of words as a text encoder, of models that read words without their context."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn
from transformers import PreTrainedConfig


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
