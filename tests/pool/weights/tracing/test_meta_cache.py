"""Answers of operations on the meta device that are kept: the same as torch finds, each with a storage of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.pool.weights.tracing import meta_cache as meta_answers
from modelpool.pool.weights.tracing.meta_cache import MetaCache, tensors_in

META = torch.device("meta")
Made = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


class Counted(TorchDispatchMode):
    """Counts the operations that get past it."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.run.append(str(func))
        return func(*args, **(kwargs or {}))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def looks(tensors: object) -> list[Made]:
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors_in(tensors)]


OPERATIONS: dict[str, Callable[[], object]] = {
    "layer norm": lambda: functional.layer_norm(meta(2, 5, 8), (8,), meta(8), meta(8)),
    "group norm": lambda: functional.group_norm(meta(2, 8, 3, 5), 4, meta(8), meta(8)),
    "product with a bias": lambda: torch.addmm(meta(7), meta(3, 4), meta(4, 7)),
    "softmax of half precision": lambda: meta(2, 3, 4, dtype=torch.float16).softmax(-1),
    "convolution of channels last": lambda: functional.conv2d(
        meta(1, 4, 6, 6).to(memory_format=torch.channels_last), meta(8, 4, 3, 3)
    ),
    "several answers": lambda: torch.var_mean(meta(4, 6), dim=1),
    "largest": lambda: meta(4, 6).topk(2),
    "broadcast sum": lambda: meta(4, 1, dtype=torch.float16) + meta(1, 6),
    "transposed": lambda: torch.add(meta(4, 6).t(), meta(6, 4)),
    "view of a new one": lambda: (meta(4, 6) * 2)[1:, ::2],
    "whole numbers": lambda: meta(3, dtype=torch.int64) * 2,
    "whole numbers by a fraction": lambda: meta(3, dtype=torch.int64) * 2.0,
    "complex": lambda: torch.view_as_complex(meta(3, 2)).conj() * torch.view_as_complex(meta(3, 2)),
    "cut in pieces": lambda: meta(4, 6).chunk(2, dim=1),
    "joined": lambda: torch.cat([meta(2, 3), meta(4, 3)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_answer_that_is_kept_is_the_one_that_torch_finds(name: str) -> None:
    with torch.no_grad():
        expected = looks(OPERATIONS[name]())
        with MetaCache():
            found = [looks(OPERATIONS[name]()) for _ in range(3)]
    assert found == [expected] * 3


def test_what_was_asked_before_is_not_run_again() -> None:
    """In another block too; the inner one sees every operation."""
    cache, outside, inside = MetaCache(), Counted(), Counted()
    with torch.no_grad():
        for _ in range(3):
            with outside, cache, inside:
                OPERATIONS["layer norm"]()
    named = "aten.native_layer_norm.default"
    assert (outside.run.count(named), inside.run.count(named)) == (1, 3)


def test_numbers_of_different_kinds_are_different_questions() -> None:
    """`1`, `1.0` and `True` are equal, and promote otherwise."""
    with torch.no_grad(), MetaCache():
        kinds = [torch.add(meta(3, dtype=torch.int64), number).dtype for number in (1, 1.0, True)]
    assert kinds == [torch.int64, torch.float32, torch.int64]


def test_every_answer_has_a_storage_of_its_own() -> None:
    with torch.no_grad(), MetaCache():
        made = [tensor for _ in range(3) for tensor in torch.var_mean(meta(4, 6), dim=1)]
    assert len({tensor.untyped_storage()._cdata for tensor in made}) == 6


def test_what_is_written_to_or_is_a_part_of_an_input_stays_so() -> None:
    with torch.no_grad(), MetaCache():
        for _ in range(2):
            x, y = meta(4, 6), meta(4, 6)
            assert x.add_(y) is x
            assert x.view(24).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert torch.add(x, y, out=y) is y


def test_values_are_computed_anew() -> None:
    """A tensor that is not on the meta device has values, which no kept answer has."""
    with torch.no_grad(), MetaCache():
        sums = [float(torch.full((3,), float(value)).sum() + 1) for value in (1, 2)]
    assert sums == [4.0, 7.0]


def test_what_torch_refuses_is_refused_each_time() -> None:
    with torch.no_grad(), MetaCache():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.mm(meta(2, 3), meta(4, 5))


def test_no_more_are_kept_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_answers, "MAX_ENTRIES", 8)
    cache = MetaCache()
    with torch.no_grad(), cache:
        for size in range(1, 100):
            assert (meta(size) + 1).shape == (size,)
            assert len(cache._answers) <= 8


def test_tensors_are_found_from_left_to_right() -> None:
    a, b, c, d = (meta(n) for n in range(1, 5))
    found = tensors_in(((a, [b, None, 3]), {"x": c, "y": (d, "text")}))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in (a, b, c, d)]
