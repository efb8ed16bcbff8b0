"""What a machine has, found without failing for want of anything, and oddities, with what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from modelpool.pool.devices.detection import Detected, capabilities_here, detect, torch_build
from modelpool.pool.devices.kind_names import ACCELERATORS, DeviceKind
from modelpool.pool.devices.memory_limits import HostMemory
from modelpool.pool.devices.nvml import GpuProcess, NvmlReading, find_nvml, read_nvml
from tests.pool.devices.fake_modules import GIB, Properties, UsualModule, every_accelerator, only
from tests.pool.devices.fake_nvml import FakeNvml

HOST = HostMemory(32 * GIB, 20 * GIB)
NOTHING = Path("/nowhere")
NO_NVML = NvmlReading(problem="the package nvidia-ml-py is not installed")


def look(nvml: NvmlReading = NO_NVML, cards: Path = NOTHING, amd: Path = NOTHING, **modules: Any) -> Detected:
    return detect(nvml, only(**modules), HOST, cards, amd)


@pytest.mark.parametrize("is_old", [True, False])
def test_nvml_tells_of_cards_and_of_who_uses_them(is_old: bool) -> None:
    nvml = FakeNvml(is_old=is_old)
    reading = read_nvml(nvml)
    assert (reading.driver, reading.problem, nvml.open_count) == ("580.1", "", 0)
    first, second = reading.cards
    assert (first.name, first.total_bytes, first.free_bytes) == ("NVIDIA GeForce RTX 4090", 24 * GIB, 20 * GIB)
    mine, hidden = first.processes
    assert mine == GpuProcess(os.getpid(), psutil.Process().name(), 3 * GIB)
    assert (hidden.name, hidden.used_bytes) == ("a process that is not visible from here", None)
    assert second.processes == ()
    assert reading.card("card-1") == reading.card("GPU-card-1") == second
    assert reading.card("card-7") is None


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlSystemGetDriverVersion"])
def test_an_nvml_that_fails_says_so_and_is_closed(function: str) -> None:
    nvml = FakeNvml(fails_in=function)
    reading = read_nvml(nvml)
    assert reading.cards == ()
    assert f"{function} failed" in reading.problem
    assert nvml.open_count == 0


def test_processes_that_are_not_told_are_none() -> None:
    reading = read_nvml(FakeNvml(fails_in="nvmlDeviceGetComputeRunningProcesses"))
    assert [card.processes for card in reading.cards] == [(), ()]


def test_instances_of_a_divided_card_are_counted_and_not_the_card() -> None:
    """Found in a review: the controller sized models for the complete card, which no worker has."""
    reading = read_nvml(FakeNvml(instances=2))
    assert [(card.uuid, card.total_bytes, card.generation) for card in reading.cards] == [
        ("MIG-100", 10 * GIB, (8, 9)),
        ("MIG-102", 10 * GIB, (8, 9)),
        ("GPU-card-1", 24 * GIB, (7, 5)),
    ]
    found = reading.card("102")
    assert found is not None
    assert found.free_bytes == 9 * GIB


def test_without_its_package_nvml_tells_nothing() -> None:
    assert "not installed" in read_nvml(None).problem
    read_nvml(find_nvml())  # whatever this machine has


def test_every_accelerator_is_found_in_the_order_of_choice() -> None:
    modules = {kind.value: module for kind, module in every_accelerator().items()}
    found = look(**modules)
    assert list(dict.fromkeys(device.kind for device in found.devices)) == list(ACCELERATORS)
    assert len(found.devices) == 2 * 5 + 2
    free_bytes = {device.kind: device.free_bytes for device in found.devices}
    assert {kind for kind, free in free_bytes.items() if free is not None} == {DeviceKind.MPS}
    assert found.host == HOST


def test_torch_says_what_it_was_built_for() -> None:
    assert torch_build().version == torch.__version__


def test_a_machine_with_nothing_has_no_problem() -> None:
    assert look() == Detected((), HOST, ())


def test_nvmls_account_of_a_card_goes_before_the_drivers() -> None:
    module = NoContext(Properties("NVIDIA GeForce RTX 4090", 24 * GIB, 8, 9, uuid="card-0"), count=1)
    (device,) = look(read_nvml(FakeNvml()), cuda=module).devices
    assert device.free_bytes == 20 * GIB
    assert [user.pid for user in device.users] == [os.getpid(), 1 << 30]


@pytest.mark.parametrize(
    ("name", "sees", "nvml", "found", "generation"),
    [
        ("cuda", 1, False, "NVIDIA A100", (8, 0)),
        ("cuda", 1, True, "NVIDIA GeForce RTX 4090", (7, 5)),
        ("cuda", 0, True, "NVIDIA GeForce RTX 4090", (7, 5)),  # the weaker of NVML's two
        ("cuda", 0, False, "an Nvidia GPU", (8, 0)),
        ("xpu", 0, True, "Intel GPU (XPU)", None),
        ("sim", 1, True, "simulated GPU", None),
        ("auto", 1, False, "NVIDIA A100", (8, 0)),
        ("auto", 0, True, "NVIDIA GeForce RTX 4090", (7, 5)),
        ("auto", 0, False, "an Nvidia GPU", (8, 0)),
    ],
)
def test_sizes_are_reckoned_for_the_cards_of_this_machine(
    name: str, sees: int, nvml: bool, found: str, generation: tuple[int, int] | None
) -> None:
    """Also in a process that Ray hides them from."""
    reading = read_nvml(FakeNvml()) if nvml else NO_NVML
    module = UsualModule(Properties("NVIDIA A100", 40 * GIB, 8, 0), count=sees)
    here = capabilities_here(name, reading, only(cuda=module))
    assert (here.name, here.generation) == (found, generation)


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_sizes_are_reckoned_without_initialising_cuda(name: str) -> None:
    """Found in a review: Ray no longer hides GPUs from actors without GPUs, and the controller initialised CUDA on each
    card of its node."""

    class Untouched(UsualModule):
        def __getattribute__(self, attribute: str) -> Any:
            raise AssertionError(f"torch.cuda.{attribute} initialises CUDA")

    here = capabilities_here(name, read_nvml(FakeNvml()), only(cuda=Untouched(Properties("a card", GIB))))
    assert here.name == "NVIDIA GeForce RTX 4090"


def test_a_lost_card_is_reckoned_as_any_other() -> None:
    lost = UsualModule(Properties("NVIDIA T4", GIB, 7, 5), is_lost=True)
    assert capabilities_here("cuda", NO_NVML, only(cuda=lost)).generation == (8, 0)


class NoContext(UsualModule):
    """As torch.cuda, where asking the driver for free bytes makes a context on the card, which takes its memory."""

    def mem_get_info(self, index: int) -> tuple[int, int]:
        raise AssertionError("this makes a context")


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "npu", "mlu"])
def test_a_card_is_not_asked_in_a_way_that_takes_its_memory(kind: str) -> None:
    """Found in a review: without NVML each card was asked by torch, against the doctor's word."""
    found = look(**{kind: NoContext(Properties("a card", 16 * GIB, 7, 5, uuid="elsewhere"), count=1)})
    (device,) = found.devices
    assert (device.free_bytes, device.capabilities.total_bytes) == (None, 16 * GIB)
    assert [p.remedy for p in found.problems] == (["pip install nvidia-ml-py"] if kind == "cuda" else [])


