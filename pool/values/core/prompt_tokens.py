"""Tokens of a prompt, as tokenizers return them. Values that travel with a task, so that a prompt is tokenized once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens: their ids, and for each the number of characters of the text up to its end, without trailing
    white space unless it is all white space."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]


#: of a text of which an encoder reads parts, which it tokenizes itself
NO_TOKENS = Tokens((), ())


@dataclass(frozen=True, slots=True)
class ClipTokens:
    """A prompt as CLIP reads it: the token ids of each piece that is tokenized alone, in order
    (`pool.models.text.chunks.clip_tokens`)."""

    pieces: tuple[tuple[int, ...], ...]


PromptTokens: TypeAlias = Tokens | ClipTokens


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The tokens of a prompt for each text encoder of a model, in order, and how many the diffusion model reads.

    cut       tokens at its end that an encoder with states does not read, as its texts are no longer; the most of any
    is_usual  the encoders read as much as of the empty text, without weights and learned tokens: such texts of a model
              have equal numbers of rows and tokens
    """

    tokens: tuple[PromptTokens, ...]
    length: int
    cut: int = 0
    is_usual: bool = False
