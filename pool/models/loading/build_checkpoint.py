"""Builds modules from checkpoint files; their parameters are views of the mapped file.

Combines the parts of this package. Nothing is copied: a built module reads the file's bytes, in the dtype of the file;
quantized weights stay packed wherever their format allows the module's shape. Does not move or cast weights
(`pool.weights.ops`), nor patch them (`pool.weights.patches`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.files.formats.ggml_types import is_block_type
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.components.common.infer_config import Config, latent_facts
from modelpool.pool.models.components.common.module_classes import config_of
from modelpool.pool.models.components.component_plans import ComponentPlan, fitted_plan, plan_component, vae_plan
from modelpool.pool.models.components.gc_pause import collecting_later
from modelpool.pool.models.components.vae.build_vae import VaePlan
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.small_tensors import refine_family
from modelpool.pool.models.loading.vision_checkpoint import vision_family
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.assembly import Source
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import KeyMap
from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.detect_layers import QuantizedLayer
from modelpool.pool.weights.quant.formats import round_up
from modelpool.pool.weights.quant.mapped_file import MappedFile
from modelpool.pool.weights.quant.open_weights import OpenWeights, weights_of_header

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltComponent:
    """A component of a checkpoint as a module.

    module   in evaluation mode, without gradients; its parameters are views of the checkpoint's mapping (except
    quantized
             weights that had to be unpacked) and must not be written to
    key_map  between the checkpoint's tensors and the module's parameters
    """

    role: Role
    family: LocatedFamily
    module: nn.Module
    key_map: KeyMap
    latent: LatentFacts


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint file of a family that this version runs."""

    family: LocatedFamily
    weights: OpenWeights
    #: of the components that were planned before: planning builds the module
    _key_maps: dict[Role, KeyMap] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: its only entry, once it was found: measuring a VAE takes milliseconds, and each component has the facts
    _latent: list[LatentFacts] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def mapped(self) -> MappedFile:
        """The file as it is stored."""
        return self.weights.mapped

    @property
    def layers(self) -> Mapping[str, QuantizedLayer]:
        """Its quantized layers, by the key of their weight."""
        return self.weights.layers

    @property
    def scales_inputs(self) -> bool:
        """Whether it has a layer of which kernels scale the inputs by the largest of them."""
        return any(layer.scales_inputs for layer in self.layers.values())

    @property
    def header(self) -> Header:
        """The file's header."""
        return self.weights.header

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of its weights by key, quantization undone."""
        return self.weights.shapes

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of its components."""
        return tuple(self.family.prefixes)

    def quantization(self, role: Role) -> dict[str, int]:
        """Return the quantization formats of the component `role` and the number of layers in each; most first."""
        found = Counter[str]()
        for key in self.family.shapes_of(role, self.shapes):
            if key in self.layers:
                found[self.layers[key].format.name] += 1
            elif is_block_type(self.header.tensors[key].dtype):
                found[self.header.tensors[key].dtype] += 1
        return dict(found.most_common())

    @property
    def latent(self) -> LatentFacts:
        """The facts of its latents."""
        if not self._latent:
            self._latent.append(latent_facts(self.family, self.shapes))
        return self._latent[0]

    def config(self, role: Role) -> Config:
        """Return the constructor arguments of the component `role` (not a VAE): inferred from its shapes, or a folder's
        configuration. Raises UnknownArchitecture if no such component has the shapes."""
        config = self.family.configs.get(role)
        if config:
            return dict(config)
        return config_of(self.family.architectures[role], self.family.bare_shapes_of(role, self.shapes))

    def key_map(self, role: Role) -> KeyMap:
        """Return the key map of the component `role`.

        Raises UnknownArchitecture naming the file if the component's module has other tensors.
        """
        known = self._key_maps.get(role)
        return self._plan(role).key_map if known is None else known

    @collecting_later()
    def build(self, role: Role) -> BuiltComponent:
        """Return the component `role` as a module over the mapped file.

        A quantized weight that the module has in a form which its format cannot represent is unpacked; the number of
        unpacked weights is logged. Raises UnknownArchitecture naming the file if the component's module has other
        tensors.
        """
        plan = self._plan(role)
        module, key_map = plan.module, plan.key_map
        check_extra_tensors(self.weights, "VAE" if role is Role.VAE else role.value, key_map.unused)
        parameters = key_map.load(self.weights.with_shapes(key_map.sources))
        self._warn_of_unpacked(key_map, parameters)
        unexpected = fill(module, parameters)
        plan.fill(module)
        assert_filled(module)
        assert not unexpected, f"{type(module).__name__} has no place for {unexpected}"
        return BuiltComponent(role, self.family, module, key_map, self.latent)

    def prefetch(self, role: Role) -> None:
        """Have the system bring the component `role` into the machine's memory in the background, for a run that will
        use all of it soon. Advisory; returns at once."""
        self.mapped.prefetch(self.family.shapes_of(role, self.header.shapes))

    def _warn_of_unpacked(self, key_map: KeyMap, parameters: Mapping[str, Tensor]) -> None:
        unpacked = [
            (segment.source, key)
            for key, origin in key_map.origins.items()
            for segment in origin.segments
            if self._is_quantized(segment.source) and not isinstance(parameters[key], PackedWeight)
        ]
        if unpacked:
            (source, key), count = unpacked[0], len({source for source, _ in unpacked})
            _LOG.warning(
                "%s: %d quantized weights are unpacked to %s, because the model has them in another form: %r as "
                "%r of shape %s first",
                self.header.path, count, parameters[key].dtype, source, key, tuple(parameters[key].shape),
            )  # fmt: skip

    def _is_quantized(self, key: str) -> bool:
        return key in self.layers or is_block_type(self.header.tensors[key].dtype)

    def vae_plan(self) -> VaePlan:
        """Return the build plan of its VAE. Raises UnknownArchitecture if no VAE has its tensors."""
        return vae_plan(self.family, self.family.shapes_of(Role.VAE, self.shapes), self.family.prefixes[Role.VAE])

    def _plan(self, role: Role) -> ComponentPlan:
        """Return the component without weights, and the key map that fits it."""
        shapes = self.family.shapes_of(role, self.shapes)
        config = self.family.configs.get(role)
        try:
            plan = plan_component(self.family, role, shapes, config)
            unpadded = _without_padding(self.layers, plan.key_map, plan.module)
            plan = plan_component(self.family, role, {**shapes, **unpadded}, config) if unpadded else plan
            plan = fitted_plan(self.family, plan)
            self._key_maps[role] = plan.key_map
            return plan
        except UnknownArchitecture as error:
            self.weights.expect_scales_read(shapes)  # tensors that say scale may be the reason
            raise UnknownArchitecture(f"{self.header.path}: its {role.value}: {error}") from error


