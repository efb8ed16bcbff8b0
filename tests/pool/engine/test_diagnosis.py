"""Decisions for a machine's devices, and why, from values alone: machines that no test runs on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.devices.detection import Detected, detect
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.memory_limits import HostMemory
from modelpool.pool.devices.nvml import NvmlReading, read_nvml
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.diagnosis import DeviceDiagnosis, Diagnosis, DiagnosisSettings, diagnose, self_test_problems
from tests.pool.devices.fake_modules import GIB, AppleModule, DirectMlModule, Properties, UsualModule, only
from tests.pool.devices.fake_nvml import FakeNvml

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
HOST = HostMemory(64 * GIB, 40 * GIB)


def machine(nvml: NvmlReading | None = None, **modules: Any) -> Detected:
    return detect(nvml or NvmlReading(), only(**modules), HOST)


def used(diagnosis: Diagnosis) -> DeviceDiagnosis:
    (one,) = [d for d in diagnosis.devices if d.is_used]
    return one


def said(one: DeviceDiagnosis, about: str) -> tuple[str, str]:
    """What was chosen about that, and why."""
    (found,) = [f for f in one.findings if f.about == about]
    return found.chosen, found.because


def card(name: str, generation: tuple[int, int], gib: int = 24, **more: Any) -> UsualModule:
    return UsualModule(Properties(name, gib * GIB, *generation, **more), count=1)


def test_a_laptop_simulates() -> None:
    found = diagnose(machine(), DiagnosisSettings(budget_bytes=64 * MIB))
    assert found.is_usable
    assert used(found).device.kind is DeviceKind.SIM
    assert used(found).capacity_bytes == 64 * MIB
    assert said(used(found), "every component")[0] == "computes in float32"
    assert ["no GPU" in problem.what for problem in found.problems] == [True]


def test_a_large_card() -> None:
    ada = card("NVIDIA GeForce RTX 4090", (8, 9), uuid="card-0")
    one = used(diagnose(machine(read_nvml(FakeNvml()), cuda=ada), DiagnosisSettings()))
    assert (one.free_bytes, one.reserve_bytes, one.capacity_bytes) == (20 * GIB, 400 * MIB, 20 * GIB - 400 * MIB)
    assert one.policy is VramPolicy.NORMAL
    assert said(one, "diffusion model in bfloat16")[0] == "computes in bfloat16"
    assert said(one, "VAE")[0] == "computes in bfloat16"
    assert said(one, "attention") == (
        "flash, efficient, cudnn, math",
        "fastest first, of those that generation 8.9 has",
    )
    assert "float8_e4m3fn" in said(one, "quantized weights")[0]
    assert "nvfp4" not in said(one, "quantized weights")[0]
    assert said(one, "copies")[0].startswith("2 streams")
    assert said(one, "staging")[0] == "through 128.0 MiB of pinned memory"
    assert said(one, "workspaces")[0] == "36.4 MiB, out of what a worker may use"
    assert said(one, "memory segments")[0] == "growing"
    on_wsl = used(diagnose(machine(read_nvml(FakeNvml()), cuda=ada), DiagnosisSettings(on_wsl=True)))
    assert said(on_wsl, "memory segments")[0] == "of fixed size"


def test_an_old_card() -> None:
    one = used(diagnose(machine(cuda=card("NVIDIA GeForce GTX 1080", (6, 1), 8)), DiagnosisSettings()))
    for about in ("diffusion model in float16", "VAE"):
        assert said(one, about)[0] == "computes in float32"
    assert said(one, "by hand: text encoder") == (
        "on the host",
        "a device without fast float16 gains little over the CPU",
    )
    assert said(one, "quantized weights")[0] == "unpacked at each use"


@pytest.mark.parametrize(
    ("wanted", "reserve", "capacity", "why"),
    [
        (DiagnosisSettings(budget_bytes=8 * GIB), 400 * MIB, 8 * GIB, "at most 8.0 GiB is configured"),
        (DiagnosisSettings(budget_bytes=24 * GIB), 400 * MIB, 24 * GIB - 400 * MIB, "24.0 GiB if nothing else uses it"),
        (DiagnosisSettings(reserve_bytes=4 * GIB), 4 * GIB, 20 * GIB, "the reserve left out"),
        (DiagnosisSettings(reserve_bytes=0), 0, 24 * GIB, "24.0 GiB if nothing else uses it"),
        (DiagnosisSettings(on_windows=True), 700 * MIB, 24 * GIB - 700 * MIB, "24.0 GiB if nothing else uses it"),
    ],
)
def test_what_a_worker_may_use(wanted: DiagnosisSettings, reserve: int, capacity: int, why: str) -> None:
    one = used(diagnose(machine(cuda=card("NVIDIA A10", (8, 6))), wanted))
    assert (one.reserve_bytes, one.capacity_bytes) == (reserve, capacity)
    assert why in said(one, "a worker may use")[1]


def test_a_card_that_others_fill_is_broken_and_they_are_named() -> None:
    nvml = read_nvml(FakeNvml())
    full = diagnose(machine(nvml, cuda=card("RTX", (8, 9), uuid="card-0")), DiagnosisSettings(reserve_bytes=20 * GIB))
    assert not full.is_usable
    (problem,) = full.problems
    assert "cuda:0 has 20.0 GiB free, and 20.0 GiB are reserved" in problem.what
    assert "a process that is not visible from here" in problem.remedy


def test_one_full_card_of_two_is_no_end() -> None:
    """Found in a review: all was called broken, though the other worker runs. No worker starts with next to nothing."""
    both = UsualModule(Properties("RTX", 24 * GIB, 8, 9))
    devices = machine(cuda=both).devices
    full = replace(devices[1], free_bytes=400 * MIB + 60 * 1024)
    found = diagnose(Detected((devices[0], full), HOST, ()), DiagnosisSettings())
    assert found.is_usable
    (problem,) = found.problems
    assert "cuda:1 has 400.1 MiB free, and 400.0 MiB are reserved; a worker needs at least 64.0 KiB" in problem.what
    assert not diagnose(Detected((full,), HOST, ()), DiagnosisSettings()).is_usable


@pytest.mark.parametrize(
    ("modules", "wanted", "kind", "usable", "note"),
    [
        ({"mps": AppleModule()}, DiagnosisSettings(), DeviceKind.SIM, True, 'device = "mps"'),
        ({"xpu": card("Arc", (0, 0))}, DiagnosisSettings(), DeviceKind.XPU, True, "dpctl"),
        ({"mps": AppleModule()}, DiagnosisSettings(DeviceKind.MPS), DeviceKind.MPS, True, ""),
        (
            {"directml": DirectMlModule()},
            DiagnosisSettings(DeviceKind.DIRECTML, 4 * GIB),
            DeviceKind.DIRECTML,
            True,
            "",
        ),
        (
            {"rocm": card("RX", (11, 0), gcnArchName="gfx1100")},
            DiagnosisSettings(DeviceKind.CUDA),
            DeviceKind.ROCM,
            True,
            "",
        ),
        ({"rocm": card("RX", (11, 0), gcnArchName="gfx1100")}, DiagnosisSettings(), DeviceKind.ROCM, True, ""),
        ({}, DiagnosisSettings(DeviceKind.NPU), None, False, "no Ascend NPU (found: none)"),
        ({"cuda": card("A10", (8, 6))}, DiagnosisSettings(policy=VramPolicy.DISABLED), DeviceKind.CPU, True, ""),
        ({"cuda": card("A10", (8, 6))}, DiagnosisSettings(DeviceKind.SIM), DeviceKind.SIM, True, ""),
    ],
)
def test_which_device_is_used(
    modules: dict[str, Any], wanted: DiagnosisSettings, kind: DeviceKind | None, usable: bool, note: str
) -> None:
    found = diagnose(machine(**modules), wanted)
    assert [one.device.kind for one in found.devices if one.is_used] == ([] if kind is None else [kind])
    assert found.is_usable is usable
    assert note in " ".join(f"{problem.what} {problem.remedy}" for problem in found.problems)
    assert bool(found.problems) is bool(note)


def test_a_device_that_does_not_tell_its_memory() -> None:
    one = used(diagnose(machine(directml=DirectMlModule()), DiagnosisSettings(DeviceKind.DIRECTML, 4 * GIB)))
    assert (one.free_bytes, one.capacity_bytes) == (None, 4 * GIB - 400 * MIB)
    assert "does not report its memory" in said(one, "a worker may use")[1]


def test_every_decision_has_its_reason() -> None:
    modules = {"cuda": card("A10", (8, 6)), "xpu": card("Arc", (0, 0)), "mps": AppleModule()}
    for policy in (None, *VramPolicy):
        for one in diagnose(machine(**modules), DiagnosisSettings(policy=policy)).devices:
            assert all(finding.chosen and finding.because for finding in one.findings)


def test_this_torch_does_what_the_pool_builds_on() -> None:
    assert self_test_problems() == ()


@pytest.mark.parametrize("kind", [DeviceKind.NPU, DeviceKind.MLU, DeviceKind.DIRECTML])
def test_a_machine_whose_package_takes_torchs_place_for_devices_is_not_broken(kind: DeviceKind) -> None:
    """Found in a review: it was, because sim cannot be registered beside it."""
    (problem,) = self_test_problems({kind})
    assert not problem.is_broken
    assert f"{kind.facts.package} takes it: no simulated GPUs" in problem.what


def test_a_name_that_another_package_claimed_is_a_note_too() -> None:
    """In a process of its own: its torch keeps the name for good."""
    code = (
        "import torch; torch.utils.rename_privateuse1_backend('npu')\n"
        "from modelpool.pool.engine.diagnosis import self_test_problems\n"
        "print([(p.is_broken, 'npu takes it' in p.what) for p in self_test_problems()])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout.strip() == "[(False, True)]"
