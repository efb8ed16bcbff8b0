"""What is said of a pipeline of diffusers in its folder, as values: the form of the rows of the tables beside it.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelpool.pool.specs.spec import Role

INDEX_FILE = "model_index.json"
#: what an index has in place of a component that is not there
NOTHING = (None, None)


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """A scheduler of diffusers, or what guides beside one: its class, and the arguments that say what a model was
    trained with."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline of diffusers.

    name     its class
    folders  the folder of each component
    entries  what else its index says: parts that are not there, and settings
    noisy    the folder of the scheduler by which noise is put on the image that a model is shown; empty for none
    processor  the folder of what brings images into the form that the vision encoder is shown; empty for none
    libraries  of components that are of a part of diffusers, by folder
    guiders  what guides, by folder, where the pipeline has that as components
    missing  components that it reads and no checkpoint has: by folder, what to give it
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
        """The folder of the tokenizer of the text encoder `role`."""
        return self.folders[role].replace("text_encoder", "tokenizer")
