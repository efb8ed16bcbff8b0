"""`Catalog`: the models and LoRAs that exist, and what running them needs. Reads files and folders; needs no device.

Listing reads headers only. Sizes, patches and activations build the modules (without weights), so the first query about
a model takes a moment. Not thread safe; the controller uses it from one thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.pool.catalog.controlnet_index import ControlNetIndex
from modelpool.pool.catalog.decoders import choose_decoder, decoder_titles
from modelpool.pool.catalog.embedding_index import EmbeddingIndex
from modelpool.pool.catalog.estimates.activation_estimator import ActivationEstimator
from modelpool.pool.catalog.fetch_sizes import with_fetch
from modelpool.pool.catalog.gligen_index import GligenIndex
from modelpool.pool.catalog.image_prompt_index import ImagePromptIndex
from modelpool.pool.catalog.registry.assembling import expect_complete
from modelpool.pool.catalog.registry.folder_scan import FileForm, WeightsFile
from modelpool.pool.catalog.registry.hub_names import name_of_file
from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing, check_runs
from modelpool.pool.catalog.registry.registry import open_registry
from modelpool.pool.catalog.tiny_decoders import find_tiny_decoders
from modelpool.pool.catalog.upscaler_index import UpscalerIndex
from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.families.batch_gain_table import measured_gains
from modelpool.pool.families.parts.two_stages import pooled_width
from modelpool.pool.families.parts.written_image import tokens_written
from modelpool.pool.families.text_readings import text_states_of
from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.files.formats.weights_file import files_of
from modelpool.pool.inference.extensions.run_extension import check_fits
from modelpool.pool.inference.guidance.call_model import table_of
from modelpool.pool.inference.operations.own_nodes import NO_NODES, OpenedNode
from modelpool.pool.inference.pixels.decode_parts import cells_computed
from modelpool.pool.inference.pixels.latent_pixels import latent_shape, sampled_shape, sound_length_of
from modelpool.pool.inference.sampling.schedules import levels_of, may_exceed_model
from modelpool.pool.models.loading.content_digest import component_digests
from modelpool.pool.models.loading.describe import native_size, reference_factor
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.open_model import Component, OpenModel
from modelpool.pool.models.loading.skipped_layers import check_skipped_layers
from modelpool.pool.models.loading.small_tensors import refine_family
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.batch_gains import BatchedWork
from modelpool.pool.values.core.errors import CorruptFile, UserError, unusable_field
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.prompt_tokens import TokenizedPrompt
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import (
    SOUND,
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    LoraRef,
    ModelRef,
    ModelStageParams,
    SampleParams,
    VisionEncodeParams,
    component_key,
    lora_key,
    role_of,
)
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    Role,
    RunCost,
    TaskSpec,
)
from modelpool.pool.weights.patches.adapter_config import config_beside
from modelpool.pool.weights.quant.detect_layers import layers_in_file

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.remote_models import RemoteModels

WEIGHTS_SUFFIX = ".safetensors"

#: maximum number of cached needs of combinations of models and LoRAs; each LoRA strength adds some
USES_REMEMBERED = 4096
#: models that stay mapped and built, without weights; opening one again takes some hundred milliseconds
MODELS_KEPT = 64
#: files that have names and sizes remembered, some KiB each
FILES_REMEMBERED = 65_536
#: prior for a step per latent cell and byte of weights, seconds; the scheduler corrects it by measurements
_PRIOR_SECONDS_PER_CELL_BYTE = 1e-12
_PRIOR_SECONDS = 0.02
#: prior for a token that a text encoder writes, seconds per byte of its weights, all of which are read for it
_PRIOR_SECONDS_PER_BYTE = 1e-12


class Catalog:
    """The models and LoRAs of some folders. `pool.catalog.registry.weight_file_names` defines their names; a path, an
    alias and a hash are names too."""

    def __init__(
        self,
        model_folders: Sequence[Path],
        lora_folders: Sequence[Path],
        device: str | DeviceCapabilities,
        registry_folder: Path | None = None,
        uses_added: bool = False,
        allow_pickle: bool = False,
        assemblies: Sequence[Assembly] = (),
        remote: RemoteModels | None = None,
        device_is_known: bool = True,
    ) -> None:
        """`device` is what the models will run on, or the name of its kind if no more is known.

        registry_folder  folder of the hash database; None for the user's default
        uses_added       include the files that users added to the registry
        allow_pickle     allow reading PyTorch's pickles; otherwise they are listed with that as their problem
        assemblies       models of separate files that a configuration names
        remote           files of sources; they are described without fetching them
        device_is_known  whether all devices of the pool are of the kind of `device`; else only those of this machine
        """
        #: the files by name, with their hashes
        self.registry = open_registry(
            model_folders, lora_folders, registry_folder, uses_added, allow_pickle, assemblies, remote
        )
        self._allow_pickle = allow_pickle
        self._device = device
        #: whether the devices compute on the host, where nothing multiplies weights in blocks of a pass's scale
        self._on_host = device_is_known and capabilities_of(device).kind.computes_on_host
        #: the nodes of users that workflows may have, by name
        self.own_nodes: Mapping[str, OpenedNode] = NO_NODES
        self._opened: LruCache[str, OpenModel] = LruCache(MODELS_KEPT)
        #: what runs need besides weights
        kind = device if isinstance(device, str) else device.kind.value
        #: the ControlNets
        self.controls = ControlNetIndex(self.registry, device, self._open)
        #: the upscalers
        self.upscalers = UpscalerIndex(self.registry, device, allow_pickle)
        #: the textual inversions that prompts name
        self.embeddings = EmbeddingIndex(self.registry, allow_pickle)
        #: the image prompt adapters
        self.image_prompts = ImagePromptIndex(self.registry, device, self._open)
        #: the GLIGEN models
        self.gligens = GligenIndex(self.registry, device, self._open)
        self.figures = ActivationEstimator(
            *(self._open, kind, self.controls.opened),
            open_image_prompt=self.image_prompts.opened,
            open_gligen=self.gligens.opened,
        )
        self._uses: LruCache[tuple[object, ...], ComponentUse] = LruCache(USES_REMEMBERED)
        self._specs: LruCache[str, dict[Role, ComponentSpec]] = LruCache(FILES_REMEMBERED)
        self._refs: LruCache[str, ModelRef] = LruCache(FILES_REMEMBERED)
        #: component keys by content digest, named after the first model that had the component
        self._names: LruCache[str, ComponentKey] = LruCache(FILES_REMEMBERED)
        self._components: LruCache[str, tuple[tuple[Role, ComponentKey], ...]] = LruCache(FILES_REMEMBERED)

    @property
    def files_address(self) -> str:
        """The address at which other nodes get fetched files of this one; "" without sources."""
        return "" if self.registry.remote is None else self.registry.remote.files_address

    def models(self) -> tuple[ModelListing, ...]:
        """Return every checkpoint, by name."""
        return self.registry.models()

    def loras(self) -> tuple[LoraListing, ...]:
        """Return every LoRA, by name."""
        return self.registry.loras()

    def file_names(self) -> FileNames:
        """Return the names of ControlNets, upscalers, image prompt adapters and embeddings, and the nodes of users."""
        return replace(self.registry.file_names(), nodes=tuple(node.listing for node in self.own_nodes.values()))

    def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        """Return the files of tiny decoders, for previews, each with the name of the decoder (`LatentFormat.tiny`)."""
        return find_tiny_decoders([file.path for file in self.registry.scan().files], self._allow_pickle)

    def find_model(self, name: str, *, whole: bool = True) -> ModelRef:
        """Return the checkpoint named `name`. Hashes the file if it is new. Unless `whole`, the model is for saving,
        not for running (`pool.models.loading.incomplete_checkpoint`). Raises UnknownName, AmbiguousName, CorruptFile,
        or UnknownArchitecture for a diffusers folder, or separate files, that do not run.

        A copy of a file that was requested before gets the name of that file: its components must have the same keys
        everywhere.
        """
        file = self.registry.find_model(name)
        if file.form is FileForm.ASSEMBLED:
            expect_complete(self.registry, file.assembly or read_description(file.path), self._allow_pickle)
        if whole:
            check_runs(file, self._allow_pickle)  # before reading all of it
        path, files = self.registry.locate(file)
        ref = ModelRef(*self._found(file, path), assembly=file.assembly, files=files)
        name = self._refs.setdefault(ref.sha256, ref).name
        ref = replace(ref, name=name)  # the file may have been renamed since
        return replace(ref, components=self._component_keys(ref))

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        """Return the model that decodes the small latents of `model` to images: the one named `name`; without a name
        the one in its folder, or the only one. Raises UnusableField for an unsuitable model, for one that reads texts
        of another width, or if several would do; MissingParts if there is none; and as `find_model`."""
        families = self._open(model).checkpoint.family.sampling.decoders
        path = self.registry.described_path(model.path)
        found = self.find_model(name or choose_decoder(self.models(), model.name, path, families))
        if self._open(found).checkpoint.family.name not in families:
            raise unusable_field("decoder", name, f"a model of {' or '.join(decoder_titles(families))}")
        width, reads = self._pooled_width(model), self._pooled_width(found)
        if width != reads:
            expected = f"one that reads pooled texts of width {width}, as {model.path} does: {found.path} reads {reads}"
            raise unusable_field("decoder", found.name, expected)
        return found

    def find_lora(self, name: str, strength: float) -> LoraRef:
        """Return the LoRA named `name`. Raises UnknownName, AmbiguousName or CorruptFile."""
        file = self.registry.find_lora(name)
        path, files = self.registry.locate(file)
        self.registry.bring(files)  # matching its patches reads numbers all over the file
        found, place, sha256 = self._found(file, path)
        if (config := config_beside(file.path)) is not None:  # the strengths are part of the LoRA
            # as found: a link into a cache leads to a folder without the configuration
            place = str(file.path)
            sha256 = hashlib.sha256(sha256.encode() + config.read_bytes()).hexdigest()
        return LoraRef(found, place, sha256, strength, files=files)

    def components(self, model: ModelRef) -> dict[Role, ComponentSpec]:
        """Return the sizes of the model's components. Raises CorruptFile or UnknownArchitecture."""

        def find() -> dict[Role, ComponentSpec]:
            opened = self._open(model)
            return {role: with_fetch(opened.component(role).spec(), model.files) for role in opened.checkpoint.roles}

        return self._specs.get(model.sha256, find)

    def opened_components(self, model: ModelRef) -> tuple[Component, ...]:
        """Return the components of `model` as the engine opens them, without their weights."""
        opened = self._open(model)
        return tuple(opened.component(role) for role in opened.checkpoint.roles)

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        """Return the training size of the model, its sampling facts, and the size of its latent cells in pixels."""
        opened = self._open(model)
        checkpoint = opened.checkpoint
        size, facts, extent = native_size(checkpoint.family, checkpoint.header), checkpoint.family.sampling, None
        if facts.video is not None and (extent := opened.extent) is not None:
            size = extent[:2]
            facts = replace(facts, video=replace(facts.video, frames=extent[2]))
        if checkpoint.scales_inputs and not self._on_host:
            facts = replace(facts, scales_inputs=True)
        texts = text_states_of(checkpoint.family.text_set or checkpoint.family.name)
        return ModelDefaults(*size, facts, opened.latent.downscale, extent, opened.latent, texts)

    def batched_work(self, model: ModelRef) -> BatchedWork:
        """Return what the gain of batches depends on: facts of the files, and of the kind of the devices."""
        family = self._open(model).checkpoint.family
        specs = self.components(model)
        weight_bytes = specs[Role.DIFFUSION_MODEL].weight_bytes if Role.DIFFUSION_MODEL in specs else 0
        device = capabilities_of(self._device)
        device_bytes = None if device.kind.computes_on_host else device.total_bytes
        measured = measured_gains(family.name, device.kind.value)
        return BatchedWork(family.title, device.kind.value, weight_bytes, measured, device_bytes)

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """Return what a run of one component with `loras` needs. Raises AdapterMismatch for a LoRA of another
        architecture."""

        def find() -> ComponentUse:
            opened = self._open(model)
            use = opened.component(role).use(opened.patch_set(role, loras), passes)
            return replace(use, adapters=tuple(lora_key(lora) for lora in loras))

        return self._uses.get((model.sha256, role, loras, passes), find)

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        """Return the size of a LoRA as a component: its files, which are read completely. Raises CorruptFile if one is
        missing."""
        try:
            file_bytes = sum(Path(file).stat().st_size for file in files_of(lora.path))
        except OSError as error:
            raise CorruptFile(f"{lora.path}: cannot be read: {error}") from error
        return with_fetch(ComponentSpec(lora_key(lora), Role.LORA, file_bytes, file_bytes), lora.files)

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        """Whether a LoRA changes this component. Raises AdapterMismatch."""
        return self._open(model).touches(role, lora)

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        """Return a warning about a LoRA that is only partly used, with counts. Raises AdapterMismatch."""
        return self._open(model).lora_warning(lora)

    def reference_factor(self, lora: LoraRef) -> int:
        """Return how many times smaller than the video the guides of an IC-LoRA are along a side. Raises CorruptFile
        and UnsafeFile."""
        return reference_factor(lora.path, allow_pickle=self._allow_pickle)

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        """Return the tokens of the text of `work`, and how many of them the diffusion model reads, with images. Raises
        UnusableField as `parse_weights` and `check_skipped_layers` do, and TokenizerMissing."""
        check_skipped_layers(self._open(work.model), work)
        return self.figures.tokenize(work)

    def text_tokens(self, model: ModelRef, text: str, seen: tuple[tuple[int, int], ...] = ()) -> int:
        """Return the number of tokens of `text` as the diffusion model of `model` reads it. Raises as `tokenize`."""
        return self.tokenize(EncodeParams(model, (), text, embeddings=self.embeddings.of(text), seen=seen)).length

    def execution_modes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        """Return `work` undivided, then the execution modes that divide it, the least divided first; each with its
        estimated activation bytes, corrected by measurements. Raises UnusableField for options of `work` that name
        layers which the model lacks, and for noise levels outside of the model's."""
        if isinstance(work, SampleParams):
            opened = self._open(model)
            facts = opened.checkpoint.family.sampling
            if may_exceed_model(work.schedule):
                levels_of(work.schedule, table_of(facts, work))
            if not work.options.is_empty:
                check_fits(work.options, opened.component(role_of(work)).built.module, facts.model)
        return self.figures.execution_modes(model, work, context_tokens)

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """Record the `cost` of a successful run of `task`, to correct later estimates."""
        self.figures.learn(task, cost)

    def run_seconds(self, model: ModelRef, work: ModelStageParams) -> float:
        """Return a first estimate of the run time of `work` with everything resident; accurate to an order of
        magnitude."""
        spec = self.components(model)[role_of(work)]
        if isinstance(work, EncodeParams) and work.writes is not None:
            weight_bytes = sum(
                each.weight_bytes for role, each in self.components(model).items() if role.is_text_encoder
            )
            tokens = tokens_written(work.writes, len(work.seen))
            return _PRIOR_SECONDS + tokens * weight_bytes * _PRIOR_SECONDS_PER_BYTE
        if isinstance(work, EncodeParams | VisionEncodeParams):
            return _PRIOR_SECONDS
        latent = self._open(model).latent
        passes = work.predictions if isinstance(work, SampleParams) else 16
        if isinstance(work, EncodeImageParams):
            shape = latent_shape(work.width, work.height, work.frames, latent.of_encoder, work.seconds)
        else:
            shape = sampled_shape(work, latent)
        cells = math.prod(shape[1:])
        if isinstance(work, DecodeParams) and work.is_tiled:
            cells = cells_computed(work, latent) // max(1, work.parts)
        if isinstance(work, EncodeImageParams) and work.sound:
            cells = work.sound
        if isinstance(work, DecodeParams) and work.track == SOUND:
            cells = sound_length_of(work.shape, latent)
        return _PRIOR_SECONDS + passes * cells * spec.weight_bytes * _PRIOR_SECONDS_PER_CELL_BYTE

    def _component_keys(self, model: ModelRef) -> tuple[tuple[Role, ComponentKey], ...]:
        """Return the keys of the components of `model`. Components equal to one of a model requested before share its
        key, whatever files they are in. Empty for a model that does not run, which is reported when it is run."""

        def find() -> tuple[tuple[Role, ComponentKey], ...]:
            try:
                header = read_weights_header(self._at_hand(model).source, allow_pickle=self._allow_pickle)
                family = refine_family(detect(header), header)
                digests = component_digests(family, header, layers_in_file(header), self.registry.digests)
            except UserError:
                digests = {}
            return tuple(
                (role, self._names.setdefault(digest, component_key(model.name, role, digest)))
                for role, digest in digests.items()
            )

        return self._components.get(model.sha256, find)

    def _pooled_width(self, model: ModelRef) -> int | None:
        checkpoint = self._open(model).checkpoint
        return pooled_width(checkpoint.family.bare_shapes_of(Role.DIFFUSION_MODEL, checkpoint.shapes))

    def _found(self, file: WeightsFile, path: str) -> tuple[str, str, str]:
        """Return the name, path and hash of a file for a reference; `path` is that on the nodes."""
        return name_of_file(file.path), path, self.registry.hashes(file).sha256

    def _at_hand(self, model: ModelRef) -> ModelRef:
        """Return the model as it can be described here: its outline, if it is of a source."""
        path = self.registry.described_path(model.path)
        return model if path == model.path else replace(model, path=path)

    def _open(self, model: ModelRef) -> OpenModel:
        return self._opened.get(model.sha256, lambda: OpenModel(self._at_hand(model), self._device))
