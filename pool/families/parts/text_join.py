"""`ReadText`: a text as one encoder read it; and `TextJoin`: how a model reads texts of several encoders together.
Torch-free to import.

Legend: L tokens, D width of a token's state, V width of the pooled text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

#: the text inputs of a model, by the names of `pool.families.parts.forward`, without a batch
Joined: TypeAlias = "Mapping[str, Tensor | None]"


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """A text encoded by one text encoder, float32.

    context_LD  its states; with a leading dimension for layers if the reading has every layer
    pooled_V    None unless the reading has a pooled vector
    mask_L      mask of real tokens; None if all are real, or if the reading returns no mask
    cut_tokens  text tokens that were truncated
    tokens_N    tokens of an image that the encoder wrote; it has no states then
    seen_N      tokens of the reference images that it saw before, one image after the other; None if there were none
    image_places_K2  position and number of each name of a reference image; None if the reading knows none
    """

    context_LD: Tensor
    pooled_V: Tensor | None = None
    mask_L: Tensor | None = None
    cut_tokens: int = 0
    tokens_N: Tensor | None = None
    seen_N: Tensor | None = None
    image_places_K2: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TextJoin:
    """The text inputs of a model that reads several encoders together.

    join         from the text as each encoder read it, in the order of the readings
    is_appended  the states of the last encoder follow the others; else all have one length
    """

    join: Callable[[Sequence[ReadText]], Joined]
    is_appended: bool = False


def joined_pooled(*read: ReadText) -> Tensor:
    """Return the concatenated pooled vectors of `read`, which all have one."""
    import torch

    pooled = [text.pooled_V for text in read]
    assert all(vector is not None for vector in pooled), "a reading with a pooled output returned no vector"
    return torch.cat([vector for vector in pooled if vector is not None], -1)
