"""`modelpool pin` and `unpin`, and where else pins are shown."""

from __future__ import annotations

import dataclasses
import json

from modelpool.actors.control.status import PinnedModel, PoolStatus
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool

SDXL = PinnedModel("sdxl", 2, ("gpu-0",), ("gpu-1",))
FLUX = PinnedModel("flux", 1, (), (), "no other worker is idle")


@dataclasses.dataclass
class PinPool(FakePool):
    """A pool that notes the pins."""

    pins: tuple[PinnedModel, ...] = ()
    asked: list[tuple[tuple[str, ...], int]] = dataclasses.field(default_factory=list)

    def pin(self, *models: str, replicas: int = 1) -> tuple[PinnedModel, ...]:
        self.asked.append((models, replicas))
        return self.pins

    def unpin(self, *models: str) -> tuple[PinnedModel, ...]:
        return self.pin(*models, replicas=0)

    def status(self) -> PoolStatus:
        return dataclasses.replace(super().status(), pins=self.pins)


def test_models_are_pinned_and_shown(command: Command) -> None:
    pool = PinPool(pins=(SDXL, FLUX))
    ended = command("pin", "sdxl", "flux", "--replicas", "2", "--pool", "mine", pool=pool)
    assert (ended.code, pool.asked) == (0, [(("sdxl", "flux"), 2)])
    assert ended.out.strip().splitlines() == [
        "sdxl  on 1 of 2 workers (gpu-0); gpu-1 loads it",
        "flux  on 0 of 1 worker; no other worker is idle",
    ]


def test_without_models_nothing_is_pinned(command: Command) -> None:
    pool = PinPool()
    assert command("pin", "--pool", "mine", pool=pool).out == "no model is pinned\n"
    assert pool.asked == []
    assert command("unpin", "sdxl", "--pool", "mine", pool=pool).code == 0
    assert pool.asked == [(("sdxl",), 0)]
    assert command("pin", "sdxl", "--replicas", "0", "--pool", "mine", pool=pool).code == 2


def test_programs_read_pins_as_json(command: Command) -> None:
    ended = command("pin", "--json", "--pool", "mine", pool=PinPool(pins=(SDXL,)))
    assert json.loads(ended.out) == {
        "model": "sdxl", "replicas": 2, "holders": ["gpu-0"], "loading": ["gpu-1"], "obstacle": "",
    }  # fmt: skip


def test_status_models_and_why_show_pins(command: Command) -> None:
    pool = PinPool(pins=(SDXL, FLUX))
    assert "pinned  " in command("models", "--pool", "mine", pool=pool).out
    assert "flux on 0 of 1 worker; no other worker is idle" in command("status", "mine", pool=pool).out
    assert command("why", "flux", "--pool", "mine", pool=pool).out == (
        "flux is pinned: on 0 of 1 worker; no other worker is idle\n"
    )


def test_a_model_on_more_workers_than_pinned_is_said_so() -> None:
    """It was "on 2 of 1 worker": another one holds the weights without a pin."""
    found = {
        replicas: PinnedModel("shapes", replicas, ("gpu-0", "gpu-1")[:holders]).words
        for replicas, holders in ((1, 2), (2, 2), (3, 1))
    }
    assert found == {
        1: "on 2 workers (gpu-0, gpu-1), 1 required",
        2: "on 2 of 2 workers (gpu-0, gpu-1)",
        3: "on 1 of 3 workers (gpu-0)",
    }
    assert PinnedModel("shapes", 1).words == "on 0 of 1 worker"
