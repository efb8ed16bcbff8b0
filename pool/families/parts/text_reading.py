"""`Reading`: how a text encoder is used by one family of models. Torch-free.

Defines the template of a prompt, its length limits, and the states and masks that are read.
`pool.families.text_readings` has one for each encoder of each family; `pool.models.text.encode` implements them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from modelpool.pool.values.core.argument_checks import whole_number
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.pool.values.core.family_facts import TextFacts


#: padding token of open_clip
OPEN_CLIP_PAD = 0
#: the image token of a template
IMAGE_TOKEN = "<|image_pad|>"
#: the name of a reference image in a prompt. Source: diffusers' OmniGenPipeline
IMAGE_NAME = re.compile(r"<\|image_(\d{1,4})\|>")
#: tokens of the header of a chat turn, and of the end of the turn before
HEAD_TOKENS = 4


class Pooled(Enum):
    """The pooled text vector that a model reads, if any."""

    NONE = "none"
    #: the state of the end token, after the final norm
    PLAIN = "plain"
    #: the same, through the encoder's projection; unchanged if the file has none
    PROJECTED = "projected"


class Padding(Enum):
    """Treatment of the states of padding tokens."""

    KEPT = "kept"
    ZEROED = "zeroed"
    DROPPED = "dropped"


class MaskMode(Enum):
    """The mask of real tokens that a model reads, if any."""

    NOTHING = "nothing"
    REAL = "real"
    #: the real ones, and the first padding token
    ONE_MORE = "one more"


class Cleaning(Enum):
    """Preprocessing of a prompt."""

    NONE = "none"
    #: lower case, stripped
    LOWERED = "lowered"
    STRIPPED = "stripped"
    #: HTML references resolved, runs of white space collapsed
    UNESCAPED = "unescaped"
    #: a space if it is empty
    NEVER_EMPTY = "never empty"
    #: only the parts in quotation marks, single ones included: the text to render in the image
    QUOTED = "quoted"
    #: only the parts in double quotation marks, each once
    QUOTED_ONCE = "quoted once"


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings for encoding a prompt with a text encoder.

    encoder           name of the encoder in detection
    width             width of the published encoder's states; used for the zeros of a missing encoder
    template          `{}` is replaced by the prompt
    negative_template  template of negative prompts; empty: `template`
    chat_template     the part of the template that the tokenizer's chat template has, for saved folders; empty: all of
                      it
    cleaning          preprocessing of a prompt
    is_optional       an empty prompt gives zeros, with none of them masked as real
    dropped_tokens    number of first tokens, of the template, that are dropped after encoding
    least_tokens      texts are padded to this length; 0: to the longest of the batch
    multiple          padding that counts as real makes the number of tokens a multiple of this; 0: there is none
    most_tokens       longer texts are truncated, dropped tokens included
    kept_last         number of last tokens, of the template, that longer texts keep
    keeps_ends        rows have the tokens of the template before the prompt and `least_tokens` less 2 others; the first
                      state and the last `least_tokens` less 1 are read
    pads_left        padding is on the left
    is_masked         the encoder reads an attention mask
    padding, mask     treatment of the states of padding, and the mask that the model reads
    layers            states after these layers, before the final norm, concatenated, 0 being the input of the first
                      layer; () for one state
    every_layer       states after all layers
    first_state       before these, the input of the first layer
    connects          it is no encoder, but a part that reads the states of the encoder before it
    layers_left_out   number of skipped last layers, for a single state: 0 reads the last one
    final_norm        the state goes through the final norm
    depth             number of layers that `layers_left_out` refers to; a file with fewer has removed them. 0: the
                      file's
    pad               padding token, if it is not the tokenizer's
    clip_pad_id       the id of the padding token for CLIP
    chunk_tokens      input length of CLIP, if it has as many positions
    pooled            pooled vector in addition to the states
    image_token     image token of the template, one for each image
    image_template  the template of a prompt about a reference image, which has as many tokens before the image; empty:
                    templates of Qwen-Image's editing models
    images_every    the states of images precede the others, and only every n-th is read; 0: they keep their positions
    last_head         token that ends the header of a chat turn: the last header, `HEAD_TOKENS` long, is dropped
    reads_states      models read the states; if they read only the pooled vector, CLIP runs only its first chunk
    quotes_apart      only the parts in quotation marks are read, each as a text of its own; one more token of padding
                      precedes each if their number is even, and counts as real
    writes_tokens     the encoder writes the tokens of an image, and no states are read
    has_weights       brackets in a prompt set weights; else they are a part of the text
    spells_quotes     the template, the text and its parts in quotation marks are tokenized separately, and these parts
                      character by character
    names_images      a text may name reference images (`IMAGE_NAME`), which the diffusion model reads in these places;
                      the parts between are tokenized separately
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
    multiple: int = 0
    kept_last: int = 0
    keeps_ends: bool = False
    pads_left: bool = False
    is_masked: bool = False
    padding: Padding = Padding.KEPT
    mask: MaskMode = MaskMode.NOTHING
    layers: tuple[int, ...] = ()
    every_layer: bool = False
    first_state: bool = False
    connects: bool = False
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
    reads_states: bool = True
    chat_template: str = ""
    image_template: str = ""
    spells_quotes: bool = False
    quotes_apart: bool = False
    writes_tokens: bool = False
    has_weights: bool = True
    names_images: bool = False

    @property
    def is_clip(self) -> bool:
        """Whether the encoder is a CLIP, which reads chunks."""
        return self.encoder.startswith("clip")

    @property
    def sees(self) -> bool:
        """Whether its template has image tokens."""
        return self.image_token in self.template

    def around(self, is_negative: bool = False) -> tuple[str, str]:
        """Return the parts of the template before and after the prompt."""
        template = self.negative_template if is_negative and self.negative_template else self.template
        before, found, after = template.partition("{}")
        assert found, f"the template of {self.encoder} has no placeholder for the prompt"
        return before, after

    def left_out(self, layers: int) -> int:
        """Return the number of skipped layers of an encoder with `layers` layers in its file."""
        return max(0, self.layers_left_out - max(0, self.depth - layers))


#: CLIP-G as Stable Diffusion XL and 3 read it
SDXL_CLIP_G = Reading(
    "clip_g", 1280, clip_pad_id=OPEN_CLIP_PAD, layers_left_out=1, final_norm=False, pooled=Pooled.PROJECTED
)


def fixed_length(encoder: str, tokens: int, width: int = 4096, **more: Any) -> Reading:
    """Return the reading of a text encoder with `tokens` tokens for every text; `more` are its other fields."""
    return Reading(encoder, width=width, least_tokens=tokens, most_tokens=tokens, **more)


def reading_of(facts: TextFacts | Reading) -> Reading:
    """Return `facts` of a text encoder of Stable Diffusion as a reading; a reading unchanged."""
    if isinstance(facts, Reading):
        return facts
    return Reading(
        "clip",
        layers_left_out=facts.layers_left_out,
        final_norm=facts.final_norm,
        clip_pad_id=facts.pad_id,
        pooled=Pooled.PROJECTED if facts.gives_pooled else Pooled.NONE,
    )


def image_names(count: int) -> str:
    """Return the names of `count` reference images as a text. Source: diffusers' OmniGenPipeline."""
    return " ".join(f"<img><|image_{number}|></img>" for number in range(1, count + 1))


