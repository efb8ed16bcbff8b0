"""Stable Audio's model that embeds start and length of an audio clip, in seconds.

Knows the names in the file and the class of diffusers. The diffusion model reads the embedding as "seconds".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import Arguments
from modelpool.pool.files.formats.folder_header import DURATION_FOLDER, PROJECTION
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

#: its key prefix in the file
PREFIX = "conditioner.conditioners."
#: the same in a diffusers folder
FOLDER_PREFIX = f"{PROJECTION}."
#: maximum of clamped seconds. Source: the model_config.json of stabilityai/stable-audio-open-1.0
MOST_SECONDS = 512
_NAMES = (
    ("seconds_start.", "start_number_conditioner."),
    ("seconds_total.", "end_number_conditioner."),
)


_DURATION_NAMES = (f"{PREFIX}seconds_total.embedder.embedding.1.", f"{DURATION_FOLDER}.linear.")
_DurationEmbedder: Any = of_library(
    "diffusers.pipelines.stable_audio_3.modeling_stable_audio_3", "StableAudio3DurationEmbedder"
)


class StableAudio3DurationEmbedder(_DurationEmbedder):  # type: ignore[misc]
    """diffusers' class, with a computed table of frequencies, as published files have none."""

    def __init__(self, output_dim: int = 768, fourier_dim: int = 256) -> None:
        super().__init__(output_dim, fourier_dim)
        frequencies = self.freqs
        del self.freqs
        self.register_buffer("freqs", frequencies, persistent=False)


@dataclass(frozen=True, slots=True)
class SecondsPlan(ModulePlan):
    """The plan for building the model.

    model    its class
    config   the arguments of its class
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    model: type[nn.Module]
    config: Arguments
    key_map: KeyMap

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        module = empty_module(self.model, self.config)
        return module, fitted(self.key_map, module, "recognised as Stable Audio's seconds, but")


def plan_seconds(shapes: Mapping[str, Shape]) -> SecondsPlan:
    """Plan the model among `shapes`, with the keys of the single file or of a folder's file.

    Raises UnknownArchitecture if there is none.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if _name_of(key) is not None}
    key_map = discover(own, converted_seconds)
    first = key_map.shapes.get("start_number_conditioner.time_positional_embedding.1.weight")
    if first is None or len(first) != 2:
        raise UnknownArchitecture(
            f"Stable Audio: found {counted(len(own), 'tensor')} under {PREFIX!r}, expected those that embed seconds"
        )
    projection = key_map.shapes.get("text_projection.weight")
    config: Arguments = {
        "text_encoder_dim": projection[1] if projection else first[0],
        "conditioning_dim": first[0],
        "min_value": 0,
        "max_value": MOST_SECONDS,
    }
    return SecondsPlan(StableAudioProjectionModel, config, key_map)


def plan_duration(shapes: Mapping[str, Shape]) -> SecondsPlan:
    """Plan the same of Stable Audio 3. Raises UnknownArchitecture if there is none."""
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(_DURATION_NAMES)}
    key_map = discover(own, converted_duration)
    weight = key_map.shapes.get("linear.weight")
    if weight is None or len(weight) != 2:
        raise UnknownArchitecture(
            f"Stable Audio 3: found {counted(len(own), 'tensor')} under {PREFIX!r}, expected those that embed seconds"
        )
    return SecondsPlan(StableAudio3DurationEmbedder, {"output_dim": weight[0], "fourier_dim": weight[1]}, key_map)


def converted_duration(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of Stable Audio 3's model from `tensors`, keys as in the file; others are dropped."""
    return {
        f"linear.{key.removeprefix(start)}": tensor
        for key, tensor in tensors.items()
        for start in _DURATION_NAMES
        if key.startswith(start)
    }


def converted_seconds(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's parameters from `tensors`, keys as in the file; other tensors are dropped."""
    named = {_name_of(key): tensor for key, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def _name_of(key: str) -> str | None:
    """Return the parameter of `key`; None if it belongs to something else."""
    key = key.removeprefix(FOLDER_PREFIX)
    bare = key.removeprefix(PREFIX)
    for theirs, ours in _NAMES:
        if bare.startswith(theirs):
            return ours + bare.removeprefix(theirs).replace("embedder.embedding.", "time_positional_embedding.")
        if key.startswith(ours):
            return key
    return key if key.startswith("text_projection.") else None
