"""Attention processors are inspected once: a model calls them as before, and the inspection is over before its first
step."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops.attention_signatures import remember_signatures
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.weights.patcher.blocks.tiny import unet_sd1


class Processor:
    """A processor of a class that nothing else uses."""

    def __call__(self, attention: nn.Module, hidden_states: Tensor, *, scale: float = 1.0) -> Tensor:
        """Return the states times `scale`."""
        return hidden_states * scale


class Attending(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor


class ModuleProcessor(nn.Module):
    """A processor with weights: torch keeps it among the parts of its attention."""

    def __call__(self, attention: nn.Module, hidden_states: Tensor) -> Tensor:
        """Return the states."""
        return hidden_states


def test_the_signature_is_unchanged_and_found() -> None:
    module = Attending(Processor())
    before = inspect.signature(module.processor.__call__)
    remember_signatures(module)
    remember_signatures(module)
    assert inspect.signature(module.processor.__call__) == before
    assert inspect.signature(Processor.__call__) is vars(Processor.__call__)["__signature__"]


def test_a_processor_that_is_a_module_is_found() -> None:
    """Found in a review: it is no attribute of the attention's own."""
    remember_signatures(Attending(ModuleProcessor()))
    found = vars(ModuleProcessor.__call__)["__signature__"]
    assert list(found.parameters) == ["self", "attention", "hidden_states"]


def test_a_step_inspects_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What inspects a function slowly is counted; a diffusers that asks in another way makes this test fail."""
    unet, inputs = unet_sd1()
    inspected: list[Any] = []
    original = vars(inspect)["_signature_from_function"]

    def counted(cls: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        inspected.append(function)
        return original(cls, function, *args, **kwargs)

    monkeypatch.setattr(inspect, "_signature_from_function", counted)
    processor = next(
        m for m in unet.modules() if isinstance(m, diffusers.models.attention_processor.Attention)
    ).processor
    monkeypatch.delattr(type(processor).__call__, "__signature__", raising=False)
    with torch.inference_mode():
        expected: Tensor = unet(**inputs).sample
        assert inspected, "diffusers inspects processors in each call"
        remember_signatures(unet)
        inspected.clear()
        assert torch.equal(unet(**inputs).sample, expected)
    assert not inspected


def test_arguments_that_a_processor_does_not_take_are_still_named(caplog: pytest.LogCaptureFixture) -> None:
    unet, inputs = unet_sd1()
    remember_signatures(unet)
    diffusers.utils.logging.enable_propagation()
    try:
        with torch.inference_mode(), caplog.at_level(logging.WARNING):
            unet(**inputs, cross_attention_kwargs={"no_such_argument": 1})
    finally:
        diffusers.utils.logging.disable_propagation()  # as it is without the call above
    assert "no_such_argument" in caplog.text


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # a class of diffusers that diffusers uses
def test_processors_of_transformers_are_found() -> None:
    """Classes of their own, with processors of their own."""
    missed = []
    for family in FAMILIES.values():
        module = family.model()
        remember_signatures(module)
        for kind in {type(held) for m in module.modules() if (held := m.__dict__.get("processor")) is not None}:
            if not hasattr(kind.__call__, "__signature__"):
                missed.append((family.name, kind.__name__))
    assert not missed
