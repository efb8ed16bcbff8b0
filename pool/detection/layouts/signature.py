"""What the tables of known models are made of: layouts of keys, and families that share one. Torch-free.

A layout is an architecture: the keys that give it away, in each naming that files use, and how its sizes are read off
the shapes. A family is a row: a layout, and what its sizes are. Nothing here knows any model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from modelpool.pool.detection.layouts.shape_sizes import Config, ShapeReader, Value

Condition: TypeAlias = Callable[[Config], bool]


class Naming(Enum):
    """Whose names a model's tensors have.

    PUBLISHED  those of the code that it was published with; single files have them
    DIFFUSERS  those of diffusers; model folders have them
    """

    PUBLISHED = "published"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True, slots=True)
class Spelling:
    """A layout in one naming.

    keys     all of these are there, without prefix
    without  none of these is there
    measure  the configuration, from the shapes; raises UnknownArchitecture where a tensor that it needs is missing
             or of another number of dimensions
    """

    naming: Naming
    keys: tuple[str, ...]
    measure: Callable[[ShapeReader], Config]
    without: tuple[str, ...] = ()

    def fits(self, keys: Collection[str], prefix: str = "") -> bool:
        """Whether a file with `keys` has a model in this spelling under `prefix`."""
        return all(prefix + key in keys for key in self.keys) and not any(prefix + key in keys for key in self.without)


@dataclass(frozen=True, slots=True)
class Layout:
    """An architecture: its title where no family fits its sizes, and how it is spelled."""

    title: str
    spellings: tuple[Spelling, ...]


def published(*keys: str, measure: Callable[[ShapeReader], Config], without: tuple[str, ...] = ()) -> Spelling:
    """A spelling with the names of the original code."""
    return Spelling(Naming.PUBLISHED, keys, measure, without)


def diffusers(*keys: str, measure: Callable[[ShapeReader], Config], without: tuple[str, ...] = ()) -> Spelling:
    """A spelling with the names of diffusers."""
    return Spelling(Naming.DIFFUSERS, keys, measure, without)


def anything(config: Config) -> bool:
    """Fits every configuration: the last family of a layout."""
    return True


def having(**fields: Value) -> Condition:
    """Fits a configuration whose fields are these; one that it has not got is not None, and fits nothing."""
    return lambda config: all(name in config and config[name] == value for name, value in fields.items())


@dataclass(frozen=True, slots=True)
class Signature:
    """One family of diffusion models.

    name     short and stable, "flux_schnell"
    title    for human readers
    layout   its architecture
    when     what its sizes are, among the families of one layout
    beside   keys of the file, with their prefixes, that it has beside the model; all are there
    latent   name of its latents (`pool.detection.latent_formats`); empty where it is not known
    comfyui  the class that ComfyUI knows it as; empty where it has none
    runs     the class of diffusers that has its architecture; empty where our dependencies have none
    """

    name: str
    title: str
    layout: Layout
    when: Condition = anything
    beside: tuple[str, ...] = ()
    latent: str = ""
    comfyui: str = ""
    runs: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What sets one family of a layout apart: the fields of `Signature` with the same names."""

    name: str
    title: str
    comfyui: str = ""
    when: Condition = anything
    beside: tuple[str, ...] = ()


def rows(layout: Layout, latent: str, runs: str, *families: Row) -> tuple[Signature, ...]:
    """Families that share their layout, the name of their latents and the class that runs them."""
    return tuple(
        Signature(row.name, row.title, layout, row.when, row.beside, latent, row.comfyui, runs) for row in families
    )
