"""What was found out about a file or folder of weights, as values. Torch-free.

`Contents` goes in: what headers say. `FileFacts` and `FolderFacts` come out. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.formats.safetensors_file import Shape


@dataclass(frozen=True, slots=True)
class Stored:
    """How one tensor is stored.

    kind           its type as safetensors calls it, "F16", or its format where it is quantized, "nvfp4"
    storage_bytes  bytes in the file, those of scales beside it included
    """

    kind: str
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of one file, quantization undone.

    shapes    by key, as the file has it
    stored    by key; empty where only shapes are known
    metadata  free text pairs of the file's header
    """

    shapes: Mapping[str, Shape]
    stored: Mapping[str, Stored] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


class Kind(Enum):
    """What a part of a model, or a file that is none, is for."""

    DIFFUSION_MODEL = "diffusion model"
    TEXT_ENCODER = "text encoder"
    VAE = "VAE"
    VISION_ENCODER = "vision encoder"
    VOCODER = "vocoder"
    CHECKPOINT = "checkpoint"
    PARTS = "parts of a checkpoint"
    LORA = "LoRA"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ComponentFacts:
    """One set of weights that is loaded as a whole.

    name           of its family, short and stable; empty when it is not known
    title          for human readers
    prefix         what its keys begin with in the file, or its folder
    naming         whose names its tensors have; empty where that is not known
    tensors        how many
    parameters     numbers in them
    storage_bytes  bytes in the file; 0 where only shapes are known
    dtypes         those bytes by type or format, most first
    config         sizes that follow from its shapes, and other facts
    latent         name of its latents, for diffusion models
    comfyui        the class that ComfyUI knows it as, for diffusion models
    runs           the class of our dependencies that has its architecture, for diffusion models; empty where none has
    """

    kind: Kind
    name: str
    title: str
    prefix: str
    naming: str
    tensors: int
    parameters: int
    storage_bytes: int
    dtypes: Mapping[str, int]
    config: Config
    latent: str = ""
    comfyui: str = ""
    runs: str = ""

    @property
    def dtype(self) -> str:
        """The type or format of most of its bytes; empty where only shapes are known."""
        return next(iter(self.dtypes), "")


@dataclass(frozen=True, slots=True)
class PredictionHint:
    """What the numbers that a diffusion model gives mean, as far as a file says.

    kind    "v", "epsilon", "edm", "edm-v", "flow" or what a maker of files wrote
    source  which tensor or entry says so
    """

    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file of weights.

    title          of its diffusion model, or of what it is instead
    components     those that are inside, the diffusion model first
    other_tensors  tensors that belong to none
    other_bytes    bytes of those
    prediction     hints, the surest first; none for most files
    """

    kind: Kind
    title: str
    components: tuple[ComponentFacts, ...]
    other_tensors: int
    other_bytes: int
    prediction: tuple[PredictionHint, ...]
    metadata: Mapping[str, str]

    @property
    def diffusion(self) -> ComponentFacts | None:
        """The diffusion model, where there is one."""
        return next((c for c in self.components if c.kind is Kind.DIFFUSION_MODEL), None)


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder of weights, as diffusers writes them, or of loose files.

    pipeline    the class that its model_index.json names; empty for none
    components  by subfolder, with their classes; empty for a folder of loose files
    other       parts without weights and their classes, "scheduler" -> "DDIMScheduler"
    files       what each loose file is, by name; empty for a folder of components
    """

    pipeline: str
    title: str
    components: Mapping[str, ComponentFacts]
    other: Mapping[str, str]
    files: Mapping[str, FileFacts | str]
    prediction: tuple[PredictionHint, ...]
