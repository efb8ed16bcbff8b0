"""Whatever a file holds: it is refused with a typed error, or every patch that comes of it can be applied.

Random parts with random small shapes, most of which fit nothing.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.adapter_keys import PARTS
from modelpool.pool.weights.keymaps.key_map import RowRange, discover
from modelpool.pool.weights.patches.lora_file import match_lora
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.weights.patches.test_adapter_entries import write
from tests.tiers import examples

ROLE = Role.DIFFUSION_MODEL
#: weights of the model by the name in the file; "split" is two parameters of it, "turned" is kept transposed
SOURCES: dict[str, tuple[int, ...]] = {
    "number": (),
    "norm": (4,),
    "line": (4, 4),
    "conv": (4, 2, 2, 2),
    "split": (4, 2),
    "turned": (4, 2),
}
SIZES = st.sampled_from([2] * 8 + [4] * 8 + [0, 1, 3])
SHAPES = st.sampled_from([2] * 12 + [0, 1, 3, 4]).flatmap(lambda n: st.tuples(*[SIZES] * n))
CORE_SHAPES = st.sampled_from([3, 4, 4, 4, 2]).flatmap(lambda n: st.tuples(*[SIZES] * n))
#: parts that belong together, so that whole adapters come up often
FAMILIES = (
    ("up", "down", "mid", "alpha", "dora_scale", "reshape_weight"),
    ("up", "down", "magnitude", "diff_b"),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "alpha"),
    ("lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "alpha", "dora_scale"),
    ("lokr_w1_a", "lokr_w1_b", "lokr_w2"),
    ("a1", "a2", "b1", "b2", "alpha"),
    ("oft_blocks", "rescale", "alpha", "dora_scale"),
    ("w_norm", "b_norm"),
    ("diff", "diff_b"),
    ("set_weight",),
)
#: how many parts of a family come always
REQUIRED = {"up": 2, "hada_w1_a": 4, "lokr_w1": 3, "lokr_w1_a": 3, "a1": 4}
ENDS = {part: end for end, part in PARTS}


def shapes_of(part: str) -> st.SearchStrategy[tuple[int, ...]]:
    return CORE_SHAPES if part in ("mid", "hada_t1", "hada_t2", "lokr_t2", "oft_blocks") else SHAPES


FILES = st.sampled_from(FAMILIES).flatmap(
    lambda family: st.tuples(
        st.sampled_from(sorted(SOURCES)),
        st.fixed_dictionaries(
            {part: shapes_of(part) for part in family[: REQUIRED.get(family[0], 1)]},
            optional={part: shapes_of(part) for part in family[REQUIRED.get(family[0], 1) :]},
        ),
    )
)


@functools.cache
def model() -> tuple[dict[str, tuple[RowRange, ...]], dict[str, tuple[int, ...]]]:
    key_map = discover(
        {f"{name}.weight": shape for name, shape in SOURCES.items()},
        lambda c: {
            **{f"{name}.weight": c[f"{name}.weight"] for name in ("norm", "line", "conv")},
            "first.weight": c["split.weight"][:2],
            "second.weight": c["split.weight"][2:],
            "turned.weight": c["turned.weight"].T,
        },
    )
    names = {name: key_map.targets(f"{name}.weight") for name in SOURCES if name != "number"}
    names["number"] = (RowRange("number.weight", (), 0, 1, 0),)
    shapes: dict[str, tuple[int, ...]] = {**key_map.shapes, "number.weight": ()}
    return names, shapes | {key.replace("weight", "bias"): shape[:1] for key, shape in shapes.items()}


def numbers(part: str, shape: tuple[int, ...]) -> torch.Tensor:
    if part == "reshape_weight":
        return torch.tensor([max(size, 1) for size in shape], dtype=torch.int64)
    return torch.randn((1,) if part == "alpha" else shape, generator=torch.Generator().manual_seed(math.prod(shape)))


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES)
def test_refused_or_applied(tmp_path: Path, held: tuple[str, dict[str, tuple[int, ...]]]) -> None:
    name, parts = held
    names, shapes = model()
    tensors = {f"{name}{ENDS[part]}": numbers(part, shape) for part, shape in parts.items()}
    path = write(tmp_path / "any.safetensors", tensors)
    try:
        found = match_lora(path, "hash", {ROLE: names}, {ROLE: shapes})
    except CorruptFile:
        return
    assert found.matched + len(found.unmatched) == found.total
    assert (found.matched == 0) == (not found.patches)
    patches = PatchSet(found.patches.get(ROLE, ()))
    for parameter in patches.parameters:
        weight = torch.ones(shapes[parameter])
        for function in patches.functions(parameter):
            weight = function(weight)
        assert tuple(weight.shape) == patches.patched_shape(parameter, shapes[parameter])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f[0] in ("up", "oft_blocks", "a1", "diff")])
def test_a_single_number_takes_whole_values_only(tmp_path: Path, family: tuple[str, ...]) -> None:
    names, shapes = model()
    parts = {
        part: (1, 1, 1) if part == "oft_blocks" else (1, 1) for part in family if part in (*family[:2], "b1", "b2")
    }
    parts |= {"diff": ()} if "diff" in parts else {}
    tensors = {f"number{ENDS[part]}": numbers(part, shape) for part, shape in parts.items() if part != "diff_b"}
    found = match_lora(write(tmp_path / "any.safetensors", tensors), "hash", {ROLE: names}, {ROLE: shapes})
    assert found.matched == ("diff" in parts)
