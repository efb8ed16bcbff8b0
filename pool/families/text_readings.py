"""Readings of a prompt by each family's text encoders: templates, lengths, layers, masks. Torch-free.

The modules of `pool.families.definitions` define them, one row per set of text encoders; families that read a set
differently have a row of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.families.definitions import all_definitions, defined_families
from modelpool.pool.families.parts.text_join import TextJoin
from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.values.core.sampling_facts import TextStates

_READ = tuple(family for family in all_definitions() if family.text.readings)

#: by set, or by family if a family reads the encoders of a set differently
READINGS: Mapping[str, tuple[Reading, ...]] = MappingProxyType(
    {family.readings_name: family.text.readings for family in _READ}
)
#: the row of `READINGS` of each family and each set
ROW_OF: Mapping[str, str] = MappingProxyType(
    {name: name for name in READINGS} | {family.name: family.readings_name for family in _READ}
)
#: how the states of several encoders are joined, by row, unless each is an input of its own
JOINS: Mapping[str, TextJoin] = MappingProxyType(
    {family.readings_name: family.text.join for family in _READ if family.text.join is not None}
)
#: how the first text encoder reads lyrics, by row
LYRICS: Mapping[str, Reading] = MappingProxyType(
    {family.readings_name: family.text.lyrics for family in defined_families() if family.text.lyrics is not None}
)
#: encoders that the models of a row can run without, but not all of them at once
OPTIONAL_ENCODERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {family.readings_name: family.text.optional for family in defined_families() if family.text.optional}
)


def readings_of(family: str) -> tuple[Reading, ...] | None:
    """Return how the text encoders of `family` (or of a set of text encoders) are read, in their order.

    None if no reading is known.
    """
    row = ROW_OF.get(family)
    return None if row is None else READINGS[row]


def text_states_of(family: str) -> TextStates | None:
    """Return the states of texts that models of `family`, or of a set of text encoders, read; None if no reading is
    known."""
    row = ROW_OF.get(family)
    return None if row is None else TextStates(tuple(each.encoder for each in READINGS[row]), row)


def lyrics_reading_of(family: str) -> Reading:
    """Return how the first text encoder of `family` (or of a set) reads lyrics. Raises KeyError if it reads none."""
    return LYRICS[ROW_OF[family]]
