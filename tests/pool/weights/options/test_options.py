"""Options are frozen values: builders share and do not change, chains run in order, injections undo what they did."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.pool.weights.options.callbacks import CallbackPoint, Callbacks
from modelpool.pool.weights.options.injections import Injection, Injections, InjectionState, active_injections
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.object_patches import object_at, objects_replaced, patched_object_at
from modelpool.pool.weights.options.run_context import ModuleRun, active_run, call_facts, current_run, extra_options
from modelpool.pool.weights.options.transformer_options import (
    PatchPoint,
    ReplacePoint,
    RopeOptions,
    TransformerOptions,
    functions_of,
    map_functions,
    merged,
)
from modelpool.pool.weights.options.wrappers import WrapperPoint, Wrappers


def one(*args: Any) -> Any:
    return args[0]


def two(*args: Any) -> Any:
    return args[0]


def test_builders_return_new_values_and_leave_the_old_ones() -> None:
    plain = TransformerOptions()
    patched = plain.with_attn1_patch(one)
    both = patched.with_attn1_patch(two).with_attn2_replace(one, "input", 4)
    assert plain.is_empty
    assert plain.patches == {}
    assert patched.patches[PatchPoint.ATTN1_PATCH] == (one,)
    assert both.patches[PatchPoint.ATTN1_PATCH] == (one, two)
    assert patched.patches_replace == {}
    assert both.patches_replace[ReplacePoint.ATTN2] == {("input", 4): one}
    with pytest.raises(TypeError):
        both.patches_replace[ReplacePoint.ATTN2][("input", 4)] = two  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.rope = RopeOptions()  # type: ignore[misc]


def test_a_replacement_takes_the_place_of_the_one_for_the_same_block() -> None:
    options = TransformerOptions().with_attn1_replace(one, "input", 4).with_attn1_replace(one, "input", 4, 1)
    options = options.with_attn1_replace(two, "input", 4)
    assert options.patches_replace[ReplacePoint.ATTN1] == {("input", 4): two, ("input", 4, 1): one}


def test_merging_runs_both_and_lets_the_second_replace() -> None:
    first = TransformerOptions().with_attn1_patch(one).with_block_replace(one, "double_block", 0)
    second = TransformerOptions(extra={"note": 1}).with_attn1_patch(two).with_block_replace(two, "double_block", 0)
    both = merged(first, second.with_rope_options(RopeOptions(2.0)))
    assert both.patches[PatchPoint.ATTN1_PATCH] == (one, two)
    assert both.patches_replace[ReplacePoint.DIT] == {("double_block", 0): two}
    assert both.rope == RopeOptions(2.0)
    assert both.extra == {"note": 1}


def test_functions_are_moved_together_or_not_at_all() -> None:
    options = TransformerOptions().with_attn1_patch(one).with_attn1_replace(one, "input", 1)
    options = options.with_forward_timestep_embed_patch(nn.Linear, one)
    assert list(functions_of(options)) == [one, one, one]
    assert map_functions(options, lambda f: f) is options
    assert list(functions_of(map_functions(options, lambda f: two))) == [two, two, two]


def test_model_options_collect_and_replace_as_their_names_say() -> None:
    options = ModelOptions().with_sampler_post_cfg_function(one).with_sampler_post_cfg_function(two)
    assert options.sampler_post_cfg_function == (one, two)
    assert options.changes_guidance
    assert not ModelOptions().with_model_function_wrapper(one).changes_guidance
    assert options.with_model_function_wrapper(one).with_model_function_wrapper(None).model_function_wrapper is None
    patched = options.with_transformer(lambda t: t.with_emb_patch(one))
    assert not patched.transformer.is_empty
    assert options.transformer.is_empty


def test_a_run_sees_its_own_options_and_facts_and_none_after_it() -> None:
    module = object()
    outer, inner = ModuleRun(module, ModelOptions()), ModuleRun(module, ModelOptions(disable_cfg1_optimization=True))
    assert current_run(module) is None
    with active_run(outer), call_facts(sigmas=1, note="outer"):
        with active_run(inner), call_facts(sigmas=2):
            assert current_run(module) is inner
            assert extra_options(TransformerOptions(), block=3) == {"sigmas": 2, "note": "outer", "block": 3}
        assert current_run(module) is outer
        assert extra_options(TransformerOptions()) == {"sigmas": 1, "note": "outer"}
    assert current_run(module) is None
    assert extra_options(TransformerOptions(extra={"own": 1})) == {"own": 1}


def test_a_run_of_another_module_inside_a_run_does_not_hide_it() -> None:
    unet, control = object(), object()
    outer, inner = ModuleRun(unet, ModelOptions()), ModuleRun(control, ModelOptions())
    with active_run(outer), active_run(inner):
        assert current_run(unet) is outer
        assert current_run(control) is inner


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.zeros(3), False),
        (torch.ones(3), torch.ones(2, 3), False),
        ([torch.ones(3), 1], [torch.ones(3), 1], True),
        ({"m": torch.ones(3)}, {"m": torch.zeros(3)}, False),
        (np.ones(3), np.ones(3), False),  # not known to be equal
        ("a", "a", True),
        (1, "1", False),
    ],
)
def test_options_compare_whatever_their_entries_are(left: Any, right: Any, equal: bool) -> None:
    options = TransformerOptions().with_attn1_patch(one)
    assert (replace(options, extra={"m": left}) == replace(options, extra={"m": right})) is equal
    assert replace(options, extra={"m": left}) != options
    assert options.with_attn1_patch(two) != options.with_attn1_patch(one)


@given(names=st.lists(st.text(min_size=1, max_size=3), max_size=6))
def test_wrappers_run_in_the_order_of_their_adding(names: list[str]) -> None:
    order: list[str] = []
    wrappers = Wrappers()
    for name in names:

        def around(executor: Any, x: int, name: str = name) -> int:
            order.append(name)
            return executor(x + 1) * 2

        wrappers = wrappers.with_wrapper(WrapperPoint.APPLY_MODEL, around, name)
    wrapped = wrappers.around(WrapperPoint.APPLY_MODEL, lambda x: x)
    assert wrapped(0) == len(names) * 2 ** len(names)
    assert order == names


def test_merged_wrappers_keep_the_first_ones_outside() -> None:
    first = Wrappers().with_wrapper(WrapperPoint.APPLY_MODEL, one)
    second = Wrappers().with_wrapper(WrapperPoint.APPLY_MODEL, two).with_wrapper(WrapperPoint.OUTER_SAMPLE, one)
    both = first.merged(second)
    assert both.at(WrapperPoint.APPLY_MODEL) == (one, two)
    assert both.at(WrapperPoint.OUTER_SAMPLE) == (one,)


def test_callbacks_are_called_in_order_and_taken_away_by_key() -> None:
    told: list[Any] = []
    callbacks = Callbacks().with_callback(CallbackPoint.ON_LOAD, lambda *a: told.append(("a", *a)), "a")
    callbacks = callbacks.with_callback(CallbackPoint.ON_LOAD, lambda *a: told.append(("b", *a)), "b")
    callbacks.call(CallbackPoint.ON_LOAD, 1)
    callbacks.call(CallbackPoint.ON_DETACH, 2)
    callbacks.without(CallbackPoint.ON_LOAD, "a").call(CallbackPoint.ON_LOAD, 3)
    assert told == [("a", 1), ("b", 1), ("b", 3)]


@pytest.mark.parametrize("failing", range(3))
def test_a_failing_injection_takes_out_what_was_put_in(failing: int) -> None:
    inside: list[int] = []

    def pair(number: int) -> Injection:
        def inject(patcher: object) -> None:
            inside.append(number)
            if number == failing:
                raise RuntimeError(f"injection {number}")

        return Injection(inject, lambda patcher: inside.remove(number))

    injections = Injections().with_injections("mine", *(pair(n) for n in range(3)))
    with pytest.raises(RuntimeError, match=f"injection {failing}"):
        injections.inject(None)
    assert inside == []


def test_ejecting_asks_every_pair_last_first_even_when_one_raises() -> None:
    order: list[int] = []

    def eject(number: int) -> Any:
        def run(patcher: object) -> None:
            order.append(number)
            if number == 1:
                raise RuntimeError("first to fail")

        return run

    pairs = [Injection(lambda patcher: None, eject(n)) for n in range(3)]
    with pytest.raises(RuntimeError, match="first to fail"):
        Injections().with_injections("mine", *pairs).eject(None)
    assert order == [2, 1, 0]


def test_injections_are_taken_out_once_for_each_time_they_were_put_in() -> None:
    log: list[str] = []
    patcher = object()
    pair = Injection(lambda p: log.append("in"), lambda p: log.append("out"))
    placement = InjectionState(Injections().with_injections("mine", pair), patcher)
    with placement.active():
        assert active_injections(patcher) == (placement,)
        assert active_injections(object()) == ()
        placement.inject()
        assert placement.is_injected
        placement.eject()
        assert not placement.is_injected
    assert active_injections(patcher) == ()
    assert log == ["in", "out"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.steps = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x) * self.scale


def test_objects_are_replaced_and_exactly_restored() -> None:
    module = Two().eval()
    before = [(name, id(m)) for name, m in module.named_modules()]
    x = torch.ones(1, 4)
    plain = module(x)
    patches = {"scale": 3.0, "steps.1": nn.Identity(), "steps.forward": lambda y: y}
    with objects_replaced(module, patches):
        assert torch.equal(module(x), x * 3.0)
        assert isinstance(object_at(module, "steps.1"), nn.Identity)
    assert [(name, id(m)) for name, m in module.named_modules()] == before
    assert "forward" not in module.steps.__dict__
    assert torch.equal(module(x), plain)


def test_a_plain_object_may_take_the_place_of_a_module() -> None:
    module = Two()
    before = [(name, id(m)) for name, m in module.named_modules()]
    with objects_replaced(module, {"steps": abs}):
        assert module.steps is abs
    assert [(name, id(m)) for name, m in module.named_modules()] == before


@pytest.mark.parametrize(
    ("path", "error"), [("steps.9", UnknownName), ("nothing.there", UnknownName), ("steps.0.weight", UnusableField)]
)
def test_a_path_that_leads_nowhere_or_to_a_weight_is_refused(path: str, error: type[Exception]) -> None:
    module = Two()
    with pytest.raises(error, match=path.split(".")[0]), objects_replaced(module, {"scale": 3.0, path: 1}):
        pass
    assert module.scale == 2.0


class Refusing(nn.Module):
    """With attributes that cannot be set."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.norm = nn.LayerNorm(4)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def level(self) -> int:
        return 1

    @level.setter
    def level(self, level: int) -> None:
        raise AssertionError("set")


