"""The batch size that follows from measured gains.

Proves: a size is taken while each larger one makes enough more images; a measurement holds for smaller images and
models and for nothing else; of several devices the median counts; a few images are never padded to a pass that takes
longer than single ones; every row of the table is complete, and of a family that exists.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.families.batch_gain_table import MEASURED, measured_gains
from modelpool.pool.families.definitions import all_definitions
from modelpool.pool.values.core.batch_gains import BatchedWork, MeasuredGain

GAINS = st.dictionaries(st.sampled_from([2, 4, 8, 16]), st.floats(0.5, 4.0), min_size=1).map(
    lambda found: dict(sorted(found.items()))
)


def row(gains: dict[int, float], side: int = 64, weight_bytes: int = 100) -> MeasuredGain:
    return MeasuredGain(frozenset({"a"}), frozenset({"cpu"}), "a card", side, weight_bytes, gains, "here")


def size(
    *rows: MeasuredGain, side: int = 64, weight_bytes: int = 100, frames: int = 0, expected: int = 0, workers: int = 1
) -> int:
    return BatchedWork("A", "cpu", weight_bytes, rows).usual_size(side, side, frames, expected, workers).size


def test_a_larger_size_must_make_enough_more_images() -> None:
    cases = {(1.5, 2.0, 2.5): 8, (1.5, 2.0, 2.1): 4, (1.05, 2.0, 4.0): 1, (1.5, 1.4, 4.0): 2, (0.9, 0.8, 0.7): 1}
    assert {gains: size(row(dict(zip((2, 4, 8), gains, strict=True)))) for gains in cases} == cases


def test_a_measurement_holds_for_less_work_only() -> None:
    rows = row({2: 2.0, 4: 3.0}), row({2: 1.5}, side=128), row({2: 1.0}, side=256)
    assert [size(*rows, side=side) for side in (8, 64, 72, 128, 136, 256, 264)] == [4, 4, 2, 2, 1, 1, 1]
    assert [size(*rows, weight_bytes=count) for count in (1, 100, 150, 151)] == [4, 4, 4, 1]
    assert size(*rows, frames=9) == 1
    assert size() == 1
    for work in (BatchedWork("A", "cpu", 1), BatchedWork("A", "cpu", 1, rows)):
        assert work.usual_size(512, 512).reason.startswith("no gain of batches is measured for A")


def test_of_several_devices_the_median_counts() -> None:
    cards = [row({4: gain, 16: gain}) for gain in (1.0, 1.05, 1.2, 3.0, 3.0)]
    assert size(*cards) == 4
    assert size(*cards[:3]) == 1
    assert size(*cards, row({4: 2.0, 8: 9.0})) == 4, "a size that few devices have decides nothing"


@given(GAINS, st.integers(1, 200), st.integers(1, 5))
def test_a_few_images_never_end_later_than_single_ones(gains: dict[int, float], expected: int, workers: int) -> None:
    usual, found = size(row(gains)), size(row(gains), expected=expected, workers=workers)
    gain = {1: 1.0, **gains}

    def ends_after(each: int) -> float:
        passes = [len(range(first, -(-expected // each), workers)) for first in range(workers)]
        return max(passes) * each / gain[each]

    assert found <= usual
    for other in (1, usual):
        assert ends_after(found) <= ends_after(other)


def test_the_table_is_of_families_and_kinds_that_exist() -> None:
    families, kinds = {family.name for family in all_definitions()}, {kind.value for kind in DeviceKind}
    for each in MEASURED:
        assert each.families <= families, each
        assert each.kinds <= kinds, each
        assert each.source, each
        assert each.device, each
        assert list(each.gains) == sorted(each.gains), each
        assert 1 not in each.gains, each
    assert {each.side for each in measured_gains("sd1", "cpu")} == {64, 128, 256}
    assert measured_gains("sd1", "rocm") == ()
