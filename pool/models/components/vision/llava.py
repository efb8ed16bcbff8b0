"""LLaVA's vision part: CLIP's vision encoder and a projection to states that are inserted among the text tokens.

Built from the tensors of its file, from shapes alone; nothing is copied. Files hold it alone ("vision_model.",
"multi_modal_projector."), folders together with the language part ("vision_tower.").

Facts that shapes do not tell, from config.json of xtuner/llava-llama-3-8b-v1_1-transformers: CLIP L of 336 pixels, with
16 heads and quick GELU; patch states of the penultimate layer, without the class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.vision.build_vision_encoder import (
    Config,
    measured_vision,
    with_places,
    without_weights,
)
from modelpool.pool.models.components.vision.vision_encoder_names import convert_vision
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

ACTIVATION = "quick_gelu"
#: key prefix of the projection, which a plain vision encoder lacks, and a prefix that folders add
PROJECTOR, TOWER_LEVEL = "multi_modal_projector.", "vision_tower."
_TOWER = "tower."


class ImageWords(nn.Module):
    """Converts images to token states: [B, C, H, W] in, [B, L, D] out."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.tower = CLIPVisionModel(CLIPVisionConfig(**config))
        self.linear_1 = nn.Linear(config["hidden_size"], width)
        self.linear_2 = nn.Linear(width, width)

    @property
    def config(self) -> Any:
        """The configuration of the vision encoder."""
        return self.tower.config

    @property
    def width(self) -> int:
        """Width of its states."""
        return self.linear_2.out_features

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the states of each image, one per patch."""
        seen: Any = self.tower(pixel_values=pixel_values, output_hidden_states=True)
        states_BLD: Tensor = self.linear_2(functional.gelu(self.linear_1(seen.hidden_states[-2][:, 1:])))
        return states_BLD


@dataclass(frozen=True, slots=True)
class ImageWordsPlan(ModulePlan):
    """The plan for building it from its file.

    config   the arguments of the vision encoder's configuration
    width    of its states
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    config: Config
    width: int
    key_map: KeyMap

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        with without_weights("CLIP"):
            module: nn.Module = ImageWords(self.config, self.width)
        key_map = fitted(self.key_map, module, "it is not a LLaVA vision encoder:")
        return with_places(module), key_map


def plan_image_words(shapes: Mapping[str, Shape], prefix: str = "") -> ImageWordsPlan:
    """Plan LLaVA's vision part from `shapes`, all of which belong to it; most keys begin with `prefix`.

    Raises UnknownArchitecture if it is not one of LLaVA's.
    """
    own = {key: tuple(shape) for key, shape in shapes.items()}
    try:
        key_map = discover(own, lambda tensors: _converted(tensors, prefix))
        config = measured_vision({key.removeprefix(_TOWER): x for key, x in key_map.shapes.items()})
        width = key_map.shapes["linear_2.weight"][0]
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"vision encoder: its tensors are not those of a LLaVA: {error!r}") from error
    return ImageWordsPlan({**config, "hidden_act": ACTIVATION}, width, key_map)


def _converted(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    projector = {key.partition(PROJECTOR)[2]: tensor for key, tensor in tensors.items() if PROJECTOR in key}
    tower = {
        key.removeprefix(prefix).removeprefix(TOWER_LEVEL): tensor
        for key, tensor in tensors.items()
        if PROJECTOR not in key
    }
    return {**{_TOWER + name: tensor for name, tensor in convert_vision(tower).items()}, **projector}