def image_number(piece: str) -> int:
    """Return the number of the reference image that `piece` is the name of; 0 for another text."""
    found = IMAGE_NAME.fullmatch(piece)
    return int(found[1]) if found else 0


def with_layers_skipped(facts: TextFacts | Reading, count: int) -> TextFacts | Reading:
    """Return `facts` with `count` more skipped layers (CLIP skip). Other encoders than CLIP are unchanged, and so is a
    CLIP with only its pooled text read. Raises UnusableField for a negative number."""
    more = whole_number("clip skip", count, "a whole number of layers, 0 or more")
    if not _skips_layers(reading_of(facts)):
        return facts
    return replace(facts, layers_left_out=facts.layers_left_out + more)


def _skips_layers(reading: Reading) -> bool:
    return reading.is_clip and reading.reads_states


def most_layers_skipped(facts: TextFacts | Reading, layers: int) -> int | None:
    """Return the largest count for `with_layers_skipped` with an encoder of `layers` layers; None if all counts are
    without effect."""
    reading = reading_of(facts)
    if not _skips_layers(reading) or not layers:
        return None
    return layers - 1 - reading.layers_left_out + max(0, reading.depth - layers)


_SPACES = re.compile(r"\s+")
#: closing quotation mark by opening one, in the order in which HunyuanImage looks for them
_QUOTED: tuple[Mapping[str, str], ...] = ({"'": "'"}, {'"': '"'}, {"\u2018": "\u2019"}, {"\u201c": "\u201d"})
_DOUBLY_QUOTED: Mapping[str, str] = {'"': '"', "\u201c": "\u201d"}


