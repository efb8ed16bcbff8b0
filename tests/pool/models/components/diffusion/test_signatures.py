"""Attention processors keep their signature, and `inspect` finds the same one as before."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from modelpool.pool.models.components.diffusion.processor_signatures import keep_signatures


class _Processor:
    def __call__(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        return hidden_states


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = _Processor()


def test_the_kept_signature_is_the_inspected_one() -> None:
    attention = _Attention()
    before = inspect.signature(attention.processor.__call__)
    keep_signatures(nn.ModuleList([attention, nn.Linear(2, 2)]))
    assert hasattr(_Processor.__call__, "__signature__")
    assert inspect.signature(attention.processor.__call__) == before
    assert list(before.parameters) == ["attention", "hidden_states", "mask"]
