"""Selects the modules of a component that stay resident when not all fit, and predicts the time of a streamed pass.

Pure and torch-free: bytes and operations of modules in pass order; speeds and limits are arguments.
`pool.weights.plan.eviction_plan` decides how many bytes a component gets.

A module streams well if it computes much per byte on the bus, and if there is other work between it and the next
streamed module: copies run ahead of compute, but only by a limited number of bytes. So, in this order:
1. resident modules stay before new ones are added, so that a second choice with the same target moves nothing;
2. tiny modules stay: starting their copy takes longer than the copy, and together they take little room;
3. fewer operations per byte on the bus: resident first. In coarse classes (a factor of 4): finer ones would bunch the
   streamed modules for gains below the accuracy of operation counts;
4. within a class, by multiples of the golden ratio, modulo 1, of their positions: any prefix of that order is spread
   evenly over the pass, and so is the rest (Fibonacci hashing; Knuth, TAOCP 6.4). It never falls into step with blocks
   of 4 or 8 layers, as bit-reversed positions do;
5. a module that does not fit in the rest is skipped, smaller ones may still fit.
Without operation counts, each resident byte is assumed to have the same number of operations, as in linear layers.

The usual order, largest first, bunches streamed modules. It is better if few modules differ much in size or operations
and fill a target more tightly in falling order: for random models of 40 modules a pass took up to a fifth longer with
the order used here; for real layouts no such case was found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, repeat

#: modules of one class differ in operations per byte by at most a factor of 2 ** CLASS_BITS
CLASS_BITS = 2
#: 2 ** 64 / golden ratio, made odd
GOLDEN = 0x9E3779B97F4A7C15
#: about 10 us to start a copy, at 25 GB/s. An assumption of the order of magnitude
TINY_BYTES = 1 << 18
TINY_CLASS = -1


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """The weights of one module: bytes when resident (compute dtype) and on the bus (storage dtype).

    flops  multiplications and additions of one pass at a typical size; 0 if not counted
    """

    name: str
    resident_bytes: int
    upload_bytes: int
    flops: int = 0


def choose_modules(
    modules: Sequence[ModuleBytes], target_bytes: int, now: Set[str], grow: bool = True
) -> frozenset[str]:
    """Return the modules that should be resident: at most `target_bytes` together.

    `modules` in pass order. Modules in `now` are kept before new ones are added; without `grow` none are added.
    """
    if grow and target_bytes >= sum(m.resident_bytes for m in modules):
        return frozenset(m.name for m in modules)
    left_bytes = target_bytes
    chosen: set[str] = set()
    preferred = keep_order(modules)
    there = [m for m in preferred if m.name in now]
    coming = [m for m in preferred if m.name not in now] if grow else []
    for module in (*there, *coming):
        if module.resident_bytes <= left_bytes:
            chosen.add(module.name)
            left_bytes -= module.resident_bytes
    return frozenset(chosen)


def keep_order(modules: Sequence[ModuleBytes]) -> list[ModuleBytes]:
    """Return the modules by priority of being resident. `modules` in pass order."""
    counted = any(m.flops for m in modules)
    seen: Counter[int] = Counter()
    ranked: list[tuple[int, int, int]] = []
    for index, module in enumerate(modules):
        klass = (
            TINY_CLASS
            if module.upload_bytes < TINY_BYTES
            else _class_of(module, module.flops if counted else module.resident_bytes)
        )
        ranked.append((klass, seen[klass] * GOLDEN % (1 << 64), index))
        seen[klass] += 1
    return [modules[index] for _, _, index in sorted(ranked)]


def _class_of(module: ModuleBytes, operations: int) -> int:
    """Class of operations per byte on the bus: steps of a factor of 2 ** CLASS_BITS, from 0."""
    # 2 ** 64 makes quotients below 1 whole numbers
    return ((operations << 64) // module.upload_bytes).bit_length() // CLASS_BITS


def pass_seconds(
    modules: Sequence[ModuleBytes],
    resident: Set[str],
    link_bytes_per_second: float,
    flops_per_second: float,
    ahead_bytes: int,
    passes: int = 1,
) -> float:
    """Return the time of `passes`, `modules` in order, while those that are not in `resident` stream over one link.

    Copies run in order. Each starts when the link is free and the copies waiting for their module take at most
    `ahead_bytes` including it; a single one may take more. A module starts when the previous one has ended and its copy
    has arrived; its copy then no longer counts. Copies run ahead into the next pass; none are in flight at first.
    """
    waiting = deque([m for m in modules if m.name not in resident] * passes)
    arrivals: deque[tuple[float, int]] = deque()  # (seconds when there, bytes) of copies under way or waiting
    ahead_now_bytes = 0
    link_free_at = 0.0
    now = 0.0

    def start_copies(at: float) -> None:
        nonlocal ahead_now_bytes, link_free_at
        while waiting and (not arrivals or ahead_now_bytes + waiting[0].upload_bytes <= ahead_bytes):
            size = waiting.popleft().upload_bytes
            link_free_at = max(link_free_at, at) + size / link_bytes_per_second
            arrivals.append((link_free_at, size))
            ahead_now_bytes += size

    start_copies(0.0)
    for module in chain.from_iterable(repeat(modules, passes)):
        if module.name not in resident:
            there_at, size = arrivals.popleft()
            ahead_now_bytes -= size
            now = max(now, there_at)
            start_copies(now)
        now += module.flops / flops_per_second
    return now
