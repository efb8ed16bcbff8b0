"""The vision part of Qwen 2.5 VL: build it from the tensors of its file, preprocess images, compute their states.

It keeps an image's aspect ratio, as patches of which four become one state; the states are inserted among the tokens
that the language part reads. Knows neither that part nor files.

The pixel limits of an image are from preprocessor_config.json of Qwen/Qwen2.5-VL-7B-Instruct (and of the processor of
Qwen/Qwen-Image-Edit). Shape legend: N patches, P values of a patch, L states, D width of a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.results import PixelArray
from modelpool.pool.detection.qwen_layout import CHANNELS, FRAMES, MERGED, PATCH, Config, qwen_vision_config
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.keymaps.key_map import KeyMap, discover
from modelpool.pool.models.common.fitted_key_map import fitted
from modelpool.pool.ops.skip_init import uninitialised_on_meta
from modelpool.pool.text.image_tokens import ImageStates

#: both sides of an image are multiples of the first; limits of its pixels
STEP, LEAST_PIXELS, MOST_PIXELS = PATCH * MERGED, 56 * 56, 12845056
#: values of a patch
PATCH_NUMBERS = CHANNELS * FRAMES * PATCH**2


@dataclass(frozen=True, slots=True)
class QwenVisionPlan:
    """The plan for building it from its file.

    config   the arguments of its configuration
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    config: Config
    key_map: KeyMap

    def empty(self) -> nn.Module:
        """Return the module without weights. Raises UnknownArchitecture if the file's tensors are not those of the
        class."""
        return self.fitting()[0]

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """Return `empty`, and the key map without tensors that the module has no parameter for. Raises as `empty`."""
        try:
            with uninitialised_on_meta():
                module: nn.Module = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**self.config))
        except Exception as error:  # transformers validates with various exception types
            raise UnknownArchitecture(f"vision encoder: Qwen 2.5 VL cannot have these sizes: {error}") from error
        key_map = fitted(self.key_map, module, "it is not a Qwen 2.5 VL vision encoder:")
        return module.eval().requires_grad_(False), key_map


def plan_qwen_vision(shapes: Mapping[str, Shape], prefix: str = "") -> QwenVisionPlan:
    """Plan the vision encoder among `shapes` whose keys begin with `prefix`, from shapes alone.

    Raises UnknownArchitecture if it is not one of Qwen 2.5 VL.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    key_map = discover(own, lambda tensors: {key.removeprefix(prefix): x for key, x in tensors.items()})
    try:
        return QwenVisionPlan(qwen_vision_config(key_map.shapes), key_map)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"it is not a Qwen 2.5 VL vision encoder: {error}") from error


def grid_of(size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of states for an image of this width and height.

    Both sides are rounded to the nearest multiple, and the image is scaled into the pixel limits. Source:
    `smart_resize` of transformers.
    """
    width, height = size
    rows, columns = round(height / STEP), round(width / STEP)
    if rows * columns * STEP**2 > MOST_PIXELS:
        # # same order of operations as theirs: rounding could add a row otherwise
        shrink = math.sqrt(height * width / MOST_PIXELS)
        rows, columns = (max(1, math.floor(side / shrink / STEP)) for side in (height, width))
    elif rows * columns * STEP**2 < LEAST_PIXELS:
        grow = math.sqrt(LEAST_PIXELS / (height * width))
        rows, columns = math.ceil(height * grow / STEP), math.ceil(width * grow / STEP)
    return rows, columns


def patches_of(pixels_HWC: PixelArray) -> Tensor:
    """Return the patches of an image, [N, P] in float32 on the CPU: resized to `grid_of`, normalised with CLIP's mean
    and deviation, patches of one state adjacent."""
    bounds = {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}
    found = Qwen2VLImageProcessorPil(size=bounds)(
        images=[pixels_HWC], return_tensors="pt", input_data_format="channels_last"
    )
    patches_NP: Tensor = found["pixel_values"]
    return patches_NP


def read_patches(module: nn.Module, patches_NP: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the states that `module` computes for an image with a `grid` of states, [L, D], row by row."""
    config: Any = module.config  # transformers is not typed
    merged = int(config.spatial_merge_size)
    # # sizes are read as numbers: they stay on the CPU, whatever the module's device
    sizes = torch.tensor([[1, grid[0] * merged, grid[1] * merged]])
    windows, window_ends = get_vision_window_index(sizes, merged, int(config.window_size), int(config.patch_size))
    if patches_NP.is_meta:
        # # nothing is computed: two windows need as much memory as all of them, in a hundredth of the time
        window_ends = torch.tensor([0, len(patches_NP) // 2, len(patches_NP)], dtype=window_ends.dtype)
    seen: Any = module(
        patches_NP,
        grid_thw=sizes,
        position_ids=get_vision_position_ids(sizes, merged).to(patches_NP.device),
        window_index=windows.to(patches_NP.device),
        cu_window_seqlens=window_ends,
        cu_seqlens=get_vision_cu_seqlens(sizes),
    )
    states_LD: Tensor = seen.pooler_output
    return states_LD


def empty_patches(size: tuple[int, int]) -> Tensor:
    """Return the patches of an image of this width and height, on the meta device."""
    rows, columns = grid_of(size)
    return torch.empty((rows * columns * MERGED**2, PATCH_NUMBERS), dtype=torch.float32, device="meta")


def empty_images(sizes: Sequence[tuple[int, int]], width: int) -> tuple[ImageStates, ...]:
    """Return the states of images of these widths and heights, of this `width`, on the meta device."""
    grids = map(grid_of, sizes)
    return tuple(ImageStates(torch.empty((math.prod(grid), width), device="meta"), *grid) for grid in grids)
