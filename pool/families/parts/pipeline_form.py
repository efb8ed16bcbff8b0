"""Types that describe a pipeline of diffusers as `pool.models.saving` writes it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelpool.pool.files.formats.folder_header import WRITER_FOLDER
from modelpool.pool.values.specs.spec import Role

INDEX_FILE = "model_index.json"
#: the folder of a processor: a tokenizer, with what prepares images
PROCESSOR = "processor"
#: entry of a pipeline's index for a missing component
NOTHING = (None, None)


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """A scheduler or guider of diffusers: its class, and its arguments for the model."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline of diffusers.

    name     its class
    folders  the folder of each component
    entries  other entries of its index: missing parts, and settings
    noisy    the folder of the scheduler that adds noise to the model's input image; empty for none
    processor  the folder of the image processor of the vision encoder; empty for none
    libraries  subpackages of diffusers that have the classes of components, by folder
    guiders  by folder, if the pipeline has guiders as components
    missing  components that it reads and no checkpoint has: by folder, what to provide
    """

    name: str
    folders: Mapping[Role, str]
    entries: Mapping[str, Any] = field(default_factory=dict)
    noisy: str = ""
    processor: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)
    guiders: Mapping[str, SchedulerFacts] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def tokenizer_folder(self, role: Role) -> str:
        """Return the folder of the tokenizer of the text encoder `role`; of the processor that has it for one that
        writes tokens of images."""
        folder = self.folders.get(role, role.value)
        return PROCESSOR if folder == WRITER_FOLDER else folder.replace("text_encoder", "tokenizer")
