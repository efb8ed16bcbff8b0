"""The names of TAESD's tensors in the three layouts of its files, as names of the layout with both halves.

    taesd_encoder.0.weight, taesd_decoder.1.weight      both halves in one file
    0.weight, 1.weight                                  each half in its own file, as it was published
    encoder.layers.0.weight, decoder.layers.0.weight    diffusers

The first two count the clamp before the decoder as a layer, diffusers does not. Torch-free.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

ENCODER, DECODER = "taesd_encoder.", "taesd_decoder."
_DIFFUSERS_ENCODER, _DIFFUSERS_DECODER = "encoder.layers.", "decoder.layers."
#: the first block of a half that is alone in its file
DECODER_ALONE, ENCODER_ALONE = "3.conv.0.weight", "1.conv.0.weight"
#: the first block of each half in diffusers
DIFFUSERS_BLOCKS = ("decoder.layers.2.conv.0.weight", "encoder.layers.1.conv.0.weight")

T = TypeVar("T")


def is_decoder_alone(keys: Container[str]) -> bool:
    """Whether these are the tensors of a decoder in its own file."""
    return DECODER_ALONE in keys and "1.weight" in keys and "0.weight" not in keys


def is_encoder_alone(keys: Container[str]) -> bool:
    """Whether these are the tensors of an encoder in its own file."""
    return ENCODER_ALONE in keys and "0.weight" in keys


def with_both_halves_names(values: Mapping[str, T]) -> dict[str, T]:
    """Return `values` by the names of a file with both halves; other tensors keep their names."""
    alone = DECODER if is_decoder_alone(values) else ENCODER if is_encoder_alone(values) else ""
    return {_named(key, alone): value for key, value in values.items()}


def half_numbers(keys: Iterable[str], half: str) -> list[int]:
    """Return the layers of a half, in order, by keys of a file with both halves."""
    numbers = (key.removeprefix(half).partition(".")[0] for key in keys if key.startswith(half))
    return sorted({int(number) for number in numbers if number.isdecimal()})


def _named(key: str, alone: str) -> str:
    if key.startswith(_DIFFUSERS_ENCODER):
        return ENCODER + key.removeprefix(_DIFFUSERS_ENCODER)
    if key.startswith(_DIFFUSERS_DECODER):
        number, dot, rest = key.removeprefix(_DIFFUSERS_DECODER).partition(".")
        return f"{DECODER}{int(number) + 1}{dot}{rest}" if number.isdecimal() else key
    return alone + key if alone and key[:1].isdecimal() else key
