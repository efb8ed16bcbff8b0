"""Checks the fields of music, and makes the texts that a model of music reads. Pure.

Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.output_shape import duration_of
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section, same_fields
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.parts.music_text import DEFAULT_LANGUAGE, caption_text, lyrics_text
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import ModelRef

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: fields that only models of music read, in the order of the recipe
MUSIC_FIELDS = ("lyrics", "lyrics_language", "bpm", "key_scale", "time_signature")


def check_music(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a field of music that models of `facts` do not read."""
    for name in () if facts.reads_lyrics else MUSIC_FIELDS:
        value = getattr(request, name)
        if value is not None:
            raise unsupported_field(name, request.model, "generates no music with lyrics", value)


def music_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, str]:
    """Return the fields of music that the request leaves out, for models that read them."""
    if not defaults.sampling.reads_lyrics:
        return {}
    return {"lyrics": request.lyrics or "", "lyrics_language": request.lyrics_language or DEFAULT_LANGUAGE}


def text_of(request: GenerateRequest, prompt: str, facts: SamplingFacts, sampled: GenerateRequest) -> str:
    """Return the text that models of `facts` read for `prompt`: for music, with the facts about it, and with the
    length of the clip that is `sampled`."""
    if not facts.reads_lyrics:
        return prompt
    seconds = duration_of(sampled, sampled.model, facts).seconds
    return caption_text(prompt, seconds, request.bpm, request.key_scale, request.time_signature)


def lyrics_of(request: GenerateRequest) -> str:
    """Return the text of the lyrics of `request`."""
    return lyrics_text(request.lyrics or "", request.lyrics_language or DEFAULT_LANGUAGE)


def music_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths of what a model of music reads, from the `lengths` of caption and lyrics: first the length of
    its context, which has a state for the reference audio, too; then `lengths`, which are equal in a batch."""
    return [sum(lengths) + 1, *lengths]


def _recorded(source: RecipeSource) -> dict[str, Any]:
    return {name: value for name in MUSIC_FIELDS if (value := getattr(source.request, name))}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return same_fields(recipe, *MUSIC_FIELDS)


def _lines(recipe: Recipe) -> Iterator[Line]:
    """Lyrics are in one line."""
    for name in MUSIC_FIELDS:
        if value := getattr(recipe, name):
            yield name.replace("_", " "), str(value).replace("\n", " / ")


MUSIC = Feature(check_music, music_defaults, Section(_recorded, _restored, _lines))