@collecting_later()
def open_checkpoint(source: Source, *, allow_pickle: bool = False, whole: bool = True) -> Checkpoint:
    """Open and recognise the checkpoint at `source`: a file, the index of several, the files of an assembly, or a
    diffusers folder; reads headers and the smallest tensors only. Unless `whole`, a transformer model may lack some of
    its components (`pool.models.loading.incomplete_checkpoint`).

    Raises CorruptFile and UnsafeFile as `read_weights_header` does, UnknownArchitecture if it is no checkpoint that
    this version runs, BadQuantization if quantized layers are not stored as declared.
    """
    weights = weights_of_header(read_weights_header(source, allow_pickle=allow_pickle))
    header = weights.header
    return Checkpoint(vision_family(header) or refine_family(detect(header, whole=whole), header), weights)


def _without_padding(layers: Mapping[str, QuantizedLayer], key_map: KeyMap, module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of weights that are stored padded, by key: only their module knows them, not their file."""
    shapes_of_padded: dict[str, Shape] = {}
    for key, layer in layers.items():
        targets = key_map.targets(key)
        if layer.format.pads_to == 1 or len(targets) != 1 or targets[0].operations:
            continue
        shape = tuple(module.get_parameter(targets[0].key).shape)
        if shape != layer.shape and tuple(round_up(size, layer.format.pads_to) for size in shape) == layer.shape:
            shapes_of_padded[key] = shape
    return shapes_of_padded
