"""Which modules of a component stay resident when not all can, and what a pass takes that streams the others.

Pure and torch-free; knows bytes and operations of modules in the order in which a pass runs them, and nothing of
devices: speeds and limits are arguments. Which component gets how many bytes is `pool.plan.residency`'s decision.

A module streams well when much is computed for each byte that crosses the bus, and when other work lies between it and
the next one that streams: copies run ahead of computing, but only by so many bytes. So, in this order:
1. what is there already stays before anything new comes, so that a second choice with the same target moves nothing;
2. tiny modules stay: to start their copy takes longer than the copy, and together they take no room to speak of;
3. the fewer operations for each byte on the bus, the sooner it stays. In coarse classes (a factor of 4): finer ones
   would bunch what streams for gains that no count of operations is exact enough to promise;
4. within a class by multiples of the golden ratio, modulo 1, of their places: of that order any beginning lies evenly
   over the pass, and so does what is left (Fibonacci hashing; Knuth, TAOCP 6.4). It never falls into step with blocks
   of 4 or 8 layers, as bit-reversed places do;
5. who does not fit in what is left is passed over, smaller ones may still fit.
Where nobody counted operations, each resident byte is taken for the same number of them, which is so for linear layers.

Largest first, which is usual, bunches what streams. It is better where few modules differ much in size or operations
and fill a target more tightly in falling order: for random models of 40 modules a pass took up to a fifth longer with
the order that is used here, for real layouts none was found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, repeat

#: modules of one class differ in operations for a byte by at most a factor of 2 ** CLASS_BITS
CLASS_BITS = 2
#: 2 ** 64 / golden ratio, made odd
GOLDEN = 0x9E3779B97F4A7C15
#: about 10 us to start a copy, at 25 GB/s. An assumption of the order of magnitude
TINY_BYTES = 1 << 18
TINY_CLASS = -1


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """One module's own weights: bytes when resident (compute dtype) and on the bus (storage dtype).

    flops  multiplications and additions of one pass through it at a usual size; 0 where nobody counted
    """

    name: str
    resident_bytes: int
    upload_bytes: int
    flops: int = 0


def choose_modules(
    modules: Sequence[ModuleBytes], target_bytes: int, now: Set[str], grow: bool = True
) -> frozenset[str]:
    """The modules that should be resident: at most `target_bytes` together.

    `modules` in the order of a pass. What is in `now` already stays before anything new comes; without `grow` nothing
    new comes at all.
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
    """The modules, first those that should be resident first. `modules` in the order of a pass."""
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
    """Whole steps of a factor of 2 ** CLASS_BITS in operations for each byte on the bus, from 0."""
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
    """What `passes` take, `modules` one after the other, while those that are not in `resident` stream over one link.

    Copies run in order, each as soon as the link is free and the copies that wait for their module take at most
    `ahead_bytes` with it; one alone may take more. A module begins when the one before has ended and its copy is there;
    when it begins its copy no longer counts. Copies run ahead into the next pass; nothing is under way at first.
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


def stall_seconds(
    modules: Sequence[ModuleBytes],
    resident: Set[str],
    link_bytes_per_second: float,
    flops_per_second: float,
    ahead_bytes: int,
    passes: int = 1,
) -> float:
    """The part of `pass_seconds` in which nothing computes."""
    taken = pass_seconds(modules, resident, link_bytes_per_second, flops_per_second, ahead_bytes, passes)
    return taken - passes * sum(m.flops for m in modules) / flops_per_second
