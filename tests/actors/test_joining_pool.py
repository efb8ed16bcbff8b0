"""Requests that join a running pass, through the whole pool: workers on threads, real engines, simulated GPUs.

Proves: requests with other steps, samplers and guidance scales that wait while a pass runs join it, each ends by
itself, and has the bytes that it has alone with its batch size.
"""

from __future__ import annotations

import pytest

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.scheduler.core import pass_breaks
from modelpool.scheduler.model.placement_record import PlacementRule
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import ROOT

SIZE = 4
CONFIG = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(workers=1, device="sim", vram="64MiB")
WANTED = [
    GenerateRequest(
        model="shapes",
        prompt="a red circle",
        seed=seed,
        steps=3 + 2 * (seed % 3),
        cfg=2.0 + seed % 4,
        sampler=("euler", "dpmpp_2m", "heun")[seed % 3],
        batch=SIZE,
    )
    for seed in range(7)
]


def pixels_of(pool: ModelPool, wanted: list[GenerateRequest]) -> tuple[list[bytes], list[str]]:
    """The pixels of each, and why its sampling was started."""
    jobs = pool.submit(wanted, output=False)
    found = {image.index: image.pixels.tobytes() for image in jobs.images()}
    assert jobs.failures == ()
    tasks = [task for index in range(len(wanted)) for task in pool.history(f"{jobs.id}-{index}").tasks]
    notes = [attempt.why.note for task in tasks for attempt in task.attempts]
    return [found[index] for index in range(len(wanted))], notes


def test_requests_join_a_pass_and_have_their_bytes() -> None:
    with open_real_pool(CONFIG) as pool:
        alone = [pixels_of(pool, [request])[0][0] for request in WANTED]
    with open_real_pool(CONFIG) as pool:
        together, notes = pixels_of(pool, WANTED)
    assert together == alone, [place for place, one in enumerate(alone) if one != together[place]]
    assert sum("joins the pass" in note for note in notes) >= len(WANTED) - SIZE, notes


def test_a_pass_stops_for_the_text_and_the_decode_of_a_request_that_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker: before, the second request was encoded after the end of the first one's pass."""
    monkeypatch.setattr(pass_breaks, "SWITCH_SECONDS", 0.001)  # so that it pays whatever the speed of the machine
    monkeypatch.setattr(pass_breaks, "MOST_LOST", 0.9)
    times = GenerateRequest(model="shapes", prompt="a red circle", seed=3, steps=4, cfg=3.0, batch=SIZE)
    long = GenerateRequest(model="shapes", prompt="a red circle", seed=4, steps=120, cfg=3.0, batch=SIZE)
    short = GenerateRequest(model="shapes", prompt="a blue square", seed=4, steps=4, cfg=3.0, batch=SIZE)
    with open_real_pool(CONFIG) as pool:
        pixels_of(pool, [times])  # runs of unknown length are not stopped
        first, second = pool.submit([long], output=False), pool.submit([short], output=False)
        together = [next(iter(jobs.images())).pixels.tobytes() for jobs in (second, first)]
        tasks = pool.history(f"{second.id}-0").tasks
        rules = [attempt.why.rule for task in tasks for attempt in task.attempts]
        notes = [attempt.why.note for task in tasks for attempt in task.attempts]
    assert PlacementRule.PASS_STOPPED in rules, rules
    assert any("joins the pass" in note for note in notes), notes
    with open_real_pool(CONFIG) as pool:
        alone = [pixels_of(pool, [request])[0][0] for request in (short, long)]
    assert together == alone
