"""The vision part of Qwen 2.5 VL and of Qwen 3 VL: build it from the tensors of its file, preprocess images, compute
their states.

It keeps an image's aspect ratio, as patches of which four become one state; the states are inserted among the tokens
that the language part reads. Each row of Qwen 3 VL's states ends with what the first layers of the language
part read in addition. Knows neither that part nor files.

The pixel limits of an image are from preprocessor_config.json of Qwen/Qwen2.5-VL-7B-Instruct (and of the processor of
Qwen/Qwen-Image-Edit), and of Qwen/Qwen3-VL-8B-Instruct. Shape legend: N patches, P values of a patch, L states, D width
of a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from modelpool.pool.families.detection.qwen_layout import (
    CHANNELS,
    DEEP_KEY,
    FRAMES,
    MERGED,
    PATCH,
    PATCH_3,
    Config,
    qwen3_vision_config,
    qwen_vision_config,
)
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.library_names import image_processor, is_stand_in, of_library
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.vision.build_vision_encoder import without_weights
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.results import PixelArray
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

_VISION = "transformers.vision_utils"
get_vision_cu_seqlens: Any = of_library(_VISION, "get_vision_cu_seqlens")
get_vision_interpolation_indices_and_weights: Any = of_library(_VISION, "get_vision_interpolation_indices_and_weights")
get_vision_position_ids: Any = of_library(_VISION, "get_vision_position_ids")
get_vision_window_index: Any = of_library(_VISION, "get_vision_window_index")
#: whether the modules of transformers before 5.17 compute positions and windows themselves, which waits for the device
_COMPUTES_POSITIONS = is_stand_in(get_vision_interpolation_indices_and_weights)

#: both sides of an image are multiples of the first; limits of its pixels
STEP, LEAST_PIXELS, MOST_PIXELS = PATCH * MERGED, 56 * 56, 12845056
#: values of a patch
PATCH_NUMBERS = CHANNELS * FRAMES * PATCH**2


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The form in which a vision part reads an image: pixels along a side of a patch, limits of the pixels of an image,
    and mean and deviation of a channel; None: CLIP's."""

    patch: int
    least_pixels: int
    most_pixels: int
    mean: float | None = None

    @property
    def step(self) -> int:
        """Both sides of an image are multiples of it."""
        return self.patch * MERGED


QWEN_25 = ImageForm(PATCH, LEAST_PIXELS, MOST_PIXELS)
QWEN_3 = ImageForm(PATCH_3, 65536, 16777216, 0.5)


def form_of(module: nn.Module) -> ImageForm:
    """Return the form in which `module` reads images."""
    return QWEN_3 if isinstance(module, Qwen3VLVisionModel) else QWEN_25


def rows_of(module: nn.Module) -> int:
    """Return how many states `module` has for each state of an image: one for the input of the language part, and those
    for its first layers."""
    return 1 + len(module.deepstack_visual_indexes) if isinstance(module, Qwen3VLVisionModel) else 1


#: by whether it is Qwen 3 VL
_NAMES = {False: "Qwen 2.5 VL", True: "Qwen 3 VL"}


@dataclass(frozen=True, slots=True)
class QwenVisionPlan(ModulePlan):
    """The plan for building it from its file.

    config   the arguments of its configuration
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    is_3     it is of Qwen 3 VL
    """

    config: Config
    key_map: KeyMap
    is_3: bool = False

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        name = _NAMES[self.is_3]
        with without_weights(name):
            if self.is_3:
                module: nn.Module = Qwen3VLVisionModel(Qwen3VLVisionConfig(**self.config))
            else:
                module = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**self.config))
        key_map = fitted(self.key_map, module, f"it is not a {name} vision encoder:")
        return module.eval().requires_grad_(False), key_map


