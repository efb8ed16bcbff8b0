"""Patches in ComfyUI's form: malformed ones are refused by a typed error that names the key; digests are honest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patcher.comfy_patches import patches_from, weight_wrapper
from modelpool.pool.weights.patches.patch_set import DeltaFunction, PatchSet
from tests.each_case import each_case

WEIGHTS = {"layer.weight": torch.zeros(4, 3)}
ONES = torch.ones(4, 3)


def keyed(key: Any, value: Any, identity: str | None = None, **strengths: Any) -> PatchSet:
    return PatchSet(tuple(patches_from({key: value}, WEIGHTS, identity=identity, **strengths)))


@pytest.mark.parametrize("offset", [(0, 1), (0, 1, 2, 3), "abc", (0, 1, "2"), 7, (0.0, 1.0, 2.0)])
def test_a_malformed_offset_is_refused_by_its_key(offset: Any) -> None:
    with pytest.raises(PatchFailed, match=r"layer\.weight.*offset"):
        keyed(("layer.weight", offset), (ONES,))


def test_a_function_that_is_none_is_refused_by_its_key() -> None:
    with pytest.raises(PatchFailed, match=r"layer\.weight.*function"):
        keyed(("layer.weight", None, "double"), (ONES,))


@pytest.mark.parametrize(
    ("nested", "named"),
    [
        ((1.0,), "tuple of 1"),
        (7, "int"),
        ((1.0, (ONES,), 1.0, (0, 1), None), "offset"),
        (("1.0", (ONES,), 1.0, None, None), "strength"),
        ((1.0, ("lora", (ONES,)), 1.0, None, None), "'lora'"),
        ((1.0, (ONES * torch.inf,), 1.0, None, None), "non-finite"),
    ],
)
def test_a_malformed_patch_inside_a_weight_is_refused_by_its_key(nested: Any, named: str) -> None:
    with pytest.raises(PatchFailed, match=rf"layer\.weight.*{named}"):
        keyed("layer.weight", [(ONES, None), nested])


@pytest.mark.parametrize("which", ["strength_patch", "strength_model"])
@pytest.mark.parametrize("strength", ["0.5", None, torch.ones(2)])
def test_a_strength_that_is_no_number_is_refused(which: str, strength: Any) -> None:
    with pytest.raises(PatchFailed, match=which):
        keyed("layer.weight", (ONES,), **{which: strength})


@pytest.mark.parametrize("value", [("lora", (ONES, ONES)), ("lokr", 1), ("diff", ONES), ("set", (1,)), ("diff", ())])
def test_a_kind_that_cannot_be_read_is_named(value: Any) -> None:
    with pytest.raises(PatchFailed, match=rf"layer\.weight.*'{value[0]}'"):
        keyed("layer.weight", value)


BAD = torch.tensor([[1.0, torch.nan, 0.0]]).expand(4, 3)


@each_case("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
@each_case(
    "spelled",
    [
        lambda t: (t,),
        lambda t: ("diff", (t,)),
        lambda t: ("diff", (t, {"pad_weight": True})),
        lambda t: ("set", (t,)),
        lambda t: ("model_as_lora", (t,)),
        lambda t: [(t, None)],
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_their_key(spelled: Any, dtype: torch.dtype) -> None:
    assert len(keyed("layer.weight", spelled(ONES.to(dtype))).patches) == 1
    with pytest.raises(PatchFailed, match=r"layer\.weight.*non-finite numbers"):
        keyed("layer.weight", spelled(BAD.to(dtype)))


@pytest.mark.parametrize("returned", [None, 1.0, [1]])
def test_a_wrapper_that_returns_no_tensor_is_refused_by_its_parameter(returned: Any) -> None:
    with pytest.raises(PatchFailed, match=r"layer\.weight.*expected a tensor"):
        weight_wrapper("layer.weight", lambda weight: returned)(torch.zeros(4, 3))


def doubled(delta: Tensor) -> Tensor:
    return delta * 2.0


def test_an_identity_names_functions_and_inner_patches_too() -> None:
    with_function = ("layer.weight", None, doubled)
    inner = [(ONES, None), (1.0, (ONES,), 1.0, None, doubled)]
    for key, value in ((with_function, (ONES,)), ("layer.weight", inner)):
        assert keyed(key, value, "me").digest == keyed(key, value, "me").digest
        assert keyed(key, value, "me").digest != keyed(key, value, "you").digest
        assert keyed(key, value).digest != keyed(key, value).digest
        assert keyed(key, value, "me").patches == keyed(key, value, "me").patches
    assert keyed(with_function, (ONES,), "me").digest != keyed("layer.weight", (ONES,), "me").digest
    ready = ("layer.weight", None, DeltaFunction("double", doubled))
    assert keyed(ready, (ONES,), "me").digest != keyed(with_function, (ONES,), "me").digest


def test_numbers_of_any_kind_are_strengths() -> None:
    found = {keyed("layer.weight", (ONES,), "me", strength_patch=s).digest for s in (2, 2.0)}
    assert len(found) == 1
