"""Protocols of the catalog that building a task graph needs; `pool.catalog` implements them from files, tests fake
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from modelpool.pool.inference.operations.own_nodes import OpenedNode
from modelpool.pool.values.core.batch_gains import BatchedWork
from modelpool.pool.values.core.prompt_tokens import TokenizedPrompt
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    EmbeddingRef,
    EncodeParams,
    FoundImagePrompt,
    GligenRef,
    ImagePromptRef,
    LoraRef,
    ModelRef,
    ModelStageParams,
    UpscaleParams,
    UpscalerRef,
)
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, ExecutionMode, Role


class ControlNetCatalog(Protocol):
    """The ControlNets of a catalog; `pool.catalog.controlnet_index.ControlNetIndex` implements it. All methods may
    raise UserError."""

    def find(self, name: str, strength: float, start: float, end: float, mode: str | int | None = None) -> ControlRef:
        """Return the ControlNet called `name`, with its strength, its part of the schedule, and its mode."""

    def use_with(self, model: ModelRef, control: ControlRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        """Return its size, and what a run with `model` needs of it."""


class UpscalerCatalog(Protocol):
    """The upscalers of a catalog; `pool.catalog.upscaler_index.UpscalerIndex` implements it. All methods may raise
    UserError."""

    def find(self, name: str) -> UpscalerRef:
        """Return the upscaler called `name`."""

    def needs(self, work: UpscaleParams) -> tuple[ComponentSpec, ComponentUse]:
        """Return the size of the upscaler, and what a run needs of it."""

    def execution_modes(self, work: UpscaleParams) -> tuple[ExecutionMode, ...]:
        """Return the execution modes of `work`, the full one first, each needing less than the one before."""

    def run_seconds(self, work: UpscaleParams) -> float:
        """Return an initial estimate of the run time."""


class ImagePromptCatalog(Protocol):
    """The image prompt adapters of a catalog; `pool.catalog.image_prompt_index.ImagePromptIndex` implements it. All
    methods may raise UserError."""

    def find(self, name: str, images: int, encoder: str = "") -> FoundImagePrompt:
        """Return the adapter called `name` for so many images, and its vision encoder: the one called `encoder`, else
        the only one that fits."""

    def encoder_for(self, model: ModelRef, encoder: str = "") -> ModelRef:
        """Return the vision encoder of the embeddings that `model` reads by itself: the one called `encoder`, else its
        own, or the only one that fits."""

    def use_with(self, model: ModelRef, prompt: ImagePromptRef) -> tuple[ComponentSpec, ComponentUse]:
        """Return its size, and what a run with `model` needs of it."""


class GligenCatalog(Protocol):
    """The GLIGEN models of a catalog; `pool.catalog.gligen_index.GligenIndex` implements it. All methods may raise
    UserError."""

    def find(self, name: str) -> GligenRef:
        """Return the GLIGEN model called `name`, without boxes."""

    def use_with(self, model: ModelRef, gligen: GligenRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        """Return its size, and what a run of `passes` steps with `model` needs of it."""


class EmbeddingCatalog(Protocol):
    """The textual inversions of a catalog."""

    def of(self, text: str, loras: Sequence[LoraRef] = ()) -> tuple[EmbeddingRef, ...]:
        """Return the textual inversions that a prompt names; those that the files of `loras` bundle come first."""


class GraphCatalog(Protocol):
    """The models of a catalog; `pool.catalog.catalog.GraphCatalog` implements it from files. All methods may raise
    UserError."""

    def find_model(self, name: str) -> ModelRef:
        """Return the checkpoint called `name`."""

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        """Return the decoder of the two-stage model `model`: the one called `name`, else the only one."""

    def find_lora(self, name: str, strength: float) -> LoraRef:
        """Return the LoRA called `name`."""

    def components(self, model: ModelRef) -> Mapping[Role, ComponentSpec]:
        """Return the sizes of the model's components."""

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        """Return the model's default size, and how it is sampled."""

    def batched_work(self, model: ModelRef) -> BatchedWork:
        """Return the facts that the gain of batches of the model depends on, and its measurements."""

    @property
    def embeddings(self) -> EmbeddingCatalog:
        """The textual inversions."""

    @property
    def controls(self) -> ControlNetCatalog:
        """The ControlNets."""

    @property
    def upscalers(self) -> UpscalerCatalog:
        """The upscalers."""

    @property
    def own_nodes(self) -> Mapping[str, OpenedNode]:
        """The nodes of users that workflows may have, by name."""

    @property
    def image_prompts(self) -> ImagePromptCatalog:
        """The image prompt adapters."""

    @property
    def gligens(self) -> GligenCatalog:
        """The GLIGEN models."""

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """Return what a run needs of one component."""

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        """Return the size of a LoRA, as a component."""

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        """Return a warning, with counts, for a LoRA that is applied only partly; None if it is applied completely."""

    def reference_factor(self, lora: LoraRef) -> int:
        """Return how many times smaller than the video the guides of an IC-LoRA are along a side."""

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        """Return whether the LoRA changes this component."""

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        """Return the tokens of the text of `work`, and how many of them the diffusion model reads, with images."""

    def execution_modes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        """Return the execution modes of `work`, the full one first, each needing less than the one before: device
        memory in addition to weights and scratch, as calculated and as corrected by measurements. Sampling reads texts
        of `context_tokens`."""

    def run_seconds(self, model: ModelRef, work: ModelStageParams) -> float:
        """Return an initial estimate of the run time."""