def cleaned(text: str, cleaning: Cleaning) -> str:
    """Preprocess a prompt."""
    match cleaning:
        case Cleaning.NONE:
            return text
        case Cleaning.LOWERED:
            return text.lower().strip()
        case Cleaning.STRIPPED:
            return text.strip()
        case Cleaning.UNESCAPED:
            return _SPACES.sub(" ", html.unescape(html.unescape(text))).strip()
        case Cleaning.NEVER_EMPTY:
            return text or " "
        case Cleaning.QUOTED:
            return _written([part for marks in _QUOTED for part in _between(text, marks)])
        case Cleaning.QUOTED_ONCE:
            return _written(dict.fromkeys(_between(text, _DOUBLY_QUOTED)))


def _between(text: str, marks: Mapping[str, str]) -> Iterator[str]:
    """Yield the text between `marks` in each line of `text`: from an opening mark to its next closing one. Linear in
    the length of the text, even with many unclosed marks."""
    opening = re.compile(f"[{''.join(marks)}]")
    for line in text.split("\n"):
        closed, place = dict(marks), 0
        while found := opening.search(line, place):
            place, mark = found.end(), found[0]
            end = line.find(closed[mark], place) if mark in closed else -1
            if end < 0:
                closed.pop(mark, None)  # later ones are not closed either
                continue
            yield line[place:end]
            place = end + 1


def _written(parts: Iterable[str]) -> str:
    """Return the text to render in an image in the prompt format of Glyph-ByT5; empty for none."""
    return "".join(f'Text "{part}". ' for part in parts)


#: parts between quotation marks, apostrophes included, in the order in which GLM-Image looks for them
_GLYPHS = tuple(
    re.compile(pattern)
    for pattern in ("'([^']*)'", "\u201c([^\u201c\u201d]*)\u201d", '"([^"]*)"', "\u300c([^\u300c\u300d]*)\u300d")
)


def quoted_parts(text: str) -> list[str]:
    """Return the parts of `text` between quotation marks, in the order of their kinds; an empty one if there is none.
    Source: `get_glyph_texts` of diffusers' GlmImagePipeline."""
    return [part for marks in _GLYPHS for part in marks.findall(text)] or [""]


#: apostrophes in words, which quote nothing
_APOSTROPHE = re.compile(r"(?<=[a-zA-Z])'(?=[a-zA-Z])")
#: a part in quotation marks, with them
_IN_QUOTES = re.compile("'[^']*'|\"[^\"]*\"|\u2018[^\u2018\u2019]*\u2019|\u201c[^\u201c\u201d]*\u201d")


def spelled(text: str) -> Iterator[str]:
    """Yield the pieces of `text` that are tokenized separately: the characters of parts in quotation marks, marks
    included, and the text between these parts."""
    end = 0
    for found in _IN_QUOTES.finditer(_APOSTROPHE.sub("\0", text)):
        if end < found.start():
            yield text[end : found.start()]
        end = found.end()
        yield from text[found.start() : end]
    if end < len(text):
        yield text[end:]


def check_layers(reading: Reading, layers: int) -> None:
    """Check that an encoder with `layers` layers has a state after the skipped layers. Raises UnusableField."""
    if reading.left_out(layers) >= layers > 0:
        expected = f"fewer than the {layers} layers of the encoder"
        raise unusable_field("skipped layers", reading.left_out(layers), expected)
