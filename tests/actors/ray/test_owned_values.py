"""Values that others were the last to use do not stay in the memory of the process that owns them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray

from modelpool.actors.ray.owned_values import OwnedValues, in_use, values_kept

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
#: bytes of values that Ray keeps in the memory of their owner, and of ones that it stores
SIZES = (1000, 300_000)


class Maker:
    """Makes values."""

    def make(self, size: int) -> bytes:
        return os.urandom(size)


class Owner:
    """Has values made and gives others their references, as a controller does. It drops its own at once."""

    def __init__(self, maker: Any) -> None:
        self._maker, self._owned = maker, OwnedValues(seconds=3600.0)

    async def give(self, count: int, size: int) -> list[list[Any]]:
        refs = [self._maker.make.remote(size) for _ in range(count)]
        self._owned.watch(refs)
        for ref in refs:
            await ref
        return [[ref] for ref in refs]

    async def found(self) -> tuple[int, int]:
        """How many of the watched values are in use, and what Ray keeps."""
        used = in_use() or set()
        return len(used & self._owned._ids.keys()), values_kept()

    async def swept(self) -> tuple[int, int, int]:
        """The values that a sweep frees, the ones watched after it, and the ones that Ray keeps."""
        return self._owned.sweep(), len(self._owned), values_kept()


@pytest.fixture(scope="module")
def owner() -> Iterator[Any]:
    maker = ray.remote(num_cpus=0)(Maker).remote()
    owner = ray.remote(num_cpus=0)(Owner).remote(maker)
    yield owner
    ray.kill(owner)
    ray.kill(maker)


def swept_until(owner: Any, expected: tuple[int, int]) -> None:
    """Sweep until the owner watches and keeps as many values: a borrower tells it later that it has dropped one."""
    found: Sequence[int] = ()
    for _ in range(100):
        found = ray.get(owner.swept.remote())[1:]
        if tuple(found) == expected:
            return
        time.sleep(0.1)
    raise AssertionError(f"watches and keeps {found}, expected {expected}")


def test_what_a_borrower_dropped_last_is_freed_and_what_it_still_uses_stays(owner: Any) -> None:
    """Found in a soak test: the controller of a pool grew by 56 MB in 10,000 jobs."""
    for size in SIZES:
        (kept,), *others = ray.get(owner.give.remote(8, size))
        values = ray.get([ref for (ref,) in others])
        assert {len(value) for value in values} == {size}
        del others, values
        swept_until(owner, (1, 1))
        assert len(ray.get(kept)) == size, "a sweep took a value that a borrower uses"
        del kept
        swept_until(owner, (0, 0))


def test_ray_still_tells_what_is_in_use_and_still_keeps_what_borrowers_drop_last(owner: Any) -> None:
    """Once Ray frees such values itself, `owned_values` can go."""
    ref = ray.put(b"")
    used = in_use()
    assert used is not None
    assert ref.hex().encode() in used
    refs = ray.get(owner.give.remote(4, 10))
    ray.get([ref for (ref,) in refs])
    del refs
    for _ in range(100):  # the borrower tells the owner later
        used, kept = ray.get(owner.found.remote())
        if not used:
            break
        time.sleep(0.1)
    assert (used, kept) == (0, 4)
    assert tuple(ray.get(owner.swept.remote())) == (4, 0, 0)
