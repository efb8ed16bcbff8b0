"""Checkpoint files into modules whose parameters are views of the mapped file.

Knows how the pieces of this package go together. Nothing is copied: a built module reads the file's own bytes, in the
type that the file has them in. Does not move or cast weights (`pool.ops`), nor patch them (`pool.patches`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn

from pool.checkpoints.detect import detect
from pool.checkpoints.families import Family, LatentFacts
from pool.checkpoints.infer import latent_facts
from pool.checkpoints.key_map import KeyMap, discover
from pool.checkpoints.mapped_file import MappedFile
from pool.checkpoints.modules import config_of, empty_module, fill_tables
from pool.checkpoints.private_names import converter, differing_keys
from pool.checkpoints.safetensors_file import Header
from pool.errors import UnknownArchitecture
from pool.spec import Role


@dataclass(frozen=True, slots=True)
class BuiltComponent:
    """A component of a checkpoint as a module.

    module   in evaluation mode, without gradients; its parameters are views of the checkpoint's mapping and must not be
             written to
    key_map  between the checkpoint's tensors and the module's parameters
    """

    role: Role
    family: Family
    module: nn.Module
    key_map: KeyMap
    latent: LatentFacts


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint file of a family that this version runs."""

    family: Family
    mapped: MappedFile

    @property
    def header(self) -> Header:
        """What the file says of itself."""
        return self.mapped.header

    @property
    def latent(self) -> LatentFacts:
        """What its latents mean."""
        return latent_facts(self.family, self.header.shapes)

    def key_map(self, role: Role) -> KeyMap:
        """The key map of the component `role`.

        Raises UnknownArchitecture naming the file when its tensors are not those of the component's module.
        """
        return self._plan(role)[1]

    def build(self, role: Role) -> BuiltComponent:
        """The component `role` as a module over the mapped file.

        Raises UnknownArchitecture naming the file when its tensors are not those of the component's module.
        """
        module, key_map = self._plan(role)
        module.load_state_dict(key_map.load(self.mapped.tensors()), assign=True)
        module.requires_grad_(False)
        fill_tables(module)
        return BuiltComponent(role, self.family, module, key_map, self.latent)

    def _plan(self, role: Role) -> tuple[nn.Module, KeyMap]:
        """The module without weights, and the key map that fits it."""
        shapes = self.family.shapes_of(role, self.header.shapes)
        config = config_of(role, self.family.bare_shapes_of(role, self.header.shapes))
        module = empty_module(role, config)
        key_map = discover(shapes, converter(role, config))
        difference = differing_keys(key_map, module)
        if difference:
            raise UnknownArchitecture(
                f"{self.header.path}: its {role.value} is not that of {self.family.title}: {difference}"
            )
        return module, key_map


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open and recognise the checkpoint at `path`; reads its header only.

    Raises CorruptFile when it is no whole safetensors file, UnknownArchitecture when it is no checkpoint that this
    version runs.
    """
    mapped = MappedFile.open(path)
    return Checkpoint(detect(mapped.header), mapped)
