"""Diffusion models for images: a tiny published file becomes diffusers' own module, and the file again."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.models.components.common.diffusers_private import ConverterChangedError
from modelpool.pool.models.components.diffusion import build_diffusion_model as build
from modelpool.pool.models.components.diffusion.adapted_modules import ADAPTED
from modelpool.pool.models.components.diffusion.build_diffusion_model import (
    architecture_of,
    plan_diffusion_model,
    self_test,
)
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.nearly import assert_nearly
from tests.pool.families.definitions.in_tables import image_families_in_tables
from tests.pool.models.components.diffusion.image_cases import CASES, Case
from tests.pool.models.components.diffusion.image_published import flux_with_scales_named_weight
from tests.pool.zoo.case import quiet_libraries

GOLDEN = Path(__file__).resolve().parents[4] / "golden"
KEYS = json.loads(gzip.decompress((GOLDEN / "detection_keys.json.gz").read_bytes()))
#: the rows of all image models that are built here
IMAGE_ROWS = {name: ARCHITECTURES[name] for name in image_families_in_tables()}
#: lists of published keys that are built here
BUILT = [
    "sd3_medium", "sd35_medium", "flux_dev", "flux_schnell", "flux2_dev", "chroma", "qwen_image", "z_image", "lumina2",
    "auraflow_0.3", "pixart_sigma_1024", "hunyuan_dit_1.2", "hidream_i1", "hunyuan_image_2.1",
]  # fmt: skip
#: tensors of theirs that no computation reads
UNREAD = {"norm_final.weight", "y_embedder.y_embedding", "pos_embed"}
#: sizes that have a name of their own
SIZED = {
    "hunyuan_dit with sizes": "hunyuan_dit",
    "hunyuan_image_21 distilled": "hunyuan_image_21",
}

#: weights without a part in what is computed: of the last block's texts, which nobody reads; HiDream's experts are
#: computed without gradients
IDLE = {
    "sd3": r"transformer_blocks\.1\.attn\.add_q_proj",
    "sd35_large": r"transformer_blocks\.1\.attn\.(add_q_proj|norm_added_q)",
    "sd35_medium": r"transformer_blocks\.2\.attn\.(add_q_proj|norm_added_q)",
    "qwen_image_layered": r"transformer_blocks\.1\.(txt_mlp|attn\.(to_add_out|add_q_proj|norm_added_q))",
    "qwen_image": r"transformer_blocks\.1\.(txt_mlp|attn\.(to_add_out|add_q_proj|norm_added_q))",
    "hidream_i1": r".*\.(experts|gate)\.",
}

CASE = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
LEVELS = torch.tensor([0.75, 0.25])


def level(case: Case) -> torch.Tensor:
    """Of each image of a batch."""
    return LEVELS * 1000 if case.name.startswith(("pixart", "hunyuan_dit")) else LEVELS


@CASE
def test_a_published_file_is_diffusers_module_and_the_file_again(case: Case, tmp_path: Path) -> None:
    theirs = case.module()
    file = case.file(theirs)
    save_file(file, tmp_path / "model.safetensors")
    tensors = MappedFile.open(tmp_path / "model.safetensors").tensors()
    plan = plan_diffusion_model({key: tuple(tensor.shape) for key, tensor in file.items()})
    assert plan.recognised.name == SIZED.get(case.name, case.name)
    ours = plan.build(tensors)
    assert type(ours) is ADAPTED.get(type(theirs).__name__, type(theirs))
    x, told = case.inputs()
    with quiet_libraries():
        expected = plan.call(theirs, x, level(case), told)
        given = plan.call(ours, x, level(case), told)
    assert expected.shape == x.shape
    assert expected.isfinite().all()
    assert_nearly(given, expected)
    assert set(plan.key_map.unused) == set(case.unused)
    saved = plan.save(ours, tensors)
    assert saved.keys() == file.keys()
    for key, tensor in file.items():
        assert saved[key].dtype == tensor.dtype
        assert torch.equal(saved[key], tensor), key


@CASE
def test_these_weights_all_count(case: Case) -> None:
    """The comparison above would miss a weight that changes nothing: each has a gradient in the result."""
    theirs = case.module().requires_grad_(True)
    x, told = case.inputs()
    plan = plan_diffusion_model({key: tuple(tensor.shape) for key, tensor in case.file(theirs).items()})
    with quiet_libraries():
        output = plan.call(theirs, x, level(case), told)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    idle = {name for name, value in theirs.named_parameters() if value.grad is None or not value.grad.any()}
    assert {name for name in idle if not re.match(IDLE.get(case.name, r"$"), name)} == set()


@CASE
def test_a_file_in_the_naming_of_diffusers_is_built_as_it_is(case: Case) -> None:
    """A part of a folder, on its own."""
    theirs = case.module()
    state = dict(theirs.state_dict())
    plan = plan_diffusion_model({key: tuple(tensor.shape) for key, tensor in state.items()}, config=case.hints or None)
    ours = plan.build(state)
    x, told = case.inputs()
    with quiet_libraries():
        assert_nearly(plan.call(ours, x, level(case), told), plan.call(theirs, x, level(case), told))
    assert plan.save(ours, state).keys() == state.keys()
    assert all(key == origin.segments[0].source for key, origin in plan.key_map.origins.items())


@CASE
def test_the_config_of_a_folder_says_what_it_says(case: Case) -> None:
    theirs = case.module()
    state = dict(theirs.state_dict())
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    plan = plan_diffusion_model(shapes, config=dict(theirs.config) | {"_class_name": type(theirs).__name__})
    built = plan.build(state)
    assert {k: v for k, v in dict(built.config).items() if k[0] != "_"} == {
        k: v for k, v in dict(theirs.config).items() if k[0] != "_"
    }


def _pattern(key: str) -> str:
    return re.sub(r"\d+", "#", key)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.golden], ids=lambda case: case.name)
def test_the_layouts_of_these_tests_are_the_published_ones(case: Case) -> None:
    """Every key that the test's file has is one of the published list, numbers aside, and the whole list is there."""
    ours = {_pattern(key) for key in case.file(case.module())}
    listed = {_pattern(key) for key in KEYS[case.golden]}
    assert ours <= listed
    assert {key for key in listed - ours if "guidance_in" not in key} == set()