def plan_qwen_vision(shapes: Mapping[str, Shape], prefix: str = "") -> QwenVisionPlan:
    """Plan the vision encoder among `shapes` with key prefix `prefix`, from shapes alone.

    Raises UnknownArchitecture if it is not one of Qwen 2.5 VL or Qwen 3 VL.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    key_map = discover(own, lambda tensors: {key.removeprefix(prefix): x for key, x in tensors.items()})
    is_3 = DEEP_KEY in key_map.shapes
    try:
        return QwenVisionPlan((qwen3_vision_config if is_3 else qwen_vision_config)(key_map.shapes), key_map, is_3)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"it is not a {_NAMES[is_3]} vision encoder: {error}") from error


def grid_of(size: tuple[int, int], form: ImageForm = QWEN_25) -> tuple[int, int]:
    """Return rows and columns of states for an image of this width and height.

    Both sides are rounded to the nearest multiple, and the image is scaled into the pixel limits. Source:
    `smart_resize` of transformers.
    """
    (width, height), step = size, form.step
    rows, columns = round(height / step), round(width / step)
    if rows * columns * step**2 > form.most_pixels:
        # same order of operations as theirs: rounding could add a row otherwise
        shrink = math.sqrt(height * width / form.most_pixels)
        rows, columns = (max(1, math.floor(side / shrink / step)) for side in (height, width))
    elif rows * columns * step**2 < form.least_pixels:
        grow = math.sqrt(form.least_pixels / (height * width))
        rows, columns = math.ceil(height * grow / step), math.ceil(width * grow / step)
    return rows, columns


def patches_of(pixels_HWC: PixelArray, form: ImageForm = QWEN_25) -> Tensor:
    """Return the patches of an image, [N, P] in float32 on the CPU: resized to `grid_of`, normalised, patches of one
    state adjacent."""
    bounds = {"shortest_edge": form.least_pixels, "longest_edge": form.most_pixels}
    means = {} if form.mean is None else {name: [form.mean] * CHANNELS for name in ("image_mean", "image_std")}
    found = image_processor("Qwen2VLImageProcessor")(size=bounds, patch_size=form.patch, **means)(
        images=[pixels_HWC], return_tensors="pt", input_data_format="channels_last"
    )
    patches_NP: Tensor = found["pixel_values"]
    return patches_NP


def read_patches(module: nn.Module, patches_NP: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the states that `module` computes for an image with a `grid` of states, [L, D], row by row."""
    config: Any = module.config  # transformers is not typed
    merged = int(config.spatial_merge_size)
    # sizes are read as numbers: they stay on the CPU, whatever the module's device
    sizes = torch.tensor([[1, grid[0] * merged, grid[1] * merged]])
    if isinstance(module, Qwen3VLVisionModel):
        return _read_patches_3(module, patches_NP, sizes)
    if _COMPUTES_POSITIONS:
        found: Tensor = module(patches_NP, grid_thw=_sizes_for(patches_NP, sizes)).pooler_output
        return found
    windows, window_ends = get_vision_window_index(sizes, merged, int(config.window_size), int(config.patch_size))
    if patches_NP.is_meta:
        # nothing is computed: two windows need as much memory as all of them, in a hundredth of the time
        window_ends = torch.tensor([0, len(patches_NP) // 2, len(patches_NP)], dtype=window_ends.dtype)
    encoded: Any = module(
        patches_NP,
        grid_thw=sizes,
        position_ids=get_vision_position_ids(sizes, merged).to(patches_NP.device),
        window_index=windows.to(patches_NP.device),
        cu_window_seqlens=window_ends,
        cu_seqlens=get_vision_cu_seqlens(sizes),
    )
    states_LD: Tensor = encoded.pooler_output
    return states_LD


def _sizes_for(patches_NP: Tensor, sizes: Tensor) -> Tensor:
    """Return sizes for modules that compute with them: on the device of the patches, unless nothing is computed."""
    return sizes if patches_NP.is_meta else sizes.to(patches_NP.device)


def _read_patches_3(module: Qwen3VLVisionModel, patches_NP: Tensor, sizes: Tensor) -> Tensor:
    """Return the states of Qwen 3 VL, those for the first layers of the language part in the same rows."""
    if _COMPUTES_POSITIONS:
        found: Any = module(patches_NP, grid_thw=_sizes_for(patches_NP, sizes))
        return torch.cat((found.pooler_output, *found.deepstack_features), dim=-1)
    merged, device = int(module.spatial_merge_size), patches_NP.device
    how = {"mode": module.interpolation_mode, "align_corners": module.interpolation_align_corners}
    places, shares = get_vision_interpolation_indices_and_weights(
        sizes, module.num_grid_per_side, spatial_merge_size=merged, **how
    )
    encoded: Any = module(
        patches_NP,
        grid_thw=sizes,
        interp_indices=places.to(device),
        interp_weights=shares.to(device),
        position_ids=get_vision_position_ids(sizes, merged).to(device),
        cu_seqlens=get_vision_cu_seqlens(sizes),
    )
    return torch.cat((encoded.pooler_output, *encoded.deepstack_features), dim=-1)


def empty_patches(size: tuple[int, int], form: ImageForm = QWEN_25) -> Tensor:
    """Return the patches of an image of this width and height, on the meta device."""
    rows, columns = grid_of(size, form)
    numbers = CHANNELS * FRAMES * form.patch**2
    return torch.empty((rows * columns * MERGED**2, numbers), dtype=torch.float32, device="meta")
