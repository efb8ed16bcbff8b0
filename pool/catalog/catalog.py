"""`Catalog`: which models and LoRAs there are, and what running them needs. Read from files and folders; no device.

Listing reads headers only. Sizes, patches and activations build the modules (without weights), so the first question
about a model takes a moment. Not thread safe; the controller asks it from one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modelpool.pool.catalog.controlnet_index import ControlShelf
from modelpool.pool.catalog.decoders import decoder_among, decoder_titles
from modelpool.pool.catalog.embedding_index import EmbeddingShelf
from modelpool.pool.core.assembly import Assembly
from modelpool.pool.core.errors import CorruptFile, UserError, unusable_field
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.sampling_facts import MadeFor
from modelpool.pool.core.stage_params import (
    EncodeImageWork,
    EncodeWork,
    LoraRef,
    ModelRef,
    SampleWork,
    SeeImageWork,
    Work,
    component_key,
    lora_key,
    role_of,
)
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.estimates.activation_estimator import ActivationFigures
from modelpool.pool.families.cascade_families import pooled_width
from modelpool.pool.formats.model_description import read_description
from modelpool.pool.formats.weights_file import files_of
from modelpool.pool.loading.content_digest import component_digests
from modelpool.pool.loading.describe import native_size
from modelpool.pool.loading.detect_family import detect
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.loading.small_tensors import settled
from modelpool.pool.loading.weights_header import read_weights_header
from modelpool.pool.pixels.latent_pixels import latent_shape, sampled_shape
from modelpool.pool.quant.detect_layers import layers_in_file
from modelpool.pool.registry.assembling import expect_whole
from modelpool.pool.registry.folders import Form, WeightsFile
from modelpool.pool.registry.kinds import LORAS, MODELS
from modelpool.pool.registry.listings import LoraListing, ModelListing, check_runs
from modelpool.pool.registry.names import without_ending
from modelpool.pool.registry.registry import open_registry
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Division, Role, RunCost, TaskSpec
from modelpool.pool.text.chunks import spelled_out

WEIGHTS_SUFFIX = ".safetensors"

#: needs of combinations of models and LoRAs that are kept; each LoRA strength makes new ones
USES_REMEMBERED = 4096
#: prior for a step at one latent cell and one byte of weights, seconds; the scheduler corrects it by what it measures
_PRIOR_SECONDS_PER_CELL_BYTE = 1e-12
_PRIOR_SECONDS = 0.02


class Catalog:
    """The models and LoRAs of some folders. How they are named is said in `pool.registry.names`; a path, an alias and
    a hash are names too."""

    def __init__(
        self,
        model_folders: Sequence[Path],
        lora_folders: Sequence[Path],
        device: str | DeviceCapabilities,
        registry_folder: Path | None = None,
        uses_added: bool = False,
        allow_pickle: bool = False,
        assemblies: Sequence[Assembly] = (),
    ) -> None:
        """`device` is what the models are to run on, or the name of its kind where no more is known.

        registry_folder  where hashes are remembered; the user's own when None
        uses_added       whether the files that people added to the registry there are in the catalog too
        allow_pickle     whether PyTorch's pickles may be read; without it they are listed with that for a problem
        assemblies       models of separate files that a configuration names
        """
        #: which files there are, by name, with their hashes
        self.registry = open_registry(
            model_folders, lora_folders, registry_folder, uses_added, allow_pickle, assemblies
        )
        self._allow_pickle = allow_pickle
        self._device = device
        self._opened: dict[str, OpenModel] = {}
        #: what runs hold beside weights
        kind = device if isinstance(device, str) else device.kind.value
        #: the ControlNets, which models are used with
        self.controls = ControlShelf(self.registry, device, self._open)
        #: the textual inversions, which prompts name
        self.embeddings = EmbeddingShelf(self.registry, allow_pickle)
        self.figures = ActivationFigures(self._open, kind, self.controls.opened)
        self._uses: Recent[tuple[object, ...], ComponentUse] = Recent(USES_REMEMBERED)
        self._specs: dict[str, dict[Role, ComponentSpec]] = {}
        self._refs: dict[str, ModelRef] = {}
        #: what components are called, by the digest of their content: after the model that had them first
        self._names: dict[str, ComponentKey] = {}
        self._components: dict[str, tuple[tuple[Role, ComponentKey], ...]] = {}

    def models(self) -> tuple[ModelListing, ...]:
        """Every checkpoint, by name."""
        return self.registry.models()

    def loras(self) -> tuple[LoraListing, ...]:
        """Every LoRA, by name."""
        return self.registry.loras()

    def find_model(self, name: str, *, whole: bool = True) -> ModelRef:
        """The checkpoint called `name`. Hashes the file when it is new. What need not be `whole` is found to be saved,
        not to be run (`pool.loading.incomplete_checkpoint`). Raises UnknownName, AmbiguousName,
        CorruptFile, or UnknownArchitecture for a folder of diffusers, or separate files, that do not run.

        A copy of a file that was asked for before is that file, under the name that it had first: everything that
        speaks of its components must call them the same.
        """
        file = self.registry.find(name, MODELS, "model")
        if file.form is Form.ASSEMBLED:
            expect_whole(self.registry, file.assembly or read_description(file.path), self._allow_pickle)
        if whole:
            check_runs(file, self._allow_pickle)  # before all of it is read
        ref = ModelRef(*self._found(file), assembly=file.assembly)
        name = self._refs.setdefault(ref.sha256, ref).name
        ref = replace(ref, name=name)  # where the file is now: it may have been renamed
        return replace(ref, components=self._component_keys(ref))

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        """The model that makes images of what `model` makes: the one called `name`; without a name the one in its
        folder, or the only one. Raises UnusableField for another model, for one that reads texts of another width, or
        where several would do; MissingParts where there is none; and as `find_model`."""
        families = self._open(model).checkpoint.family.sampling.decoders
        found = self.find_model(name or decoder_among(self.models(), model.name, model.path, families))
        if self._open(found).checkpoint.family.name not in families:
            raise unusable_field("decoder", name, f"a model of {' or '.join(decoder_titles(families))}")
        told, reads = self._pooled_width(model), self._pooled_width(found)
        if told != reads:
            expected = f"one that reads pooled texts of width {told}, as {model.path} does: {found.path} reads {reads}"
            raise unusable_field("decoder", found.name, expected)
        return found

    def find_lora(self, name: str, strength: float) -> LoraRef:
        """The LoRA called `name`. Raises UnknownName, AmbiguousName or CorruptFile."""
        return LoraRef(*self._found(self.registry.find(name, LORAS, "LoRA")), strength)

    def components(self, model: ModelRef) -> dict[Role, ComponentSpec]:
        """The sizes of the model's components. Raises CorruptFile or UnknownArchitecture."""
        if model.sha256 not in self._specs:
            opened = self._open(model)
            self._specs[model.sha256] = {role: opened.component(role).spec() for role in opened.checkpoint.roles}
        return self._specs[model.sha256]

    def made_for(self, model: ModelRef) -> MadeFor:
        """The size that the model was trained for, how it is sampled, and how large cells of its latents are."""
        opened = self._open(model)
        checkpoint = opened.checkpoint
        size = native_size(checkpoint.family, checkpoint.header)
        return MadeFor(*size, checkpoint.family.sampling, opened.latent.downscale)

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """What a run of one component with `loras` needs. Raises AdapterMismatch for a LoRA of another architecture."""

        def find() -> ComponentUse:
            opened = self._open(model)
            use = opened.component(role).use(opened.patch_set(role, loras), passes)
            return replace(use, adapters=tuple(lora_key(lora) for lora in loras))

        return self._uses.get((model.sha256, role, loras, passes), find)

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        """The size of a LoRA as a component: its files, which are read whole. Raises CorruptFile when one is gone."""
        try:
            file_bytes = sum(Path(file).stat().st_size for file in files_of(lora.path))
        except OSError as error:
            raise CorruptFile(f"{lora.path}: cannot be read: {error}") from error
        return ComponentSpec(lora_key(lora), Role.LORA, file_bytes, file_bytes)

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        """Whether a LoRA changes this component. Raises AdapterMismatch."""
        return self._open(model).touches(role, lora)

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        """What to tell of a LoRA that is used in part only, with counts. Raises AdapterMismatch."""
        return self._open(model).lora_warning(lora)

    def text_tokens(
        self, model: ModelRef, text: str, seen: tuple[tuple[int, int], ...] = (), numbered: bool = False
    ) -> int:
        """Tokens of `text` as the diffusion model of `model` reads it, with images as `EncodeWork` has them. Raises
        UnusableField as `parse_weights` does, and TokenizerMissing."""
        spelled = spelled_out(text, {e.name: e.rows for e in self.embeddings.of(text)})
        return self.figures.text_tokens(model, spelled, seen, numbered)

    def ways(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> tuple[Division, ...]:
        """`work` undivided, then the ways to do it in parts, the least divided first; each with what was counted for it
        beside what runs took."""
        return self.figures.ways(model, work, context_tokens)

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """A run of `task` ended well and cost `cost`: later figures take it in."""
        self.figures.learn(task, cost)

    def run_seconds(self, model: ModelRef, work: Work) -> float:
        """A first guess at how long `work` takes when all is resident; good to an order of magnitude."""
        spec = self.components(model)[role_of(work)]
        if isinstance(work, EncodeWork | SeeImageWork):
            return _PRIOR_SECONDS
        latent = self._open(model).latent
        passes = work.steps_run * work.texts if isinstance(work, SampleWork) else 16
        if isinstance(work, EncodeImageWork):
            shape = latent_shape(work.width, work.height, work.frames, latent)
        else:
            shape = sampled_shape(work, latent)
        cells = math.prod(shape[1:])
        return _PRIOR_SECONDS + passes * cells * spec.weight_bytes * _PRIOR_SECONDS_PER_CELL_BYTE

    def _component_keys(self, model: ModelRef) -> tuple[tuple[Role, ComponentKey], ...]:
        """What the components of `model` are called. Those that equal one of a model that was asked for before are that
        one, whatever files they are in. None for what does not run, which is told when it is to."""
        if model.sha256 not in self._components:
            try:
                header = read_weights_header(model.source, allow_pickle=self._allow_pickle)
                family = settled(detect(header), header)
                digests = component_digests(family, header, layers_in_file(header), self.registry.digests)
            except UserError:
                digests = {}
            self._components[model.sha256] = tuple(
                (role, self._names.setdefault(digest, component_key(model.name, role, digest)))
                for role, digest in digests.items()
            )
        return self._components[model.sha256]

    def _pooled_width(self, model: ModelRef) -> int | None:
        checkpoint = self._open(model).checkpoint
        return pooled_width(checkpoint.family.bare_shapes_of(Role.DIFFUSION_MODEL, checkpoint.shapes))

    def _found(self, file: WeightsFile) -> tuple[str, str, str]:
        """Name, path and hash of a file, as references have them."""
        return without_ending(file.path.name), str(file.real_path), self.registry.hashes(file).sha256

    def _open(self, model: ModelRef) -> OpenModel:
        if model.sha256 not in self._opened:
            self._opened[model.sha256] = OpenModel(model, self._device)
        return self._opened[model.sha256]
