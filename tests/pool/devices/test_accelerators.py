"""Accelerators of every maker are opened, described and counted alike, through fakes of torch's modules for them.

Proves: free bytes are the driver's and the allocator's cached ones; other processes' memory is not; the budget is held
by the allocator; a kind that is not installed is never imported; host memory honours control groups.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import backend_registration

from modelpool.pool.devices import torch_modules
from modelpool.pool.devices.accelerator_memory import UNREPORTED_BYTES, AcceleratorMemory, memory_calls
from modelpool.pool.devices.allocator_settings import allocator_settings, prepare_segments
from modelpool.pool.devices.capabilities import HalfStorage, default_device_kind, detect_capabilities, rocm_bfloat16
from modelpool.pool.devices.device_kinds import CpuMemory, device_kind, open_device
from modelpool.pool.devices.kind_names import ACCELERATORS, DeviceKind
from modelpool.pool.devices.memory_limits import HostMemory
from modelpool.pool.devices.torch_api import torch_private
from modelpool.pool.devices.torch_modules import device_count, device_module
from modelpool.pool.values.core.errors import UnknownName, UserError
from tests.architecture.source_tree import ROOT
from tests.pool.devices.fake_modules import (
    GIB,
    AppleModule,
    DirectMlModule,
    Properties,
    UsualModule,
    every_accelerator,
    only,
)

HOST = HostMemory(32 * GIB, 20 * GIB)
USUAL = [k for k in ACCELERATORS if k not in (DeviceKind.MPS, DeviceKind.DIRECTML)]


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_every_kind_is_opened_by_its_name(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    module = every_accelerator()[kind]
    monkeypatch.setattr(
        torch_modules.torch, "device", lambda name, index: f"{name}:{index}"
    )  # torch knows not them all
    if kind is DeviceKind.DIRECTML:
        monkeypatch.setattr(module, "device", lambda index: f"privateuseone:{index}")
    opened = open_device(kind.value, 0, 3 * GIB, only(**{kind.value: module}))
    assert opened.kind is kind
    assert opened.torch_device == f"{kind.facts.torch_type}:0"
    assert opened.name.rstrip("\0") == opened.name != ""
    assert opened.memory.total_bytes() == 3 * GIB
    assert opened.memory.free_bytes() > 0
    assert opened.memory.transfers().h2d_bytes == 0
    opened.memory.reset_peak()
    opened.memory.release_cached()
    assert opened.memory.peak_bytes() == 0


@pytest.mark.parametrize("kind", USUAL)
@given(
    foreign=st.integers(0, 8),
    allocated=st.integers(0, 4),
    cached=st.integers(0, 4),
    given_gib=st.none() | st.integers(1, 32),
)
def test_what_is_free_is_the_drivers_and_the_caches(
    kind: DeviceKind, foreign: int, allocated: int, cached: int, given_gib: int | None
) -> None:
    module = UsualModule(Properties("a card", 16 * GIB), foreign_bytes=foreign * GIB)
    budget_bytes = None if given_gib is None else given_gib * GIB
    memory = AcceleratorMemory(memory_calls(kind, module, 1), budget_bytes)
    free_bytes = (16 - foreign) * GIB
    assert memory.total_bytes() == min(budget_bytes or free_bytes, free_bytes)
    assert module.shares.get(1, 1.0) == memory.total_bytes() / (16 * GIB)
    module.allocated_bytes, module.cached_bytes, module.peak_bytes = allocated * GIB, cached * GIB, 5 * GIB
    assert memory.free_bytes() == free_bytes - allocated * GIB
    assert memory.peak_bytes() == 5 * GIB
    memory.reset_peak()
    assert memory.peak_bytes() == allocated * GIB
    assert memory.cached_bytes() == cached * GIB
    memory.release_cached()
    assert module.cached_bytes == 0
    assert memory.free_bytes() == free_bytes - allocated * GIB
    module.foreign_bytes += 2 * GIB
    assert memory.free_bytes() == free_bytes - (allocated + 2) * GIB


def test_workspaces_of_cublas_are_freed_with_the_last_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: 32 MiB for each stream stayed, and counted as tensors that had leaked. Not before the last
    one: captured graphs of another engine write them."""
    module = UsualModule(Properties("x", 32 * GIB))
    freed: list[int] = []

    def clear() -> None:
        freed.append(module.allocated_bytes)
        module.cached_bytes, module.allocated_bytes = module.allocated_bytes, 0

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    for name in ("mem_get_info", "memory_allocated", "memory_reserved", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(module, name))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", module.get_per_process_memory_fraction)
    monkeypatch.setattr(torch.cuda, "empty_cache", module.empty_cache)
    first, second = (AcceleratorMemory(memory_calls(DeviceKind.CUDA, torch.cuda, 0), 8 * GIB) for _ in range(2))
    module.allocated_bytes = 64 << 20
    first.close()
    assert freed == []
    second.close()
    second.close()
    assert freed == [64 << 20]
    assert module.memory_reserved(0) == 0, "what was freed goes back to the driver"