def test_without_nvml_it_is_told_what_is_not_known() -> None:
    found = look(cuda=NoContext(Properties("NVIDIA T4", 16 * GIB, 7, 5, uuid="elsewhere"), count=1))
    (problem,) = found.problems
    not_known = "what is free on the cards and who uses them is not known"
    assert problem.what == f"{not_known}: the package nvidia-ml-py is not installed"
    assert problem.remedy == "pip install nvidia-ml-py"
    assert not problem.is_broken


def test_what_does_not_load_or_does_not_answer_is_told_and_the_rest_is_found() -> None:
    lost = UsualModule(Properties("x", GIB), is_lost=True, count=1)
    found = look(
        rocm=lost, npu="torch_npu: is installed and cannot be loaded (X)", xpu=UsualModule(Properties("y", GIB))
    )
    assert [device.kind for device in found.devices] == [DeviceKind.XPU] * 2
    broken, odd = found.problems
    assert broken.is_broken
    assert "rocm:0 does not answer: device error" in broken.what
    assert not odd.is_broken
    assert "torch_npu" in odd.what


@pytest.mark.parametrize(
    ("cuda", "by", "said", "remedy"),
    [
        (
            None,
            "nvml",
            "an Nvidia card (NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 4090), and torch",
            "built for CUDA",
        ),
        (None, "files", "an Nvidia card, and torch", "install torch built for CUDA"),
        ("13.0", "files", "an Nvidia card that torch does not see", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_an_nvidia_card_that_is_not_used(
    cuda: str | None, by: str, said: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (tmp_path / "0000:01:00.0").mkdir()
    found = look(read_nvml(FakeNvml())) if by == "nvml" else look(cards=tmp_path)
    (problem,) = found.problems
    assert said in problem.what
    assert remedy in problem.remedy


@pytest.mark.parametrize(("hip", "remedy"), [(None, "torch built for ROCm"), ("7.0", "HSA_OVERRIDE_GFX_VERSION")])
def test_an_amd_card_that_is_not_used(
    hip: str | None, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    (tmp_path / "kfd").touch()
    (problem,) = look(amd=tmp_path / "kfd").problems
    assert remedy in problem.remedy
    assert look(amd=tmp_path / "kfd", rocm=UsualModule(Properties("x", GIB))).problems == ()
