"""A prefetch that the core asks for reaches the worker, with the files of the components that it names."""

from __future__ import annotations

from actors.requests import LoraChoice
from pool.checkpoints.file_parts import FilePart
from pool.spec import ComponentKey, Role, WorkerId
from scheduler.messages import Prefetch
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import FakeCatalog, component_key
from tests.actors.test_controller import request

GPU = WorkerId("gpu-0")


def key(role: Role) -> ComponentKey:
    return component_key(FakeCatalog().find_model("shapes"), role)


@dialogue
async def test_components_are_told_as_files_and_loras_as_whole_ones() -> None:
    desk = await Desk().open()
    await desk.submit(request(loras=[LoraChoice(name="light")]))
    lora = FakeCatalog().lora_spec(FakeCatalog().find_lora("light", 1.0)).key
    wanted = (key(Role.DIFFUSION_MODEL), lora, ComponentKey("nobody/knows@this"))
    desk.controller._dispatcher._carry_out(Prefetch(GPU, 1, wanted))
    model = FilePart("/models/shapes.safetensors", Role.DIFFUSION_MODEL)
    assert desk.fleet.read_ahead_asked[-1] == (GPU, (model, FilePart("/loras/light.safetensors")))


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
        desk.controller._dispatcher._carry_out(command)
    assert len(desk.fleet.read_ahead_asked) == asked