def test_a_maker_without_a_cap_is_held_by_plans_alone() -> None:
    class Bare(UsualModule):
        set_per_process_memory_fraction = None  # type: ignore[assignment]

    memory = AcceleratorMemory(memory_calls(DeviceKind.NPU, Bare(Properties("x", 8 * GIB)), 0), GIB)
    assert memory.total_bytes() == GIB


def test_a_full_card_is_not_given_a_share_of_nothing() -> None:
    """A share of 0 means "no limit" to some allocators."""
    module = UsualModule(Properties("x", 8 * GIB), foreign_bytes=8 * GIB)
    memory = AcceleratorMemory(memory_calls(DeviceKind.CUDA, module, 0), None)
    assert (memory.total_bytes(), memory.free_bytes(), module.shares) == (0, 0, {})


def test_the_cap_of_the_process_is_the_sum_over_its_engines() -> None:
    """Found in a review: the cap of the second engine left out what the first one had, so that its plans could not be
    carried out; and nothing lifted a cap."""
    module = UsualModule(Properties("x", 32 * GIB), allocated_bytes=GIB)
    first = AcceleratorMemory(memory_calls(DeviceKind.CUDA, module, 0), 8 * GIB)
    assert module.shares[0] == pytest.approx(9 / 32), "and what the process has reserved besides"
    module.allocated_bytes += 6 * GIB
    second = AcceleratorMemory(memory_calls(DeviceKind.CUDA, module, 0), 8 * GIB)
    assert second.total_bytes() == 8 * GIB
    assert module.shares[0] == pytest.approx(17 / 32)
    third = AcceleratorMemory(memory_calls(DeviceKind.CUDA, module, 0), None)
    assert 0.99 < module.shares[0] < 1, "never the value that means no cap"
    third.close()
    third.close()
    assert module.shares[0] == pytest.approx(17 / 32)
    first.close()
    assert module.shares[0] == pytest.approx(8 / 32)
    second.close()
    assert module.shares[0] == 1


@pytest.mark.parametrize(
    ("kind", "environment", "platform", "expected"),
    [
        ("cuda", {}, "linux", "expandable_segments:True"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "linux",
         "max_split_size_mb:512,expandable_segments:True"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "linux", None),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "linux", None),
        ("cuda", {}, "win32", None),
        ("rocm", {}, "linux", None),
    ],
)  # fmt: skip
def test_segments_grow_unless_the_user_chose_otherwise(
    kind: str, environment: dict[str, str], platform: str, expected: str | None
) -> None:
    assert allocator_settings(DeviceKind(kind), environment, platform, "6.8.0-45-generic") == expected


def test_a_system_that_refuses_growing_segments_gets_fixed_ones(caplog: pytest.LogCaptureFixture) -> None:
    """WSL 2 fails later than at the first allocation, so it is known by name; other systems by a small allocation."""
    changes: list[str] = []

    def refuse_growing() -> None:
        if "expandable_segments:True" in (changes[-1] if changes else chosen):
            raise RuntimeError("CUDA driver error: unknown error")

    wsl, other = "6.6.87.2-microsoft-standard-WSL2", "6.8.0-45-generic"
    for chosen, release, expected, warned in (
        ("", wsl, [], False),
        ("", other, ["expandable_segments:True", "expandable_segments:False"], True),
        ("max_split_size_mb:512", other, ["max_split_size_mb:512,expandable_segments:True",
                                          "max_split_size_mb:512,expandable_segments:False"], True),
        ("expandable_segments:True", other, ["expandable_segments:False"], True),
        ("expandable_segments:False", other, [], False),
    ):  # fmt: skip
        changes.clear()
        caplog.clear()
        environment = {"PYTORCH_ALLOC_CONF": chosen} if chosen else {}
        prepare_segments(DeviceKind.CUDA, refuse_growing, changes.append, environment, release)
        assert changes == expected, chosen
        assert ("expandable_segments:True" in caplog.text) is warned, chosen

    def full() -> None:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):  # a full card is not a refusal
        prepare_segments(DeviceKind.CUDA, full, changes.append, {}, other)


