"""What the interfaces share: the lists of models and LoRAs are read once for all callers."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.service import services as services_module
from modelpool.actors.http.service.services import Services
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.catalog.registry.listings import ModelListing
from tests.actors.http.asgi import RefusingPool


class SlowLists(RefusingPool):
    """Answers when it may, or raises."""

    def __init__(self) -> None:
        self.reads = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lost = False

    def models(self) -> tuple[ModelListing, ...]:
        self.reads += 1
        assert self.may_answer.wait(60)
        if self.lost:
            raise PoolLost("gone")
        return super().models()


def test_many_callers_read_the_lists_once_and_do_not_wait_for_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_module, "LISTING_SECONDS", 1e6)
    pool = SlowLists()

    async def scenario() -> None:
        services = Services(pool, ServeSection(), tmp_path, b"s" * 32)
        found = await asyncio.gather(*(services.listings() for _ in range(50)))
        assert (pool.reads, len({id(each) for each in found})) == (1, 1)
        pool.may_answer.clear()
        older = services._listings = replace(found[0], at=found[0].at - 6e5)
        assert await services.listings() is older, "they are not old enough to wait"
        while pool.reads < 2:
            await asyncio.sleep(0)
        assert await services.listings() is older
        pool.may_answer.set()
        while await services.listings() is older:
            await asyncio.sleep(0)
        assert pool.reads == 2

    asyncio.run(scenario())


def test_a_pool_that_is_lost_fails_the_callers_and_is_asked_again(tmp_path: Path) -> None:
    pool = SlowLists()
    pool.lost = True

    async def scenario() -> None:
        services = Services(pool, ServeSection(), tmp_path, b"s" * 32)
        failed = await asyncio.gather(services.listings(), services.listings(), return_exceptions=True)
        assert [type(each) for each in failed] == [PoolLost, PoolLost]
        pool.lost = False
        assert (await services.listings()).names >= {"shapes", "light", "sub/depth"}

    asyncio.run(scenario())
