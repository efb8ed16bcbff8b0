"""A view of the nodes is as old as the machine has run since, whatever the wall clock says."""

from __future__ import annotations

import asyncio
import time

import pytest

from modelpool.actors.control.cluster_view import ClusterView
from modelpool.actors.ray.ray_nodes import RayNodes


def test_a_view_is_read_again_although_the_wall_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an hour old before it was read again, and nodes that had come since were missing."""
    nodes, polls = RayNodes(), 0
    real_time, step_seconds = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real_time() + step_seconds)

    async def poll() -> ClusterView:
        nonlocal polls
        polls += 1
        return ClusterView((), at=time.time())

    monkeypatch.setattr(nodes, "poll", poll)

    async def scene() -> None:
        nonlocal step_seconds
        first = await nodes.recent(60.0)
        assert await nodes.recent(60.0) is first
        step_seconds = -3600.0
        await asyncio.sleep(0.01)
        assert await nodes.recent(0.005) is not first
        step_seconds = 3600.0
        latest = await nodes.recent(60.0)
        assert await nodes.recent(60.0) is latest

    asyncio.run(scene())
    assert polls == 2
    nodes.close()
