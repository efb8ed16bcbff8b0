"""The controller bounds how many component sizes the core keeps, and names them again when a job needs them."""

from __future__ import annotations

import pytest

from modelpool.actors.control import job_queue
from modelpool.actors.request.requests import GenerateRequest
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import LORAS


@dialogue
async def test_sizes_of_unused_components_are_forgotten_and_named_again() -> None:
    """1. Jobs of two models with several LoRAs, one after the other, with room for few components. 2. The core forgets
    some, and the controller their files. 3. All jobs succeed, those that need a forgotten component too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_queue, "COMPONENTS_KEPT", 4)
        desk = await Desk().open()
        ever_known: set[str] = set()
        forgotten = 0
        for seed in range(2):
            for model in ("shapes", "forms"):
                for lora in LORAS:
                    before = set(desk.state.costs.components)
                    wanted = GenerateRequest(model=model, prompt="p", seed=seed, steps=2, loras=[lora])
                    await desk.submit(wanted, submission=f"{seed}-{model}-{lora}")
                    *_, ended = await desk.run_dry()
                    assert ended.outcome is Outcome.SUCCEEDED, (model, lora, seed)
                    known = set(desk.state.costs.components)
                    ever_known |= known
                    forgotten += len(before - known)
                    (worker,) = desk.controller._dispatcher.workers
                    files = worker.checked | desk.controller._tasks._files.keys()
                    assert not files & (before - known), "files of forgotten components are held"
    assert forgotten > 0
    assert desk.state.costs.components.keys() <= ever_known