def test_norms_that_some_programs_call_weights_are_scales() -> None:
    case = CASES["flux_dev"]
    theirs = case.module()
    file = {key: tensor.clone() for key, tensor in flux_with_scales_named_weight(theirs.state_dict()).items()}
    assert file.keys() != case.file(theirs).keys()
    plan = plan_diffusion_model({key: tuple(tensor.shape) for key, tensor in file.items()})
    ours = plan.build(file)
    x, told = case.inputs()
    assert_nearly(plan.call(ours, x, LEVELS, told), plan.call(theirs, x, LEVELS, told))
    saved = plan.save(ours, file)
    assert saved.keys() == file.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in file.items())


def test_a_marker_of_the_edit_model_has_its_reference_told_without_noise() -> None:
    case = CASES["qwen_image"]
    file = case.file(case.module())
    marked = file | {"__index_timestep_zero__": torch.tensor([])}
    plans = [plan_diffusion_model({key: tuple(x.shape) for key, x in each.items()}) for each in (file, marked)]
    assert [plan.config["zero_cond_t"] for plan in plans] == [False, True]
    plain, clean = (plan.build(each) for plan, each in zip(plans, (file, marked), strict=True))
    assert plans[1].save(clean, marked).keys() == marked.keys()
    x, told = case.inputs()
    reference = {"reference": torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(2))}
    with torch.no_grad():
        alone = [plan.call(part, x, LEVELS, told) for plan, part in zip(plans, (plain, clean), strict=True)]
        both = [plan.call(part, x, LEVELS, told | reference) for plan, part in zip(plans, (plain, clean), strict=True)]
    torch.testing.assert_close(*alone, rtol=1e-5, atol=1e-5)  # each cell is scaled by numbers of its own
    assert (both[0] - both[1]).abs().max() > 0.01


def test_a_converter_that_drifts_is_told_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in CASES["sd3"].file(CASES["sd3"].module()).items()}
    self_test(shapes)
    right = IMAGE_ROWS["sd3"]

    def drifted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key.replace("proj_out", "last"): tensor for key, tensor in right.convert(tensors).items()} | {
            "proj_out.weight": tensors["final_layer.linear.weight"]
        }

    monkeypatch.setattr(build, "ARCHITECTURES", {"sd3": replace(right, convert=drifted)})
    with pytest.raises(ConverterChangedError, match=r"1 parameter has no source, such as proj_out\.bias"):
        self_test(shapes)


@pytest.mark.parametrize(("channels", "name"), [(96, "flux_fill"), (32, "flux_control")])
def test_published_sizes_of_fluxes_that_read_more_are_planned_whole(channels: int, name: str) -> None:
    shapes = {key: tuple(shape) for key, shape in KEYS["flux_dev"].items()} | {"img_in.weight": (3072, channels * 4)}
    plan = plan_diffusion_model(shapes)
    self_test(shapes)
    assert plan.recognised.name == name
    assert (plan.config["in_channels"], plan.config["out_channels"]) == (channels * 4, 64)


@pytest.mark.parametrize("entry", BUILT)
def test_published_sizes_are_planned_whole(entry: str) -> None:
    """The module of the configuration that the shapes tell has the keys and shapes that the file becomes."""
    shapes = {key: tuple(shape) for key, shape in KEYS[entry].items()}
    self_test(shapes)
    plan = plan_diffusion_model(shapes)
    assert plan.empty().state_dict().keys() == plan.key_map.shapes.keys()
    assert set(plan.key_map.unused) <= UNREAD


def test_all_published_lists_of_these_families_are_built() -> None:
    named = {entry: recognise_diffusion(KEYS[entry]) for entry in KEYS}
    assert {entry for entry, found in named.items() if found is not None and found.name in IMAGE_ROWS} == set(BUILT)


def test_every_row_has_a_case_of_its_architecture() -> None:
    rows = {(row.module, row.call) for row in IMAGE_ROWS.values()}
    cases = set()
    for case in CASES.values():
        found = recognise_diffusion({key: tuple(value.shape) for key, value in case.file(case.empty()).items()})
        assert found is not None
        row = architecture_of(found)
        cases.add((row.module, row.call))
    assert cases == rows
