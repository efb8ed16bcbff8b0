"""What cutting asks about models, as protocols: the catalog of files answers, tests have catalogs of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from modelpool.pool.core.sampling_facts import MadeFor
from modelpool.pool.core.stage_params import ControlRef, EmbeddingRef, LoraRef, ModelRef, Work
from modelpool.pool.specs.spec import ComponentSpec, ComponentUse, Division, Role


class Controls(Protocol):
    """What cutting asks about ControlNets; `pool.catalog.controlnet_index.ControlShelf` answers. All may raise
    UserError."""

    def find(self, name: str, strength: float, start: float, end: float, mode: str | int | None = None) -> ControlRef:
        """The one called `name`, to be used so strongly, from that share of the steps to that, in this mode."""

    def beside(self, model: ModelRef, control: ControlRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        """Its size, and what a run beside `model` needs of it."""


class Embeddings(Protocol):
    """The textual inversions of a catalog."""

    def of(self, text: str) -> tuple[EmbeddingRef, ...]:
        """Those that a prompt names."""


class Catalog(Protocol):
    """What cutting asks about models; `pool.catalog.catalog.Catalog` answers from files. All may raise UserError."""

    def find_model(self, name: str) -> ModelRef:
        """The checkpoint called `name`."""

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        """The model that makes images of what `model` makes: the one called `name`, else the one that is there."""

    def find_lora(self, name: str, strength: float) -> LoraRef:
        """The LoRA called `name`."""

    def components(self, model: ModelRef) -> Mapping[Role, ComponentSpec]:
        """The sizes of the model's components."""

    def made_for(self, model: ModelRef) -> MadeFor:
        """The size that the model was trained for, and how it is sampled."""

    @property
    def embeddings(self) -> Embeddings:
        """The textual inversions."""

    @property
    def controls(self) -> Controls:
        """The ControlNets."""

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """What a run of one component needs."""

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        """The size of a LoRA, as a component of its own."""

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        """What to tell of a LoRA that is used in part only, with counts; None when all of it is used."""

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        """Whether the LoRA changes this component."""

    def text_tokens(
        self, model: ModelRef, text: str, seen: tuple[tuple[int, int], ...] = (), numbered: bool = False
    ) -> int:
        """Tokens of `text` as a diffusion model reads it, with images as `EncodeWork` has them."""

    def ways(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> tuple[Division, ...]:
        """The ways to do it, the undivided one first, each needing less than the one before: device memory beside
        weights and scratch, as it was counted and as what runs took corrected it. Sampling reads texts of
        `context_tokens`."""

    def run_seconds(self, model: ModelRef, work: Work) -> float:
        """A first guess."""
