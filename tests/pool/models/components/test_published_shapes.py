"""`published_shapes`: from the parameters of modules back to the keys and shapes of published files.

Proves that they are those that a file was built from, for files of the published sizes and for tiny ones of every
layout; the layouts are written down apart, in `tests.pool.models.loading.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry
from modelpool.pool.models.components.component_plans import plan_component
from modelpool.pool.models.components.published_shapes import published_shapes
from modelpool.pool.models.loading.detect_family import detect
from tests.pool.families.tiny_unclip import tiny_unclip_h, tiny_unclip_l
from tests.pool.models.loading import layouts, unet_layouts
from tests.pool.models.loading.layouts import Layout

LAYOUTS: Mapping[str, Callable[[], Layout]] = {
    make.__name__: make
    for make in (
        layouts.sd15, layouts.sd21, layouts.sdxl, layouts.sdxl_refiner, layouts.tiny_sd1, layouts.tiny_sd2,
        layouts.tiny_sdxl, layouts.tiny_sdxl_refiner, unet_layouts.tiny_ssd_1b, unet_layouts.tiny_vega,
        unet_layouts.tiny_koala_700m, unet_layouts.tiny_koala_1b, unet_layouts.small_sd2, tiny_unclip_l, tiny_unclip_h,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_and_shapes_are_found_again_from_the_parameters(name: str) -> None:
    layout = LAYOUTS[name]()
    entries = {key: TensorEntry(key, "F16", shape, 0, 0) for key, shape in layout.items()}
    family = detect(Header("file", 0, entries, {}))
    for role, prefix in family.prefixes.items():
        own = family.shapes_of(role, layout)
        parameters = plan_component(family, role, own).module.named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        assert published_shapes(family.architectures[role], shapes, prefix) == own


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (Architecture.LDM_UNET, "time_embedding.cond_proj.weight"),
        (Architecture.LDM_UNET, "mid_block.attentions.1.norm.weight"),
        (Architecture.LDM_UNET, "down_blocks.0.resnets.0.other.weight"),
        (Architecture.OPEN_CLIP_TEXT, "text_model.other.layer_norm1.weight"),
        (Architecture.DIFFUSION_TRANSFORMER, "proj_in.weight"),
    ],
)
def test_what_has_no_name_in_published_files_gets_none(architecture: Architecture, name: str) -> None:
    assert published_shapes(architecture, {name: (4, 4)}, "model.") == {}
