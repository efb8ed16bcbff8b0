"""Diffusion models that are not known, not whole, or described otherwise than they are: a typed error says so."""

from __future__ import annotations

import contextlib
import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.families.definitions import stable_cascade
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.nearly import assert_nearly
from tests.pool.damaged_shapes import damaged
from tests.pool.models.components.diffusion.image_cases import CASES


@cache
def file_shapes(name: str) -> dict[str, Shape]:
    """The shapes of a case's file, without its weights."""
    case = CASES[name]
    return {key: tuple(tensor.shape) for key, tensor in case.publish(case.empty().state_dict()).items()}


def test_files_that_are_no_diffusion_model_say_so() -> None:
    with pytest.raises(UnknownArchitecture, match=r"its 2 tensors match no known model \(the first are a, b\)"):
        plan_diffusion_model({"a": (1,), "b": (2,)})
    with pytest.raises(UnknownArchitecture, match=r"its 0 tensors match no known model \(the first are none\)"):
        plan_diffusion_model({})


def test_models_that_nothing_builds_are_told_by_name() -> None:
    shapes = {
        "lq_proj.latent_proj.0.weight": (8, 8),
    }
    with pytest.raises(UnknownArchitecture, match=r"recognised as PiD, which cannot be built"):
        plan_diffusion_model(shapes)


def test_a_model_with_a_tensor_missing_or_of_another_shape_is_not_built() -> None:
    shapes = file_shapes("flux_dev")
    without = {key: shape for key, shape in shapes.items() if key != "double_blocks.0.img_mlp.2.bias"}
    with pytest.raises(UnknownArchitecture, match=r"Flux dev, but 1 parameter has no source, such as .*ff\.net\.2"):
        plan_diffusion_model(without).empty()
    wider = shapes | {"double_blocks.1.img_attn.proj.bias": (65,)}
    with pytest.raises(UnknownArchitecture, match=r"has shape \(65,\) in the file and \(64,\) in the module"):
        plan_diffusion_model(wider).empty()


def test_a_block_that_a_converter_does_not_know_ends_in_an_error() -> None:
    """Looking for what the converter of Flux 2 missed once went on for ever: it names no tensor."""
    shapes = dict(file_shapes("flux2"))
    shapes["double_blocks.1.img_attn.strange.weight"] = shapes.pop("double_blocks.1.img_attn.proj.weight")
    with pytest.raises(
        UnknownArchitecture, match=r"flux2: found \d+ tensors, expected others, such as img_attn.strange"
    ):
        plan_diffusion_model(shapes)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "anything."])
def test_a_prefix_inside_a_checkpoint_changes_nothing(prefix: str) -> None:
    case = CASES["sd3"]
    theirs = case.module()
    file = {prefix + key: tensor for key, tensor in case.file(theirs).items()} | {"vae.x.weight": torch.ones(3)}
    told_prefix = "" if prefix.startswith("model") else prefix
    plan = plan_diffusion_model({key: tuple(tensor.shape) for key, tensor in file.items()}, told_prefix)
    assert plan.recognised.prefix == prefix
    ours = plan.build(file)
    x, told = case.inputs()
    half = torch.tensor([0.5, 0.5])
    assert_nearly(plan.call(ours, x, half, told), plan.call(theirs, x, half, told))
    assert plan.save(ours, file).keys() == file.keys() - {"vae.x.weight"}


def test_a_configuration_of_another_class_or_of_more_layers_than_tensors_is_refused() -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in CASES["flux_dev"].empty().state_dict().items()}
    with pytest.raises(UnknownArchitecture, match=r"names the class 'UNet2DModel', expected FluxTransformer2DModel"):
        plan_diffusion_model(shapes, config={"_class_name": "UNet2DModel"})
    with pytest.raises(
        UnknownArchitecture, match=r"found num_layers 1000000, expected at most \d+ \(the number of tensors"
    ):
        plan_diffusion_model(shapes, config={"num_layers": 1_000_000})
    with pytest.raises(UnknownArchitecture, match=r"found axes_dims_rope \[1000000\], expected at most 8192"):
        plan_diffusion_model(shapes, config={"axes_dims_rope": [1_000_000]})
    pixart = {key: tuple(tensor.shape) for key, tensor in CASES["pixart_sigma"].empty().state_dict().items()}
    with pytest.raises(UnknownArchitecture, match=r"found sample_size 100000, expected at most 512"):
        plan_diffusion_model(pixart, config={"sample_size": 100_000})
    with pytest.raises(UnknownArchitecture, match=r"cannot have these sizes"):
        plan_diffusion_model(shapes, config={"attention_head_dim": "wide"}).empty()
    with pytest.raises(UnknownArchitecture, match=r"recognised as Flux dev, but"):
        plan_diffusion_model(shapes, config={"num_layers": 1}).empty()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_something_else_never_another_error(data: st.DataObject) -> None:
    """Tensors missing, of strange shapes, under strange names: a typed error, or a plan of what the file still is."""
    shapes = data.draw(damaged(file_shapes(data.draw(st.sampled_from(list(CASES))))))
    with contextlib.suppress(UnknownArchitecture):
        plan_diffusion_model(shapes).empty()


@pytest.mark.parametrize("end", [".kv_mapper.1.weight", ".mapper.weight"])
def test_a_stage_of_cascade_without_a_kind_of_block_is_refused(end: str) -> None:
    """Found: it ended in StopIteration, which no future takes, and who asked waited for ever."""
    found: dict[str, Shape] = {"clip_txt_pooled_mapper.weight": (8, 4), "down_blocks.0.1.kv_mapper.1.weight": (4, 4)}
    found |= {"down_blocks.0.2.mapper.weight": (4, 4)}
    shapes = {key: shape for key, shape in found.items() if not key.endswith(end)}
    with pytest.raises(UnknownArchitecture, match=re.escape(end)):
        stable_cascade.config({"c_hidden": (4,), "stable_cascade_stage": "c"}, shapes)
