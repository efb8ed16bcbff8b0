"""`Reading`: how one text encoder is read for one family of models. Torch-free.

What stands around a prompt, how long a text may be, which states are taken of which tokens, and what is told of them.
`pool.families.text_readings` has one for every encoder of every family; `pool.text.encode` does as they say.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from modelpool.pool.core.arguments import whole_number
from modelpool.pool.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.pool.core.family_facts import TextFacts


#: the token of a template that an image takes the place of
IMAGE_TOKEN = "<|image_pad|>"
#: tokens of the head of a turn of a chat, and of the end of the turn before
HEAD_TOKENS = 4


class Pooled(Enum):
    """The text as one vector: whether a model is told it, and which."""

    NONE = "none"
    #: the state of the token that ends the text, after the final norm
    PLAIN = "plain"
    #: that, through the encoder's projection; where a file has none, as if it were one that changes nothing
    PROJECTED = "projected"


class Padding(Enum):
    """What becomes of the states of tokens that only fill a text up."""

    KEPT = "kept"
    ZEROED = "zeroed"
    DROPPED = "dropped"


class MaskTold(Enum):
    """What a model is told of which tokens are real."""

    NOTHING = "nothing"
    REAL = "real"
    #: the real ones, and the first of those that fill the text up
    ONE_MORE = "one more"


class Cleaning(Enum):
    """What is done to a prompt before anything else."""

    NONE = "none"
    #: small letters, no space around it
    LOWERED = "lowered"
    #: references of HTML resolved, spaces in a row made one
    UNESCAPED = "unescaped"
    #: a space where it says nothing
    NEVER_EMPTY = "never empty"
    #: only what stands in quotation marks, single ones too: what an image is to have written in it
    QUOTED = "quoted"
    #: only what stands in double quotation marks, each once
    QUOTED_ONCE = "quoted once"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text encoder is read.

    encoder           which, as recognition names it
    width             numbers in each state of the published one; what stands for a missing encoder has it
    template          a prompt stands where it has `{}`
    negative_template  as `template`, for what an image is not to show; empty: the same
    cleaning          what is done to a prompt first
    is_optional       where nothing is left to say, zeros are told, and that none of them is real
    dropped_tokens    first tokens, of the template, whose states are left out
    least_tokens      a text is filled up to so many; 0: to the longest of those read at once
    most_tokens       a longer one is cut, dropped tokens included
    fills_left        what fills a text up stands before it
    is_masked         the encoder is told which tokens are real
    padding, mask     what is made of the states of tokens that fill up, and what is told of them
    layers            the states after these layers side by side, 0 being what the first layer takes; () for one state
    every_layer       the states after all layers, one after the other
    layers_left_out   of the last layers, where one state is read: 0 reads the last one
    final_norm        what is read goes through the final norm
    depth             layers that `layers_left_out` counts from; a file with fewer has left them out. 0: the file's own
    pad               the token that fills a text up, where it is another than its tokenizer's
    clip_pad_id       the same for CLIP, as a number
    chunk_tokens      what CLIP reads at once, where it has places for so many
    pooled            which vector is told beside the states
    image_token     of the template, for each image that it is shown
    images_every    of the states of images, which are told before the others, so many are one: its first; 0 tells
                      them where they stand
    last_head         the token that ends the head of a turn: the head of the last one, `HEAD_TOKENS` long, is left out
    tells_states      models are told the states; where they are told the vector alone, CLIP runs its first chunk only
    """

    encoder: str
    width: int = 0
    template: str = "{}"
    negative_template: str = ""
    cleaning: Cleaning = Cleaning.NONE
    is_optional: bool = False
    dropped_tokens: int = 0
    least_tokens: int = 0
    most_tokens: int = 0
    fills_left: bool = False
    is_masked: bool = False
    padding: Padding = Padding.KEPT
    mask: MaskTold = MaskTold.NOTHING
    layers: tuple[int, ...] = ()
    every_layer: bool = False
    layers_left_out: int = 0
    final_norm: bool = True
    depth: int = 0
    pad: str = ""
    clip_pad_id: int = 49407
    chunk_tokens: int = 77
    pooled: Pooled = Pooled.NONE
    image_token: str = IMAGE_TOKEN
    images_every: int = 0
    last_head: str = ""
    tells_states: bool = True

    @property
    def is_clip(self) -> bool:
        """Whether it is read in chunks, as CLIP is."""
        return self.encoder.startswith("clip")

    @property
    def sees(self) -> bool:
        """Images stand among its words."""
        return self.image_token in self.template

    def around(self, is_negative: bool = False) -> tuple[str, str]:
        """What stands before a prompt, and after it."""
        template = self.negative_template if is_negative and self.negative_template else self.template
        before, found, after = template.partition("{}")
        assert found, f"the template of {self.encoder} has no place for a prompt"
        return before, after

    def left_out(self, layers: int) -> int:
        """`layers_left_out` of an encoder whose file has so many `layers`."""
        return max(0, self.layers_left_out - max(0, self.depth - layers))


