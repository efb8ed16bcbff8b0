"""Adds ControlNet residuals to a transformer, callable like the transformer itself.

Knows no class: residuals are passed by the argument names of the class.

Shape legend: B batch, N rows of patches, D their width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn

from modelpool.pool.inference.conditioning.micro_conditioning import Residuals


class ControlledTransformer(nn.Module):
    """`module`, called with `residuals` in addition to its other arguments."""

    def __init__(self, module: nn.Module, residuals: Residuals) -> None:
        super().__init__()
        self._module, self._residuals = module, residuals

    @property
    def config(self) -> Any:
        """The configuration of the module, which is of diffusers and not typed."""
        return self._module.config

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Call the module."""
        return self._module(*args, **inputs, **self._residuals)


class RepeatedResiduals(Sequence[Tensor]):
    """Residuals [B,N,D], repeated for the number of texts when one is read: repeating all of them at once would take
    that many times the memory."""

    def __init__(self, samples: Sequence[Tensor], texts: int) -> None:
        self._samples, self._texts = samples, texts

    def __len__(self) -> int:
        return len(self._samples)

    def changed(self, change: Callable[[Tensor], Tensor]) -> RepeatedResiduals:
        """Return the same of what `change` returns for each sample."""
        return RepeatedResiduals([change(sample) for sample in self._samples], self._texts)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, slice):
            return RepeatedResiduals(self._samples[place], self._texts)
        sample_BND = self._samples[place]
        # a batch of one broadcasts over all rows of a larger one
        return sample_BND if len(sample_BND) == 1 else sample_BND.repeat(self._texts, 1, 1)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(len(self)))


class SparseResiduals(Sequence[Tensor]):
    """Residuals for some blocks only, by block number, as Z-Image's class expects them."""

    def __init__(self, samples: Mapping[int, Tensor]) -> None:
        self._samples = dict(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, block: object) -> bool:
        return block in self._samples

    @overload
    def __getitem__(self, block: int) -> Tensor: ...
    @overload
    def __getitem__(self, block: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, block: int | slice) -> Tensor | Sequence[Tensor]:
        return list(self)[block] if isinstance(block, slice) else self._samples[block]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._samples.values())

    def changed(self, change: Callable[[Tensor], Tensor]) -> SparseResiduals:
        """Return the same of what `change` returns for each sample."""
        return SparseResiduals({block: change(sample) for block, sample in self._samples.items()})

    def plus(self, other: SparseResiduals) -> SparseResiduals:
        """Return both, with their sum for blocks that both have."""
        sums = dict(self._samples)
        for block, sample in other._samples.items():
            sums[block] = sums[block] + sample if block in sums else sample
        return SparseResiduals(sums)
