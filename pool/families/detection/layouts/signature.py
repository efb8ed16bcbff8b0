"""Types of the detection tables: key layouts, and families that share one. Torch-free.

A layout is an architecture: its identifying keys in each naming, and how to measure its sizes. A family is a row: a
layout, and a condition on its sizes. Nothing here knows any model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from modelpool.pool.families.detection.layouts.shape_sizes import Config, ShapeReader, Value

Condition: TypeAlias = Callable[[Config], bool]


class Naming(Enum):
    """Naming of a model's tensors.

    PUBLISHED  names of the code that it was published with, in single files
    DIFFUSERS  names of diffusers, in model folders
    """

    PUBLISHED = "published"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True, slots=True)
class LayoutNaming:
    """A layout in one naming.

    keys     required keys, without prefix
    without  excluded keys
    measure  the configuration, from the shapes; raises UnknownArchitecture if a required tensor is missing or has
             another number of dimensions
    """

    naming: Naming
    keys: tuple[str, ...]
    measure: Callable[[ShapeReader], Config]
    without: tuple[str, ...] = ()

    def fits(self, keys: Collection[str], prefix: str = "") -> bool:
        """Return whether a file with `keys` has a model in this naming under `prefix`."""
        return all(prefix + key in keys for key in self.keys) and not any(prefix + key in keys for key in self.without)


@dataclass(frozen=True, slots=True)
class Layout:
    """An architecture: its title for unknown sizes, and its namings."""

    title: str
    namings: tuple[LayoutNaming, ...]


def _unmeasured(reader: ShapeReader) -> Config:
    return {}


def published(
    *keys: str, measure: Callable[[ShapeReader], Config] = _unmeasured, without: tuple[str, ...] = ()
) -> LayoutNaming:
    """Return a layout in the names of the original code; without `measure`, none of its sizes is known."""
    return LayoutNaming(Naming.PUBLISHED, keys, measure, without)


def diffusers(
    *keys: str, measure: Callable[[ShapeReader], Config] = _unmeasured, without: tuple[str, ...] = ()
) -> LayoutNaming:
    """Return the same in the names of diffusers."""
    return LayoutNaming(Naming.DIFFUSERS, keys, measure, without)


def anything(config: Config) -> bool:
    """Match every configuration: the last family of a layout."""
    return True


def having(**fields: Value) -> Condition:
    """Return a condition that matches configurations with these field values; a missing field does not equal None."""
    return lambda config: all(name in config and config[name] == value for name, value in fields.items())


@dataclass(frozen=True, slots=True)
class Signature:
    """One family of diffusion models.

    name     short and stable, "flux_schnell"
    title    for human readers
    layout   its architecture
    when     condition on its sizes, among the families of one layout
    extra_keys  required keys of the file outside of the model, with their prefixes
    latent   name of its latents (`pool.families.parts.latent_formats`); empty if unknown
    comfyui  its class in ComfyUI; empty if none
    runs     diffusers class with its architecture; empty if our dependencies have none
    """

    name: str
    title: str
    layout: Layout
    when: Condition = anything
    extra_keys: tuple[str, ...] = ()
    latent: str = ""
    comfyui: str = ""
    runs: str = ""
