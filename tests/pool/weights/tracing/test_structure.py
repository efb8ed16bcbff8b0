"""Digests of structure: equal for equal modules whatever their weights, different for anything that a dry run reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from modelpool.pool.weights.tracing.structure import structure_digest


class Kind(Enum):
    ONE = 1
    TWO = 1.0 + 1


@dataclass(frozen=True, slots=True)
class Facts:
    heads: int = 2


class Plain:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def scaled_by(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


class Layer(nn.Module):
    """One of everything that modules of diffusers and transformers hold."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=bias, dtype=dtype)
        self.second = nn.Linear(width, width, bias=bias, dtype=dtype)
        self.register_buffer("table", torch.rand(3))
        self.heads = 2
        self.config: dict[str, Any] = {"sample_size": 64, "scaling_factor": 0.18215, "blocks": ["down", "mid"]}
        self.act: Any = nn.functional.silu
        self.scale: Any = scaled_by(2.0)
        self.processor = Plain(1.0)
        self.freqs = torch.arange(4.0)
        self.facts: Any = Facts()


def test_weights_and_buffers_do_not_matter() -> None:
    assert structure_digest(Layer()) == structure_digest(Layer()) is not None


def changed(name: str, value: object) -> Callable[[Layer], object]:
    return lambda layer: setattr(layer, name, value)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "heads": changed("heads", 4),
    "type of a number": changed("heads", 2.0),
    "truth": changed("heads", True),
    "configuration": lambda layer: layer.config.update(sample_size=32),
    "scaling": lambda layer: layer.config.update(scaling_factor=math.nextafter(0.18215, 1)),
    "length of a list": lambda layer: layer.config.update(blocks=["down", "mid", "up"]),
    "list of one": lambda layer: layer.config.update(blocks=["down", "mid"][:1]),
    "tuple for a list": lambda layer: layer.config.update(blocks=("down", "mid")),
    "function": changed("act", nn.functional.gelu),
    "module for a function": changed("act", nn.SiLU()),
    "closure": changed("scale", scaled_by(3.0)),
    "argument": changed("scale", partial(math.pow, 2)),
    "other argument": changed("scale", partial(math.pow, 3)),
    "attribute of an object": lambda layer: setattr(layer.processor, "scale", 2.0),
    "values of a plain tensor": lambda layer: layer.freqs.add_(1),
    "field": changed("facts", Facts(3)),
    "member": changed("facts", Kind.ONE),
    "other member": changed("facts", Kind.TWO),
    "dtype": lambda layer: layer.first.half(),
    "missing bias": lambda layer: setattr(layer.first, "bias", None),
    "name": lambda layer: layer.add_module("third", layer._modules.pop("second")),
    "another layer": lambda layer: layer.add_module("third", nn.Linear(4, 4)),
    "shared layer": changed("second", None),
    "buffer": lambda layer: layer.register_buffer("table", torch.rand(4)),
    "training": lambda layer: layer.train(False),
    "hook": lambda layer: layer.register_forward_pre_hook(print),
}


def test_everything_else_matters() -> None:
    digests = {"": structure_digest(Layer()), "width": structure_digest(Layer(6))}
    digests["no bias"] = structure_digest(Layer(bias=False))
    for name, change in CHANGES.items():
        layer = Layer()
        change(layer)
        digests[name] = structure_digest(layer)
    tied = Layer()
    tied.second = tied.first
    digests["tied"] = structure_digest(tied)
    assert None not in digests.values()
    assert len(set(digests.values())) == len(digests), digests


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, "1"), (["a", "b"], ["a\nb"]), ([["a"], "b"], [["a", "b"]]), ({"a": 1}, [("a", 1)]), (None, "None")],
)
def test_values_are_not_taken_for_others(one: object, other: object) -> None:
    assert structure_digest(one) != structure_digest(other)


def test_the_order_of_a_set_does_not_matter() -> None:
    names = [f"name{i}" for i in range(20)]
    assert structure_digest(frozenset(names)) == structure_digest(frozenset(reversed(names))) is not None


def test_an_object_of_unknown_meaning_has_no_digest() -> None:
    layer = Layer()
    layer.facts = Lock()
    assert structure_digest(layer) is None
