"""`CachedCatalog`: a catalog for building task graphs that remembers its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelpool.actors.graph.common.graph_catalog import (
    ControlNetCatalog,
    EmbeddingCatalog,
    GligenCatalog,
    GraphCatalog,
    ImagePromptCatalog,
    UpscalerCatalog,
)
from modelpool.pool.inference.operations.own_nodes import OpenedNode
from modelpool.pool.values.core.batch_gains import BatchedWork
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.prompt_tokens import TokenizedPrompt
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import EncodeParams, LoraRef, ModelRef, ModelStageParams
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, ExecutionMode, Role

#: cached answers about combinations of models and LoRAs; each LoRA strength adds new ones
CACHE_ENTRIES = 4096


class CachedCatalog:
    """A catalog that caches its answers, all of which except names depend only on the content of files."""

    def __init__(self, catalog: GraphCatalog) -> None:
        self._catalog = catalog
        self._models: LruCache[str, ModelRef] = LruCache(CACHE_ENTRIES)
        self._decoders: LruCache[tuple[ModelRef, str], ModelRef] = LruCache(CACHE_ENTRIES)
        self._loras: LruCache[tuple[str, float], LoraRef] = LruCache(CACHE_ENTRIES)
        self._components: LruCache[ModelRef, Mapping[Role, ComponentSpec]] = LruCache(CACHE_ENTRIES)
        self._lora_specs: LruCache[LoraRef, ComponentSpec] = LruCache(CACHE_ENTRIES)
        self._model_defaults: LruCache[ModelRef, ModelDefaults] = LruCache(CACHE_ENTRIES)
        self._batched: LruCache[ModelRef, BatchedWork] = LruCache(CACHE_ENTRIES)
        self._uses: LruCache[tuple[ModelRef, Role, tuple[LoraRef, ...], int], ComponentUse] = LruCache(CACHE_ENTRIES)
        self._touches: LruCache[tuple[ModelRef, Role, LoraRef], bool] = LruCache(CACHE_ENTRIES)

    def forget_names(self) -> None:
        """Forget cached names, as files may have been added or removed."""
        self._models.clear()
        self._decoders.clear()
        self._loras.clear()

    def find_model(self, name: str) -> ModelRef:
        return self._models.get(name, lambda: self._catalog.find_model(name))

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        # by model and not by content: stage B is searched in the model's folder first
        return self._decoders.get((model, name), lambda: self._catalog.find_decoder(model, name))

    def find_lora(self, name: str, strength: float) -> LoraRef:
        return self._loras.get((name, strength), lambda: self._catalog.find_lora(name, strength))

    def components(self, model: ModelRef) -> Mapping[Role, ComponentSpec]:
        return self._components.get(model, lambda: self._catalog.components(model))

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        return self._model_defaults.get(model, lambda: self._catalog.model_defaults(model))

    def batched_work(self, model: ModelRef) -> BatchedWork:
        return self._batched.get(model, lambda: self._catalog.batched_work(model))

    @property
    def embeddings(self) -> EmbeddingCatalog:
        return self._catalog.embeddings

    @property
    def controls(self) -> ControlNetCatalog:
        return self._catalog.controls

    @property
    def own_nodes(self) -> Mapping[str, OpenedNode]:
        return self._catalog.own_nodes

    @property
    def upscalers(self) -> UpscalerCatalog:
        return self._catalog.upscalers

    @property
    def image_prompts(self) -> ImagePromptCatalog:
        return self._catalog.image_prompts

    @property
    def gligens(self) -> GligenCatalog:
        return self._catalog.gligens

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """Return the cached answer of `Catalog.use`."""
        key = (model, role, loras, passes)
        return self._uses.get(key, lambda: self._catalog.use(model, role, loras, passes))

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        return self._lora_specs.get(lora, lambda: self._catalog.lora_spec(lora))

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        return self._touches.get((model, role, lora), lambda: self._catalog.touches(model, role, lora))

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        return self._catalog.lora_warning(model, lora)

    def reference_factor(self, lora: LoraRef) -> int:
        return self._catalog.reference_factor(lora)

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        return self._catalog.tokenize(work)

    def execution_modes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        return self._catalog.execution_modes(model, work, context_tokens)

    def run_seconds(self, model: ModelRef, work: ModelStageParams) -> float:
        return self._catalog.run_seconds(model, work)
