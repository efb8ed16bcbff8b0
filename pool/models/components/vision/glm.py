"""The part of GLM-Image's language model that reads images: build it from the tensors of its file, preprocess images,
turn them into tokens.

An image is read at half its width and height, in patches of 16 pixels, so that a token stands for 32 x 32 pixels. Knows
neither the language part nor files.

Shape legend: N patches, which are tokens, P values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glm_image.configuration_glm_image import GlmImageVisionConfig, GlmImageVQVAEConfig
from transformers.models.glm_image.modeling_glm_image import GlmImageVisionModel, GlmImageVQVAE

from modelpool.pool.families.detection.glm_layout import CHANNELS, VISION, Config, glm_vision_config
from modelpool.pool.families.parts.written_image import LEAST_SIDE, MOST_SIDE
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.library_names import image_processor, of_library
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.vision.build_vision_encoder import without_weights
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.results import PixelArray
from modelpool.pool.values.core.written_tokens import TOKEN_SIDE
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

get_vision_position_ids: Any = of_library("transformers.vision_utils", "get_vision_position_ids")
#: pixels along a side of a patch, of the image at half its size
_PATCH = TOKEN_SIDE // 2


class GlmImageVision(nn.Module):
    """A vision model, and the codes of which the nearest ones to its states are the tokens of an image."""

    def __init__(self, vision: Config, codes: Config) -> None:
        super().__init__()
        self.visual = GlmImageVisionModel(GlmImageVisionConfig(**vision))
        self.vqmodel = GlmImageVQVAE(GlmImageVQVAEConfig(**codes))

    @property
    def config(self) -> Any:
        """The configuration of the vision model."""
        return self.visual.config


@dataclass(frozen=True, slots=True)
class GlmVisionPlan(ModulePlan):
    """The plan for building it from its file.

    vision, codes  the arguments of their configurations
    key_map        between the file's tensors (keys as in the file) and the module's parameters
    """

    vision: Config
    codes: Config
    key_map: KeyMap

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """Return the module without weights, and the key map without tensors that it has no parameter for. Raises
        UnknownArchitecture if the file's tensors do not fit the class."""
        with without_weights("GLM-Image"):
            module = GlmImageVision(self.vision, self.codes)
        key_map = fitted(self.key_map, module, "it is not a vision encoder of GLM-Image:")
        return module.eval().requires_grad_(False), key_map


def is_glm_vision(shapes: Mapping[str, Shape], prefix: str) -> bool:
    """Return whether the vision model under `prefix` in `shapes` is GLM-Image's."""
    return any(key.startswith(f"{prefix}embeddings.") for key in shapes)


def plan_glm_vision(shapes: Mapping[str, Shape], prefix: str) -> GlmVisionPlan:
    """Plan the vision encoder with a vision model under `prefix` in `shapes`, from shapes alone.

    Raises UnknownArchitecture if it is not GLM-Image's.
    """
    level = prefix.removesuffix(VISION)
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(level)}
    key_map = discover(own, lambda tensors: {key.removeprefix(level): x for key, x in tensors.items()})
    try:
        return GlmVisionPlan(*glm_vision_config(key_map.shapes), key_map)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"it is not a vision encoder of GLM-Image: {error}") from error


def glm_grid(size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of tokens of an image of this width and height, multiples of 32 within the limits."""
    return size[1] // TOKEN_SIDE, size[0] // TOKEN_SIDE


def glm_patches(pixels_HWC: PixelArray) -> Tensor:
    """Return the patches of an image, [N, P] in float32 on the CPU: resized to half its size, and normalised."""
    bounds = {"shortest_edge": LEAST_SIDE**2, "longest_edge": MOST_SIDE**2}
    processor = image_processor("GlmImageImageProcessor")(
        size=bounds, patch_size=_PATCH, temporal_patch_size=1, merge_size=1, image_mean=[0.5] * CHANNELS,
        image_std=[0.5] * CHANNELS,
    )  # fmt: skip
    found = processor(images=[pixels_HWC], return_tensors="pt", input_data_format="channels_last")
    patches_NP: Tensor = found["pixel_values"]
    return patches_NP


def empty_glm_patches(size: tuple[int, int]) -> Tensor:
    """Return the patches of an image of this width and height, on the meta device."""
    rows, columns = glm_grid(size)
    return torch.empty((rows * columns, CHANNELS * _PATCH**2), dtype=torch.float32, device="meta")


def glm_tokens(module: GlmImageVision, patches_NP: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the tokens of an image of `grid` rows and columns, [N, 1] as numbers in float32, row by row."""
    visual, vqmodel, device = module.visual, module.vqmodel, patches_NP.device
    sizes = torch.tensor([[1, *grid]])
    places_N2 = get_vision_position_ids(sizes, 1)
    # lengths are read as numbers by its layers, and compared on the device by its positions
    ends = torch.tensor([0, len(patches_NP)], dtype=torch.int32)
    x_ND = visual.patch_embed(patches_NP)
    x_ND = visual.embeddings(
        x_ND, ends[1:].to(device), sizes.to(device), places_N2[:, 0].to(device), places_N2[:, 1].to(device)
    )
    for block in visual.blocks:
        x_ND = block(x_ND, cu_seqlens=ends, max_seqlen=len(patches_NP))
    states_1DHW = x_ND.T.reshape(1, -1, *grid).contiguous()
    tokens_N: Tensor = vqmodel.encode(states_1DHW).image_tokens
    return tokens_N[:, None].float()
