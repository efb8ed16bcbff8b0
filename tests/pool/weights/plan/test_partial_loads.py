"""`choose_modules` keeps its target and moves nothing twice; what streams hides behind computing where it can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import MIB
from modelpool.pool.weights.plan.partial_loads import (
    TINY_BYTES,
    ModuleBytes,
    choose_modules,
    keep_order,
    pass_seconds,
)
from tests.each_case import each_case

SIZES = st.integers(0, 9).map(lambda size: size * TINY_BYTES // 2)
MODULES = st.lists(st.tuples(SIZES, SIZES, st.integers(0, 3)), max_size=8).map(
    lambda drawn: [
        ModuleBytes(f"m{number}", resident, upload, flops * 10**6)
        for number, (resident, upload, flops) in enumerate(drawn)
    ]
)
TARGETS = st.integers(0, 40).map(lambda size: size * TINY_BYTES // 2)


def bytes_of(modules: Sequence[ModuleBytes], names: frozenset[str]) -> int:
    return sum(module.resident_bytes for module in modules if module.name in names)


def some_names(data: st.DataObject, modules: Sequence[ModuleBytes]) -> frozenset[str]:
    return frozenset(data.draw(st.sets(st.sampled_from([m.name for m in modules])))) if modules else frozenset()


@given(MODULES, TARGETS, st.data())
def test_chosen_modules_fit_and_a_second_choice_is_the_same(modules, target_bytes, data) -> None:
    now = some_names(data, modules)
    sizes = {module.name: module.resident_bytes for module in modules}
    chosen = choose_modules(modules, target_bytes, now)
    assert chosen <= set(sizes)
    assert bytes_of(modules, chosen) <= target_bytes
    assert choose_modules(modules, target_bytes, chosen) == chosen
    left_bytes = target_bytes - bytes_of(modules, chosen)
    assert all(sizes[name] > left_bytes for name in set(sizes) - chosen), "room is left for one more"
    if sum(sizes.values()) <= target_bytes:
        assert chosen == set(sizes)


@given(MODULES, TARGETS, st.data())
def test_without_growing_only_what_is_there_stays(modules, target_bytes, data) -> None:
    now = some_names(data, modules)
    kept = choose_modules(modules, target_bytes, now, grow=False)
    assert kept <= now
    assert bytes_of(modules, kept) <= target_bytes
    if bytes_of(modules, now) <= target_bytes:
        assert kept == now


@given(MODULES, TARGETS, TARGETS)
def test_a_growing_target_keeps_what_is_there(modules, first_bytes, more_bytes) -> None:
    now = choose_modules(modules, first_bytes, frozenset())
    assert now <= choose_modules(modules, first_bytes + more_bytes, now)


@given(MODULES)
def test_the_order_holds_every_module_once_and_is_always_the_same(modules) -> None:
    ordered = keep_order(modules)
    assert sorted(module.name for module in ordered) == [module.name for module in modules]
    assert keep_order(modules) == ordered


def test_tiny_modules_stay_then_those_with_little_to_compute_for_their_bytes() -> None:
    modules = [
        ModuleBytes("dear", 4 * MIB, 4 * MIB, 4 * MIB * 1000),
        ModuleBytes("modulation", 4 * MIB, 4 * MIB, 4 * MIB),
        ModuleBytes("norm", 512, 512, 512 * 1000),
        ModuleBytes("packed", 4 * MIB, 2 * MIB, 4 * MIB),  # twice as much to compute for a byte on the bus
        ModuleBytes("packed more", 4 * MIB, MIB // 2, 4 * MIB),
    ]
    names = [module.name for module in keep_order(modules)]
    assert names[0] == "norm"
    assert set(names[1:3]) == {"modulation", "packed"}
    assert names[3:] == ["packed more", "dear"]


def test_a_factor_of_two_in_operations_does_not_bunch_what_streams() -> None:
    """Layers of 1 and of 1/2 operation for a byte alternate in each half of the pass: both halves keep some."""
    first, second = ([4 * MIB, 2 * MIB] if half == 0 else [4 * MIB, 4 * MIB] for half in range(2))
    modules = [ModuleBytes(f"m{n:02}", 4 * MIB, 4 * MIB, flops) for n, flops in enumerate([*first * 8, *second * 8])]
    resident = choose_modules(modules, 8 * 4 * MIB, frozenset())
    assert 3 <= len(resident & {f"m{n:02}" for n in range(16)}) <= 5


@given(st.integers(1, 64), st.integers(0, 64))
def test_what_stays_of_equal_modules_lies_evenly(count, kept) -> None:
    """In any stretch of the pass the kept ones are within 3 of their share."""
    assume(kept <= count)
    modules = equal(count, MIB, MIB)
    resident = choose_modules(modules, kept * MIB, frozenset())
    counts = [0, *accumulate(int(module.name in resident) for module in modules)]
    for begin, end in combinations(range(count + 1), 2):
        assert abs(counts[end] - counts[begin] - (end - begin) * kept / count) < 3


# ------------------------------------------------------------------------------------------------------------- timeline

SPEEDS = st.sampled_from([0.1, 1.0, 4.0]).map(lambda factor: factor * MIB)
AHEAD = st.integers(0, 12).map(lambda size: size * TINY_BYTES)


def test_golden_timeline() -> None:
    """One byte a second, one operation a second. `b` (4 B) and `d` (3 B) stream, 5 B ahead: `d` waits for `b` to begin.

    0 - 2 a computes while b is copied (0 - 4); 4 - 5 b; d is copied 4 - 7; 5 - 6 c; 7 - 9 d.
    """
    modules = [ModuleBytes(*row) for row in (("a", 9, 9, 2), ("b", 4, 4, 1), ("c", 9, 9, 1), ("d", 3, 3, 2))]
    resident = frozenset("ac")
    assert pass_seconds(modules, resident, 1, 1, 5) == 9
    assert pass_seconds(modules, resident, 1, 1, 7) == 9  # both ahead: d is there at 7 all the same
    # a longer: with 5 B ahead d waits until b begins at 10, is copied 10 - 13; with 7 B it was there long before
    longer = [ModuleBytes("a", 9, 9, 10), *modules[1:]]
    assert pass_seconds(longer, resident, 1, 1, 5) == 15
    assert pass_seconds(longer, resident, 1, 1, 7) == 14
    # again: b is copied 7 - 11 while d and a compute, d 11 - 14; 14 - 16 d
    assert pass_seconds(modules, resident, 1, 1, 5, passes=2) == 16


@given(MODULES, st.data(), SPEEDS, SPEEDS, AHEAD)
def test_a_pass_takes_its_computing_and_its_copies_and_no_more_than_one_after_the_other(
    modules, data, link, rate, ahead_bytes
) -> None:
    resident = some_names(data, modules)
    computing = sum(m.flops for m in modules) / rate
    copying = sum(m.upload_bytes for m in modules if m.name not in resident) / link
    taken = pass_seconds(modules, resident, link, rate, ahead_bytes)
    assert max(computing, copying) <= taken * (1 + 1e-9)
    assert taken <= (computing + copying) * (1 + 1e-9)
    assert pass_seconds(modules, frozenset(m.name for m in modules), link, rate, ahead_bytes) == pytest.approx(
        computing
    )


@given(MODULES, st.data(), SPEEDS, SPEEDS, AHEAD, AHEAD)
def test_copies_farther_ahead_never_take_longer(modules, data, link, rate, ahead_bytes, more_bytes) -> None:
    resident = some_names(data, modules)
    near = pass_seconds(modules, resident, link, rate, ahead_bytes)
    assert pass_seconds(modules, resident, link, rate, ahead_bytes + more_bytes) <= near * (1 + 1e-9)


@given(MODULES, st.data(), SPEEDS, SPEEDS)
def test_without_a_limit_the_link_never_rests(modules, data, link, rate) -> None:
    """Then each module begins when all bytes up to its own were copied, or later."""
    resident, now, copied_bytes = some_names(data, modules), 0.0, 0
    for module in modules:
        if module.name not in resident:
            copied_bytes += module.upload_bytes
            now = max(now, copied_bytes / link)
        now += module.flops / rate
    assert pass_seconds(modules, resident, link, rate, 1 << 60) == pytest.approx(now)


# ----------------------------------------------------------------------------------------------------- against others


def equal(count: int, size_bytes: int, flops: int) -> list[ModuleBytes]:
    return [ModuleBytes(f"m{number:03}", size_bytes, size_bytes, flops) for number in range(count)]


def largest_first(modules: Sequence[ModuleBytes], target_bytes: int) -> frozenset[str]:
    """The usual choice."""
    chosen, left_bytes = set(), target_bytes
    for module in sorted(modules, key=lambda m: (-m.resident_bytes, m.name)):
        if module.resident_bytes <= left_bytes:
            chosen.add(module.name)
            left_bytes -= module.resident_bytes
    return frozenset(chosen)


def steady_seconds(modules, resident, link, rate, ahead_bytes) -> float:
    """One pass of many."""
    three, two = (pass_seconds(modules, resident, link, rate, ahead_bytes, passes) for passes in (3, 2))
    return three - two


@given(
    st.integers(1, 40), st.floats(0, 1), st.sampled_from([0.2, 0.5, 0.9, 1.0, 1.5]), st.sampled_from([1, 2, 4, 9])
)  # fmt: skip
def test_of_equal_modules_never_worse_than_largest_first(count, share, link_share, ahead) -> None:
    """`link_share`: seconds of copying all of them, as a part of the seconds of computing."""
    modules = equal(count, MIB, MIB)
    target_bytes = int(share * count * MIB)
    speeds = (1 / link_share, 1.0, ahead * MIB)
    ours = steady_seconds(modules, choose_modules(modules, target_bytes, frozenset()), *speeds)
    assert ours <= steady_seconds(modules, largest_first(modules, target_bytes), *speeds) * (1 + 1e-9)


def transformer(storage_ratio: float = 1.0) -> list[ModuleBytes]:
    """24 blocks of width 3072 over 4096 tokens; modulation is computed once for all of them."""
    width, tokens = 3072, 4096
    found = []
    for block in range(24):
        for name, squares in (("modulation", 6), ("qkv", 3), ("out", 1), ("up", 4), ("down", 4)):
            weights = squares * width * width
            flops = 2 * weights * (1 if name == "modulation" else tokens)
            found.append(ModuleBytes(f"{block}.{name}", 2 * weights, int(2 * weights * storage_ratio), flops))
        found.append(ModuleBytes(f"{block}.norm", 4 * width, 4 * width, 4 * width * tokens))
    return found


def unet() -> list[ModuleBytes]:
    """Convolutions and attention of three widths, most bytes where the fewest pixels are."""
    found = []
    for side in ("down", "up"):
        for channels, scale in ((320, 1), (640, 2), (1280, 4))[:: 1 if side == "down" else -1]:
            pixels = (128 // scale) ** 2
            for block in range(4):
                for name, squares in (("conv1", 9), ("conv2", 9), ("attention", 4), ("ff", 12)):
                    weights = squares * channels * channels
                    found.append(
                        ModuleBytes(f"{side}.{channels}.{block}.{name}", 2 * weights, 2 * weights, 2 * weights * pixels)
                    )
                text = 2 * 2048 * channels
                found.append(ModuleBytes(f"{side}.{channels}.{block}.text", 2 * text, 2 * text, 2 * text * 77))
    return found


@each_case("modules", [transformer(), transformer(0.5), unet()], ids=["transformer", "8 bit", "unet"])
@each_case("share", [0.1, 0.3, 0.5, 0.7, 0.9])
@each_case("speeds", [(25e9, 200e12), (12e9, 60e12), (50e9, 400e12)], ids=["25", "12", "50 GB/s"])
def test_usual_models_stream_within_a_hundredth_of_what_no_choice_can_beat(modules, share, speeds) -> None:
    """Computing or copying, whichever is longer; and never worse than largest first."""
    link, rate = speeds
    target_bytes = int(share * sum(m.resident_bytes for m in modules))
    resident = choose_modules(modules, target_bytes, frozenset())
    ours = steady_seconds(modules, resident, link, rate, 256 * MIB)
    copying = sum(m.upload_bytes for m in modules if m.name not in resident) / link
    assert ours <= 1.01 * max(copying, sum(m.flops for m in modules) / rate)
    # largest first may fill its target by a few small modules more
    usual = steady_seconds(modules, largest_first(modules, target_bytes), link, rate, 256 * MIB)
    assert ours <= usual * 1.005


def test_half_a_transformer_streams_in_far_less_than_largest_first_lets_it() -> None:
    modules = transformer()
    target_bytes = sum(m.resident_bytes for m in modules) // 2
    speeds = (12e9, 60e12, 256 * MIB)
    ideal = sum(m.flops for m in modules) / speeds[1]
    ours = steady_seconds(modules, choose_modules(modules, target_bytes, frozenset()), *speeds) - ideal
    usual = steady_seconds(modules, largest_first(modules, target_bytes), *speeds) - ideal
    assert ours < usual / 10


def test_small_models_are_near_the_best_choice_there_is() -> None:
    """8 modules of random sizes and operations, every choice tried: in the mean within a twentieth."""
    rng = Random(5)
    ours = best = 0.0
    for _ in range(60):
        sizes = [rng.randint(1, 20) * MIB for _ in range(8)]
        modules = [ModuleBytes(f"m{n}", size, size, size * rng.choice((1, 3, 10))) for n, size in enumerate(sizes)]
        target_bytes = rng.randint(0, sum(sizes))
        rate = sum(m.flops for m in modules) / sum(sizes) / rng.uniform(0.1, 1.5)
        speeds = (1.0, rate, rng.choice((20, 40, 80)) * MIB)
        ours += steady_seconds(modules, choose_modules(modules, target_bytes, frozenset()), *speeds)
        best += min(
            steady_seconds(modules, frozenset(m.name for m in some), *speeds)
            for count in range(9)
            for some in combinations(modules, count)
            if sum(m.resident_bytes for m in some) <= target_bytes
        )
    assert ours <= 1.05 * best
