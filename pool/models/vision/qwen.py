"""The part of Qwen 2.5 VL that sees images: built from the tensors of its file, shown an image, read.

It sees an image in its own proportions, as patches of which four become one state; those states stand among the words
that the language part reads. Knows neither that part nor files.

How many pixels an image may have is from preprocessor_config.json of Qwen/Qwen2.5-VL-7B-Instruct (and of the
processor of Qwen/Qwen-Image-Edit).

Shape legend: N patches, P numbers of a patch, L states, D width of a state.
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
from modelpool.pool.models.common.diffusers_private import differing_keys
from modelpool.pool.ops.skip_init import without_initialisation
from modelpool.pool.text.image_tokens import SeenImage

#: of an image: both sides are multiples of the first
STEP, LEAST_PIXELS, MOST_PIXELS = PATCH * MERGED, 56 * 56, 12845056
#: numbers in a patch
PATCH_NUMBERS = CHANNELS * FRAMES * PATCH**2


@dataclass(frozen=True, slots=True)
class QwenVisionPlan:
    """How it is built from its file.

    config   the arguments of its configuration
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    config: Config
    key_map: KeyMap

    def empty(self) -> nn.Module:
        """The module without weights. Raises UnknownArchitecture when the file's tensors are not those of the class."""
        try:
            with torch.device("meta"), without_initialisation():
                module: nn.Module = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**self.config))
        except Exception as error:  # transformers checks values in ways and with errors of its own
            raise UnknownArchitecture(f"vision encoder: none of Qwen 2.5 VL can have these sizes: {error}") from error
        difference = differing_keys(self.key_map, module)
        if difference:
            raise UnknownArchitecture(f"it is no vision encoder of Qwen 2.5 VL: {difference}")
        return module.eval().requires_grad_(False)


def plan_qwen_vision(shapes: Mapping[str, Shape], prefix: str = "") -> QwenVisionPlan:
    """How the vision encoder among `shapes` whose keys begin with `prefix` is built, from shapes alone.

    Raises UnknownArchitecture when it is none of Qwen 2.5 VL's.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    key_map = discover(own, lambda tensors: {key.removeprefix(prefix): x for key, x in tensors.items()})
    try:
        return QwenVisionPlan(qwen_vision_config(key_map.shapes), key_map)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"it is no vision encoder of Qwen 2.5 VL: {error}") from error


def grid_of(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of states of an image of this width and height.

    Both sides are taken to the next multiple, and an image that is too small or too large to the pixels that it may
    have. Source: `smart_resize` of transformers.
    """
    width, height = size
    rows, columns = round(height / STEP), round(width / STEP)
    if rows * columns * STEP**2 > MOST_PIXELS:
        # in the order of their operations: a last digit otherwise would be a row more
        shrink = math.sqrt(height * width / MOST_PIXELS)
        rows, columns = (max(1, math.floor(side / shrink / STEP)) for side in (height, width))
    elif rows * columns * STEP**2 < LEAST_PIXELS:
        grow = math.sqrt(LEAST_PIXELS / (height * width))
        rows, columns = math.ceil(height * grow / STEP), math.ceil(width * grow / STEP)
    return rows, columns


def patches_of(pixels_HWC: PixelArray) -> Tensor:
    """An image as it is shown it, [N, P] in float32 on the CPU: of the size that `grid_of` says, with CLIP's mean and
    deviation, the patches that become one state beside each other."""
    bounds = {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}
    found = Qwen2VLImageProcessorPil(size=bounds)(
        images=[pixels_HWC], return_tensors="pt", input_data_format="channels_last"
    )
    patches_NP: Tensor = found["pixel_values"]
    return patches_NP


def read_patches(module: nn.Module, patches_NP: Tensor, grid: tuple[int, int]) -> Tensor:
    """What `module` says of an image of a `grid` of states, [L, D]: row by row."""
    config: Any = module.config  # transformers is not typed
    merged = int(config.spatial_merge_size)
    # its sizes are read as numbers: they stay on the CPU, whatever the module is on
    sizes = torch.tensor([[1, grid[0] * merged, grid[1] * merged]])
    windows, window_ends = get_vision_window_index(sizes, merged, int(config.window_size), int(config.patch_size))
    if patches_NP.is_meta:
        # nothing is computed: two windows hold as much beside each other as all of them do, in a hundredth of the time
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
    """What it is shown of an image of this width and height, without values."""
    rows, columns = grid_of(size)
    return torch.empty((rows * columns * MERGED**2, PATCH_NUMBERS), dtype=torch.float32, device="meta")


def empty_images(sizes: Sequence[tuple[int, int]], width: int) -> tuple[SeenImage, ...]:
    """What it says of images of these widths and heights in states of this `width`, without values."""
    grids = map(grid_of, sizes)
    return tuple(SeenImage(torch.empty((math.prod(grid), width), device="meta"), *grid) for grid in grids)
