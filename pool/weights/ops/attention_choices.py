"""`KernelChoices`: the fastest attention kernel for each class of shapes, measured at its first use and kept on disk.

Kernels differ in the last bits of their results, so a choice never changes once it is made: the file of a kind of GPU
is shared by all workers of a machine, only grows, and the first line about a class of shapes counts. Copies of the file
give other machines the same choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.devices.device_errors import may_try_otherwise
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.user_folders import cache_folder, folder_name
from modelpool.pool.weights.ops.attention import AttentionBackend, use_attention_kernels

#: classes of shapes that are measured; others use the default order. A model has some tens
CHOICES_KEPT = 4096
#: another kernel than the default is chosen only if it takes less than this share of its time: closer ones differ by
#: chance
CLEARLY_FASTER = 0.95
#: timed calls of each kernel, after one that is not
TIMED_CALLS = 3

#: returns the seconds that a call takes on the device of the tensor
Clock: TypeAlias = Callable[[Callable[[], Tensor], torch.device], float]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallShape:
    """The properties of a call of attention on which the choice of its kernel and its speed depend.

    query, key, value  sizes; mask  none, bool or float, with the sizes of its last two dimensions above 1
    """

    device: str
    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value_size: int
    mask: str
    is_causal: bool
    is_grouped: bool

    @property
    def class_name(self) -> str:
        """The name of the class of shapes that share a choice: batch, heads and head sizes are exact; lengths are
        rounded up to a quarter of a power of 2, and whether they are multiples of 8 is kept, on which kernels depend.
        """
        *batch, heads, length, size = (1, 1, *self.query)[-4:]
        key_heads, key_length = (1, 1, *self.key)[-3:-1]
        sizes = f"{'x'.join(map(str, batch))}x{heads}x{_rounded(length)}x{size}"
        keys = f"{key_heads}x{_rounded(key_length)}x{self.value_size}"
        kind = f"{self.mask}{' causal' if self.is_causal else ''}{' grouped' if self.is_grouped else ''}"
        return f"{self.dtype} {sizes} {keys} {kind}"


def shape_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> CallShape:
    """Return the shape of a call; takes the arguments of torch's function."""
    mask = "unmasked"
    if attn_mask is not None:
        rows = "rows" if attn_mask.ndim > 1 and attn_mask.shape[-2] > 1 else "row"
        mask = f"{'bool' if attn_mask.dtype is torch.bool else 'float'} {rows}"
    dtype = str(query.dtype).removeprefix("torch.")
    sizes = tuple(query.shape), tuple(key.shape)
    return CallShape(query.device.type, dtype, *sizes, value.shape[-1], mask, is_causal, enable_gqa)


class KernelChoices:
    """The choices of one kind of GPU. Not thread-safe; other processes may use the file at the same time."""

    def __init__(self, file: Path | None, clock: Clock | None = None, limit: int = CHOICES_KEPT) -> None:
        """Read `file`, if it exists; None keeps choices in memory. `clock` measures; None for the device's clock."""
        self._file = file
        self._clock = clock or device_seconds
        self._limit = limit
        self.known: dict[str, AttentionBackend] = {}
        self._read()

    @classmethod
    def open(cls, device_name: str) -> KernelChoices:
        """Return the choices for a kind of GPU and this torch, in the user's cache folder."""
        return cls(cache_folder() / "attention" / f"{folder_name(device_name)}.txt")

    def order(
        self, shape: CallShape, usual: Sequence[AttentionBackend], run: Callable[[], Tensor]
    ) -> tuple[AttentionBackend, ...]:
        """Return the order of kernels for `shape`: the chosen one first, then `usual`.

        Measures at the first use of a class of shapes, by `run`, which makes the call; not if memory is short, while a
        CUDA graph is captured, or if `CHOICES_KEPT` classes are known: the usual order then applies.
        """
        name = shape.class_name
        chosen = self.known.get(name)
        if chosen is None:
            if len(self.known) >= self._limit or _is_capturing(shape.device):
                return tuple(usual)
            chosen = self._measured(usual, run)
            if chosen is None:
                return tuple(usual)
            chosen = self._keep(name, chosen)
        if chosen not in usual:  # the file is of a run with other kernels
            return tuple(usual)
        return (chosen, *(kernel for kernel in usual if kernel is not chosen))

    def _measured(self, usual: Sequence[AttentionBackend], run: Callable[[], Tensor]) -> AttentionBackend | None:
        """The fastest kernel that accepts the call; the first of `usual` that does unless another is clearly faster.
        None if memory ran out."""
        seconds: dict[AttentionBackend, float] = {}
        for kernel in usual:
            if kernel is AttentionBackend.MATH and seconds:
                continue  # it is never faster, and needs memory for all pairs of tokens
            try:
                with use_attention_kernels((kernel,)):
                    device = run().device
                    seconds[kernel] = min(self._clock(run, device) for _ in range(TIMED_CALLS))
            except torch.OutOfMemoryError:
                return None
            except RuntimeError as error:
                if not may_try_otherwise(error):
                    raise
                continue  # it does not accept the call
        if not seconds:
            return None
        default = next(iter(seconds))
        fastest = min(seconds, key=lambda kernel: seconds[kernel])
        return fastest if seconds[fastest] < CLEARLY_FASTER * seconds[default] else default

    def _keep(self, name: str, chosen: AttentionBackend) -> AttentionBackend:
        """Append a choice to the file; returns the choice of the process that was first."""
        self.known[name] = chosen
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with open(self._file, "a", encoding="ascii") as file:  # one write, which others cannot divide
                    file.write(f"{chosen.value}\t{name}\n")
                self._read()
            except (OSError, OutputFailed) as error:
                _LOG.warning("%s: choices of attention kernels are not kept: %s", self._file, error)
                self._file = None
        return self.known[name]

    def _read(self) -> None:
        """Take over the choices of the file; the first about a class counts. Other lines are ignored."""
        if self._file is None or not self._file.is_file():
            return
        found: dict[str, AttentionBackend] = {}
        values = {kernel.value for kernel in AttentionBackend}
        for line in self._file.read_text(encoding="ascii", errors="replace").splitlines():
            value, _, name = line.partition("\t")
            if name and value in values and len(found) < self._limit:
                found.setdefault(name, AttentionBackend(value))
        self.known.update(found)


def device_seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds that `run` takes on `device`, a CUDA device, by its own clock. Waits for other streams first:
    a decode that overlaps would slow one kernel down and not another."""
    torch.cuda.synchronize(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1000.0
    return seconds


def _is_capturing(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_current_stream_capturing()


def _rounded(length: int) -> str:
    """`length` rounded up to a quarter of a power of 2, with a mark unless it is a multiple of 8."""
    step = max(1, (1 << max(0, length - 1).bit_length()) // 8)
    return f"{-(-length // step) * step}{'' if length % 8 == 0 else '+'}"
