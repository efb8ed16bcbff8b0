"""Which files work is done with: models, LoRAs, ControlNets, textual inversions, by name, place and content.

Values only; torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from modelpool.pool.core.assembly import Assembly, Source
from modelpool.pool.specs.spec import ComponentKey, Role


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A checkpoint. `sha256` is of the whole file, or of all that it is made of, in hexadecimal; it, not the path, is
    the identity.

    components  what its components are called; models that have equal weights somewhere call them alike. Empty calls
                them by the model
    assembly    the files that it is made of, where a configuration says it; None where `path` does
    """

    name: str
    path: str
    sha256: str
    components: tuple[tuple[Role, ComponentKey], ...] = field(default=(), compare=False)
    assembly: Assembly | None = None

    @property
    def source(self) -> Source:
        """Where its weights are."""
        return self.assembly or self.path


@dataclass(frozen=True, slots=True)
class LoraRef:
    """A LoRA file and how strongly it is applied.

    noise  "high" or "low": of the two models of a pair (`pool.families.expert_pairs`) it changes that one alone
    """

    name: str
    path: str
    sha256: str
    strength: float
    noise: str = ""


class HoleTold(StrEnum):
    """How a ControlNet is told which part of an image is to be made anew."""

    #: its image has a hole there, and it was made for nothing else
    ALWAYS = "always"
    #: its image has a hole there where a mask is given, and none, or one already, where none is
    MASKED = "masked"
    #: where a mask is given, beside its own image that which a request starts from, with a hole
    BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class ControlRef:
    """A ControlNet file, and how it is used: how strongly, and from which share of the steps to which.

    mode          of one that has several, the number of that which is meant
    reads_latent  it reads the latent of its image, and not its pixels
    bright        that latent is of an image as `pool.core.stage_params.EncodeImageWork` has it
    said          what the configuration in its folder says otherwise than its shapes tell, by name
    hole          in work, how it is told of a hole; of one that was found by name, how it can be. None is not at all
    """

    name: str
    path: str
    sha256: str
    strength: float
    start: float
    end: float
    mode: int | None = None
    reads_latent: bool = False
    bright: bool = False
    said: tuple[tuple[str, bool], ...] = ()
    hole: HoleTold | None = None

    @property
    def content(self) -> tuple[str, tuple[tuple[str, bool], ...]]:
        """What is the same of all that are one module, however they are used."""
        return self.sha256, self.said


@dataclass(frozen=True, slots=True)
class EmbeddingRef:
    """A textual inversion that a prompt names, and how many tokens it takes the place of."""

    name: str
    path: str
    sha256: str
    rows: int
