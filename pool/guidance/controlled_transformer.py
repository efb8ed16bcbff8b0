"""A transformer together with what ControlNets add to its blocks, to be called as the transformer alone is.

Knows no class: what is added goes by the names of the arguments that the class takes it by.

Shape legend: B batch, N rows of patches, D their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn

from modelpool.pool.conditioning.micro_conditioning import Residuals


class AddedTo(nn.Module):
    """`module`, called with `residuals` beside whatever it is called with."""

    def __init__(self, module: nn.Module, residuals: Residuals) -> None:
        super().__init__()
        self._module, self._residuals = module, residuals

    @property
    def config(self) -> Any:
        """That of the module, which is of diffusers and not typed."""
        return self._module.config

    def forward(self, *args: Any, **told: Any) -> Any:
        """The call."""
        return self._module(*args, **told, **self._residuals)


class ForEachText(Sequence[Tensor]):
    """Samples [B,N,D], each repeated for so many texts when it is asked for: all of them at once would take as many
    times the memory."""

    def __init__(self, samples: Sequence[Tensor], texts: int) -> None:
        self._samples, self._texts = samples, texts

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, slice):
            return ForEachText(self._samples[place], self._texts)
        sample_BND = self._samples[place]
        # a batch of one is added to all rows of a larger one as it is
        return sample_BND if len(sample_BND) == 1 else sample_BND.repeat(self._texts, 1, 1)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(len(self)))


class BehindSome(Sequence[Tensor]):
    """Samples that go behind some blocks alone, found by the numbers of those: what Z-Image's class asks for."""

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

    def plus(self, other: BehindSome) -> BehindSome:
        """Both: behind a block that each has a sample for, their sum."""
        sums = dict(self._samples)
        for block, sample in other._samples.items():
            sums[block] = sums[block] + sample if block in sums else sample
        return BehindSome(sums)