def test_only_the_simulated_device_needs_a_torch_with_devices_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: an older torch could not even import the module that opens its GPU."""
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend")
    with pytest.raises(RuntimeError, match="has no devices in Python"):
        torch_private.register_python_backend("sim", object())


def test_apples_gpu_has_what_the_system_recommends_and_the_host_has() -> None:
    module = AppleModule(allocated_bytes=GIB, cached_bytes=2 * GIB)
    roomy = AcceleratorMemory(memory_calls(DeviceKind.MPS, module, 0, lambda: HOST), None)
    assert roomy.total_bytes() == 9 * GIB
    assert module.share == 9 / 12
    assert roomy.free_bytes() == 11 * GIB, "cached bytes are free"
    short = AcceleratorMemory(memory_calls(DeviceKind.MPS, module, 0, lambda: HostMemory(16 * GIB, 4 * GIB)), None)
    assert short.total_bytes() == 4 * GIB


@pytest.mark.parametrize("budget_bytes", [None, 4 * GIB])
def test_a_device_that_does_not_tell_its_memory_has_its_budget(budget_bytes: int | None) -> None:
    memory = AcceleratorMemory(memory_calls(DeviceKind.DIRECTML, DirectMlModule(), 0), budget_bytes)
    assert memory.total_bytes() == memory.free_bytes() == (budget_bytes or UNREPORTED_BYTES)


@pytest.mark.parametrize(("free", "expected"), [(20 * GIB, 8 * GIB), (3 * GIB, 3 * GIB)])
def test_the_cpu_has_what_its_control_group_leaves(free: int, expected: int) -> None:
    memory = CpuMemory(8 * GIB, lambda: HostMemory(64 * GIB, free))
    assert (memory.total_bytes(), memory.free_bytes()) == (8 * GIB, expected)
    assert CpuMemory(None, lambda: HostMemory(64 * GIB, free)).total_bytes() == free // 2


@pytest.mark.parametrize(
    ("kind", "index", "modules", "message"),
    [
        ("cuda", 0, {}, "device cuda:0: found 0 of kind Nvidia GPU"),
        ("cuda", 2, {"cuda": UsualModule(Properties("x", GIB))}, "device cuda:2: found 2 of kind Nvidia GPU"),
        ("xpu", 0, {"xpu": UsualModule(Properties("x", GIB), count=0)}, "device xpu:0: found 0"),
        ("npu", 0, {}, "found 0 of kind Ascend NPU in this process; is torch_npu installed?"),
        ("mlu", 0, {"mlu": "torch_mlu: is installed and cannot be loaded"}, "cannot be loaded"),
    ],
)
def test_what_is_not_there_is_named(kind: str, index: int, modules: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_device(kind, index, None, only(**modules))


def test_cuda_is_rocm_where_torch_was_built_for_it() -> None:
    assert device_kind("cuda", only(rocm=UsualModule(Properties("x", GIB)))) is DeviceKind.ROCM
    assert device_kind("cuda", only()) is DeviceKind.CUDA
    with pytest.raises(UnknownName, match="unknown device kind 'gpu'"):
        device_kind("gpu")


@pytest.mark.parametrize(
    ("kind", "module", "float16", "bfloat16", "shares"),
    [
        ("cuda", UsualModule(Properties("NVIDIA T4", 16 * GIB, 7, 5)), True, False, False),
        ("cuda", UsualModule(Properties("Orin", 16 * GIB, 8, 7, is_integrated=True)), True, True, True),
        ("rocm", UsualModule(Properties("RX 6800", 16 * GIB, gcnArchName="gfx1030")), True, False, False),
        ("rocm", UsualModule(Properties("MI210", 64 * GIB, gcnArchName="gfx90a:sramecc+:xnack-")), True, True, False),
        ("xpu", UsualModule(Properties("Arc", 16 * GIB)), True, True, False),
        ("xpu", UsualModule(Properties("Iris", 16 * GIB), bfloat16=False), True, False, False),
        ("npu", UsualModule(Properties("Ascend910", 32 * GIB)), True, True, False),
        ("mlu", UsualModule(Properties("MLU370", 32 * GIB, major=3)), True, False, False),
        ("mlu", UsualModule(Properties("MLU590", 32 * GIB, major=5)), True, True, False),
        ("directml", DirectMlModule(), True, False, False),
    ],
)
def test_what_devices_can_do(kind: str, module: Any, float16: bool, bfloat16: bool, shares: bool) -> None:
    found = detect_capabilities(DeviceKind(kind), 0, find_module=only(**{kind: module}))
    assert (found.float16, found.bfloat16, found.shares_host_memory) == (float16, bfloat16, shares)
    assert found.half_storage is HalfStorage.ALWAYS
    if kind != "directml":
        assert found.total_bytes == module.properties.total_memory
    part = detect_capabilities(DeviceKind(kind), 0, 5 * GIB, only(**{kind: module}))
    assert part.total_bytes == 5 * GIB


@pytest.mark.parametrize(("release", "has"), [("13.6.1", False), ("14.0", True), ("26.1", True), ("", False)])
def test_apples_gpu_has_bfloat16_from_macos_14_on(release: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), ""))
    found = detect_capabilities(DeviceKind.MPS, find_module=only(mps=AppleModule()))
    assert (found.bfloat16, found.shares_host_memory, found.total_bytes) == (has, True, 12 * GIB)


@pytest.mark.parametrize(
    ("architecture", "has"),
    [("gfx803", False), ("gfx906", False), ("gfx908", True), ("gfx90a", True), ("gfx942", True), ("gfx1010", False),
     ("gfx1030", False), ("gfx1100", True), ("gfx1201", True)],
)  # fmt: skip
def test_amds_architectures(architecture: str, has: bool) -> None:
    assert rocm_bfloat16(architecture) is has


@pytest.mark.parametrize(
    ("modules", "kind"),
    [
        ({}, DeviceKind.CPU),
        (
            {"cuda": UsualModule(Properties("x", GIB), count=0), "xpu": UsualModule(Properties("x", GIB))},
            DeviceKind.XPU,
        ),
        ({"mps": AppleModule(), "directml": DirectMlModule()}, DeviceKind.MPS),
        ({"npu": "torch_npu: cannot be loaded", "mlu": UsualModule(Properties("x", GIB))}, DeviceKind.MLU),
    ],
)
def test_the_kind_that_is_taken_unless_told_otherwise(modules: dict[str, Any], kind: DeviceKind) -> None:
    assert default_device_kind(only(**modules)) is kind


def test_this_machine_is_asked_without_importing_what_is_not_installed() -> None:
    """In a fresh interpreter, so that nothing else has imported it."""
    code = (
        "import sys\n"
        "from modelpool.pool.devices.kind_names import DeviceKind\n"
        "from modelpool.pool.devices.torch_modules import device_count, device_module\n"
        "assert all(device_count(device_module(kind)) >= 0 for kind in DeviceKind)\n"
        "print(sorted({'torch_npu', 'torch_mlu', 'torch_directml'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError("undefined symbol")

    monkeypatch.setattr(torch_modules.importlib.util, "find_spec", lambda name: name if name == "torch_npu" else None)
    monkeypatch.setattr(torch_modules.importlib, "import_module", refuse)
    with pytest.raises(UserError, match=r"torch_npu: is installed and cannot be loaded \(OSError: undefined symbol\)"):
        device_module(DeviceKind.NPU)
    assert device_module(DeviceKind.MLU) is None


@pytest.mark.parametrize("make", [lambda: None, lambda: UsualModule(Properties("x", GIB), count=0)])
def test_nothing_is_counted_where_there_is_nothing(make: Callable[[], Any]) -> None:
    assert device_count(make()) == 0