@pytest.mark.parametrize("path", ["dtype", "level", "conv.kernel_size.0", "conv.in_channels.real"])
def test_what_cannot_be_replaced_is_refused_and_nothing_is(path: str) -> None:
    module = Refusing()
    with pytest.raises(UnusableField, match=path), objects_replaced(module, {"norm": nn.Identity(), path: 5}):
        pass
    assert isinstance(module.norm, nn.LayerNorm)
    assert module.conv.kernel_size == (3, 3)


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(3)), torch.zeros(3), 3.0, nn.Identity()])
@pytest.mark.parametrize("path", ["conv", "conv.padding_mode"])
def test_whatever_is_put_in_nothing_of_it_is_left(path: str, value: Any) -> None:
    module = Refusing()

    def everything() -> list[Any]:
        names = ("_parameters", "_buffers", "_modules")
        return [[(n, id(v)) for n, v in getattr(m, t).items()] for m in module.modules() for t in names] + [
            sorted(m.__dict__) for m in module.modules()
        ]

    before = everything()
    with objects_replaced(module, {path: value}):
        assert object_at(module, path) is value
        assert everything() != before or path == "conv.padding_mode"
    assert everything() == before
    assert module.conv.padding_mode == "zeros"


@pytest.mark.parametrize("order", [("norm.eps", "norm"), ("norm", "norm.eps")])
def test_a_patch_inside_a_patched_object_is_of_the_object_that_is_put_in(order: tuple[str, str]) -> None:
    module, new = Refusing(), nn.LayerNorm(4, eps=0.25)
    values = {"norm": new, "norm.eps": 0.5}
    patches = {path: values[path] for path in order}
    with objects_replaced(module, patches):
        assert module.norm is new
        found = {path: object_at(module, path) for path in ("norm", "norm.eps", "norm.normalized_shape")}
    assert (new.eps, module.norm.eps) == (0.25, 1e-5)
    for path, value in found.items():
        assert patched_object_at(module, path, patches) == value
    assert patched_object_at(module, "norm.eps", {"norm": new}) == 0.25
    assert patched_object_at(module, "conv.stride.0", patches) == 1


def test_weights_that_change_meanwhile_stay_changed() -> None:
    """A patched object is put back alone: what else its owner got in the meantime is its own."""
    module = Two()
    with objects_replaced(module.steps[0], {"in_features": 99}):
        module.steps[0]._parameters["weight"] = nn.Parameter(torch.zeros(4, 4))
    assert module.steps[0].in_features == 4
    assert not module.steps[0].weight.any()
