"""Facts about a file or folder of weights, as values. Torch-free.

`Contents` is the input: facts from headers. `FileFacts` and `FolderFacts` are the output. Nothing here
decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.files.formats.safetensors_file import Shape


@dataclass(frozen=True, slots=True)
class Stored:
    """The storage format and size of one tensor.

    kind           its type in safetensors' notation, "F16", or its quantization format, "nvfp4"
    storage_bytes  bytes in the file, including its scales
    """

    kind: str
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of one file, dequantized.

    shapes    by key, as in the file
    stored    by key; empty if only shapes are known
    metadata  text pairs of the file's header
    """

    shapes: Mapping[str, Shape]
    stored: Mapping[str, Stored] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


class Kind(Enum):
    """Role of a part of a model, or of a complete file."""

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
    """One set of weights that is loaded as a unit.

    name           of its family, short and stable; empty if unknown
    title          for human readers
    prefix         its key prefix in the file, or its folder
    naming         naming of its keys; empty if unknown
    tensors        number of tensors
    parameters     number of values
    storage_bytes  bytes in the file; 0 if only shapes are known
    dtypes         those bytes by type or format, largest first
    config         sizes inferred from shapes, and other facts
    latent         name of its latents, for diffusion models
    comfyui        its class in ComfyUI, for diffusion models
    runs           class of our dependencies with its architecture, for diffusion models; empty if none
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
        """The type or format of most of its bytes; empty if only shapes are known."""
        return next(iter(self.dtypes), "")


@dataclass(frozen=True, slots=True)
class PredictionHint:
    """Meaning of a diffusion model's output, as stated by a file.

    kind    "v", "epsilon", "edm", "edm-v", "flow" or other text from the file
    source  the tensor or entry that states it
    """

    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file of weights.

    title          of its diffusion model, or of its other content
    components     its components, the diffusion model first
    other_tensors  number of tensors outside of components
    other_bytes    bytes of those
    prediction     hints, the most reliable first; none for most files
    runs           whether this version uses files of this kind, for files that are no model
    """

    kind: Kind
    title: str
    components: tuple[ComponentFacts, ...]
    other_tensors: int
    other_bytes: int
    prediction: tuple[PredictionHint, ...]
    metadata: Mapping[str, str]
    runs: bool = True

    @property
    def diffusion(self) -> ComponentFacts | None:
        """The diffusion model, if there is one."""
        return next((c for c in self.components if c.kind is Kind.DIFFUSION_MODEL), None)


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder of weights, in diffusers' layout or of loose files.

    pipeline    class in its model_index.json; empty for none
    components  by subfolder, with their classes; empty for a folder of loose files
    other       parts without weights and their classes, "scheduler" -> "DDIMScheduler"
    files       facts or errors of loose files, by name; empty for a folder of components
    """

    pipeline: str
    title: str
    components: Mapping[str, ComponentFacts]
    other: Mapping[str, str]
    files: Mapping[str, FileFacts | str]
    prediction: tuple[PredictionHint, ...]
