"""What the core asks for ahead reaches the worker: files to read by the components that are named, and tasks with
weights that are to come beside a run, with their work and the number of that run."""

from __future__ import annotations

from modelpool.actors.request.requests import LoraChoice
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import ComponentKey, Role, TaskId, WorkerId
from modelpool.scheduler.model.messages import Prefetch, Preload
from tests.actors.control.test_controller import request
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import FakeCatalog, component_key, sha

GPU = WorkerId("gpu-0")


def key(role: Role) -> ComponentKey:
    return component_key(FakeCatalog().find_model("shapes"), role)


@dialogue
async def test_components_are_told_as_files_and_loras_as_whole_ones() -> None:
    desk = await Desk().open()
    await desk.submit(request(loras=[LoraChoice(name="light")]))
    lora = FakeCatalog().lora_spec(FakeCatalog().find_lora("light", 1.0)).key
    wanted = (key(Role.DIFFUSION_MODEL), lora, ComponentKey("nobody/knows@this"))
    desk.controller._dispatcher._execute(Prefetch(GPU, 1, wanted))
    model = FilePart("/models/shapes.safetensors", Role.DIFFUSION_MODEL, sha256=sha("shapes"))
    assert desk.fleet.read_ahead_asked[-1] == (GPU, (model, FilePart("/loras/light.safetensors", sha256=sha("light"))))


@dialogue
async def test_workers_that_are_gone_and_components_without_files_are_no_reason_to_ask() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    asked = len(desk.fleet.read_ahead_asked)
    for command in (
        Prefetch(GPU, 2, (key(Role.VAE),)),
        Prefetch(WorkerId("gpu-9"), 1, (key(Role.VAE),)),
        Prefetch(GPU, 1, (ComponentKey("nobody/knows@this"),)),
    ):
        desk.controller._dispatcher._execute(command)
    assert len(desk.fleet.read_ahead_asked) == asked


@dialogue
async def test_tasks_to_come_are_told_with_their_work_and_the_run_they_come_beside() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    running = desk.controller._dispatcher.running()[0]
    kept = (key(Role.VAE),)
    command = Preload(GPU, 1, (running.task_id, TaskId("forgotten")), (), kept)
    desk.controller._dispatcher._execute(command)
    worker_id, run, coming = desk.fleet.upload_ahead_asked[-1]
    assert (worker_id, run, coming.kept) == (GPU, running.run, kept)
    ((spec, work),) = coming.tasks
    assert spec.task_id == running.task_id, "a task that nobody wants any more is left out"
    assert work.model.name == "shapes"


@dialogue
async def test_a_worker_that_is_gone_or_runs_nothing_is_told_of_no_tasks() -> None:
    desk = await Desk().open()
    asked = len(desk.fleet.upload_ahead_asked)
    for command in (Preload(GPU, 2, ()), Preload(WorkerId("gpu-9"), 1, ()), Preload(GPU, 1, ())):
        desk.controller._dispatcher._execute(command)
    assert len(desk.fleet.upload_ahead_asked) == asked