def reading_of(facts: TextFacts | Reading) -> Reading:
    """`facts` of a text encoder of Stable Diffusion as a reading; a reading as it is."""
    if isinstance(facts, Reading):
        return facts
    return Reading(
        "clip",
        layers_left_out=facts.layers_left_out,
        final_norm=facts.final_norm,
        clip_pad_id=facts.pad_id,
        pooled=Pooled.PROJECTED if facts.gives_pooled else Pooled.NONE,
    )


def with_layers_skipped(facts: TextFacts | Reading, count: int) -> TextFacts | Reading:
    """`facts` with `count` more of the last layers left out: what people call CLIP skip. Others than CLIP are read as
    ever. Raises UnusableField for fewer than none."""
    more = whole_number("clip skip", count, "a whole number of layers, 0 or more")
    if isinstance(facts, Reading) and not facts.is_clip:
        return facts
    return replace(facts, layers_left_out=facts.layers_left_out + more)


_SPACES = re.compile(r"\s+")
#: quotation marks that open, by those that close, in the order in which HunyuanImage looks for them
_QUOTED: tuple[Mapping[str, str], ...] = ({"'": "'"}, {'"': '"'}, {"\u2018": "\u2019"}, {"\u201c": "\u201d"})
_DOUBLY_QUOTED: Mapping[str, str] = {'"': '"', "\u201c": "\u201d"}


def cleaned(text: str, cleaning: Cleaning) -> str:
    """`text` as a family wants prompts."""
    match cleaning:
        case Cleaning.NONE:
            return text
        case Cleaning.LOWERED:
            return text.lower().strip()
        case Cleaning.UNESCAPED:
            return _SPACES.sub(" ", html.unescape(html.unescape(text))).strip()
        case Cleaning.NEVER_EMPTY:
            return text or " "
        case Cleaning.QUOTED:
            return _written([part for marks in _QUOTED for part in _between(text, marks)])
        case Cleaning.QUOTED_ONCE:
            return _written(dict.fromkeys(_between(text, _DOUBLY_QUOTED)))


def _between(text: str, marks: Mapping[str, str]) -> Iterator[str]:
    """What stands between `marks` in each line of `text`: from one that opens to the next that closes it. Takes time
    as the text is long, however many of them open and never close."""
    opening = re.compile(f"[{''.join(marks)}]")
    for line in text.split("\n"):
        closed, place = dict(marks), 0
        while found := opening.search(line, place):
            place, mark = found.end(), found[0]
            end = line.find(closed[mark], place) if mark in closed else -1
            if end < 0:
                closed.pop(mark, None)  # nor does a later one close
                continue
            yield line[place:end]
            place = end + 1


def _written(parts: Iterable[str]) -> str:
    """What is to be written in an image, as Glyph-ByT5 is told it; nothing for nothing."""
    return "".join(f'Text "{part}". ' for part in parts)


def check_layers(reading: Reading, layers: int) -> None:
    """Check that an encoder of so many `layers` has a state that `reading` asks for.

    Raises UnusableField.
    """
    if reading.left_out(layers) >= layers > 0:
        raise unusable_field("layers left out", reading.left_out(layers), f"fewer than the {layers} that there are")
