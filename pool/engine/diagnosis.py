"""Explains what a pool would do with the devices of this machine: the decisions of other modules, with reasons.

Makes no rules of its own and uses no device memory. Input comes from `pool.devices.detection`;
`actors.cli.cluster.doctor` prints the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from modelpool.pool.devices.accelerator_memory import UNREPORTED_BYTES
from modelpool.pool.devices.capabilities import DeviceCapabilities, host_capabilities
from modelpool.pool.devices.copy_streams import COPY_STREAMS
from modelpool.pool.devices.detection import Detected, DetectedDevice, Problem
from modelpool.pool.devices.device_kinds import CPU_SHARE, DEFAULT_SIM_BYTES
from modelpool.pool.devices.kind_names import RAY_COUNTS, DeviceKind, choose_kind, host_kind
from modelpool.pool.devices.memory_limits import HostMemory
from modelpool.pool.devices.pinned_memory import SLOT_BYTES, SLOTS, pinned_budget_bytes
from modelpool.pool.devices.tested_versions import untested
from modelpool.pool.devices.torch_api import torch_private
from modelpool.pool.devices.uploads import AHEAD_BYTES
from modelpool.pool.devices.vram_policy import (
    LEAST_ROOM_BYTES,
    VramPolicy,
    capacity_bytes,
    choose_policy,
    reserve_for,
    rules_for,
)
from modelpool.pool.devices.workspaces import workspace_bytes
from modelpool.pool.engine.load_devices import (
    diffusion_first_place,
    diffusion_rest_place,
    text_encoder_place,
    vae_place,
)
from modelpool.pool.values.core.errors import format_bytes
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.attention import attention_priority
from modelpool.pool.weights.ops.layer_choice import FP8_WEIGHTS, dtype_name
from modelpool.pool.weights.patcher.compute_dtype import component_dtype
from modelpool.pool.weights.quant.formats import FORMATS

#: storage dtypes of diffusion models
_STORAGES = (torch.float16, torch.bfloat16, torch.float32, FP8_WEIGHTS)
#: example size of weights for decisions that depend on it
EXAMPLE_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class DiagnosisSettings:
    """Settings of the user. None means unset."""

    device: DeviceKind | None = None
    budget_bytes: int | None = None
    policy: VramPolicy | None = None
    reserve_bytes: int | None = None
    on_windows: bool = False
    on_wsl: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One decision: subject, choice and reason."""

    about: str
    chosen: str
    because: str


@dataclass(frozen=True, slots=True)
class DeviceDiagnosis:
    """One device and the decisions for it.

    free_bytes      currently free; None if the device does not report it, or was not queried because that uses its
                    memory
    reserve_bytes   of the free bytes, left to other programs
    capacity_bytes  available to a worker
    is_used         it is of the kind that a pool would use
    """

    device: DetectedDevice
    free_bytes: int | None
    reserve_bytes: int
    capacity_bytes: int
    policy: VramPolicy
    is_used: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result for the machine."""

    host: HostMemory
    pinned_budget_bytes: int
    devices: tuple[DeviceDiagnosis, ...]
    problems: tuple[Problem, ...]

    @property
    def is_usable(self) -> bool:
        """Whether a pool can run."""
        return not any(problem.is_broken for problem in self.problems)


def diagnose(detected: Detected, wanted: DiagnosisSettings) -> Diagnosis:
    """Return the decisions for the detected devices and the settings. Pure."""
    kind = _used_kind(detected, wanted)
    devices = [*detected.devices]
    if kind.computes_on_host:
        devices.append(_host_device(kind, detected.host, wanted.budget_bytes))
    problems = list(detected.problems)
    if not any(device.kind is kind for device in devices):
        there = ", ".join(sorted({device.kind.value for device in devices})) or "none"
        what = f"device {kind.value!r} is configured, but this machine has no {kind.facts.title} (found: {there})"
        problems.append(Problem(what, 'ask for another, or for "sim" or "cpu", which every machine has', True))
    problems += _notes(detected, wanted, kind)
    found = [_diagnose_device(device, detected.host, wanted, device.kind is kind) for device in devices]
    used = [one for one in found if one.is_used]
    full = [one for one in used if one.capacity_bytes < LEAST_ROOM_BYTES]
    problems += [_no_room(one, wanted, is_broken=len(full) == len(used)) for one in full]
    return Diagnosis(detected.host, pinned_budget_bytes(detected.host), tuple(found), tuple(problems))


def _used_kind(detected: Detected, wanted: DiagnosisSettings) -> DeviceKind:
    """The device kind of a pool on this machine, if Ray counts every GPU that it can count."""
    found = {device.kind for device in detected.devices}
    return choose_kind(wanted.device, found, bool(found & set(RAY_COUNTS)), wanted.policy is VramPolicy.DISABLED)


def _notes(detected: Detected, wanted: DiagnosisSettings, kind: DeviceKind) -> list[Problem]:
    if not detected.devices:
        what = "no GPU that torch can use: the CPU computes, which is slow"
        return [Problem(what, "nothing, for trying out; a GPU for more")]
    if kind is DeviceKind.SIM and wanted.device is None:
        other = detected.devices[0].kind
        what = f"there is a device of kind {other.value!r}, and a pool does not take it by itself"
        return [Problem(what, f'say so: device = "{other.value}" in [pool], or --device {other.value}')]
    if kind is DeviceKind.XPU:
        return [Problem("Ray counts Intel GPUs by the package dpctl alone", "install dpctl where Ray finds no GPU")]
    return []


def _no_room(found: DeviceDiagnosis, wanted: DiagnosisSettings, is_broken: bool) -> Problem:
    device = found.device
    free = format_bytes(_assumed_free_bytes(device, wanted))
    users = ", ".join(f"{user.name} ({user.pid})" for user in device.users)
    what = f"{device.kind.value}:{device.index} has {free} free, and {format_bytes(found.reserve_bytes)} are reserved"
    if wanted.budget_bytes is not None:
        what += f", {format_bytes(wanted.budget_bytes)} are given (vram)"
    what += f"; a worker needs at least {format_bytes(LEAST_ROOM_BYTES)} of the rest"
    return Problem(what, f"end what uses it{f': {users}' if users else ''}; or reserve less (reserve_vram)", is_broken)


def _host_device(kind: DeviceKind, host: HostMemory, budget_bytes: int | None) -> DetectedDevice:
    """The CPU or a simulated GPU, as a worker with this budget opens it."""
    if kind is DeviceKind.SIM:
        size_bytes = free_bytes = budget_bytes or DEFAULT_SIM_BYTES
    else:
        size_bytes = budget_bytes or int(host.available_bytes * CPU_SHARE)
        free_bytes = min(size_bytes, host.available_bytes)
    return DetectedDevice(kind, 0, host_capabilities(kind, size_bytes), free_bytes)


def _diagnose_device(
    device: DetectedDevice, host: HostMemory, wanted: DiagnosisSettings, is_used: bool
) -> DeviceDiagnosis:
    capabilities = device.capabilities
    free_bytes = device.free_bytes
    policy = choose_policy(wanted.policy, device.kind, capabilities.shares_host_memory)
    reserve_bytes = reserve_for(wanted.reserve_bytes, device.kind, capabilities.total_bytes, wanted.on_windows)
    room_bytes = capacity_bytes(wanted.budget_bytes, _assumed_free_bytes(device, wanted), reserve_bytes)
    findings = (
        Finding("policy", f"{policy.value.value} ({_rules(policy.value)})", policy.reason),
        Finding("reserve", format_bytes(reserve_bytes), _reserve_reason(device.kind, wanted)),
        Finding("a worker may use", format_bytes(room_bytes), _capacity_reason(device, wanted)),
        *_dtypes(capabilities),
        *_places(policy.value, capabilities, room_bytes, host),
        _attention(capabilities),
        _packed(capabilities),
        *_copies(device.kind, host),
        *_beside_plans(capabilities, wanted.on_wsl),
    )
    return DeviceDiagnosis(device, free_bytes, reserve_bytes, room_bytes, policy.value, is_used, findings)


def _rules(policy: VramPolicy) -> str:
    rules = rules_for(policy)
    kept = "weights stay while there is room" if rules.keeps_idle else "weights leave after each run"
    if rules.weights_share == 0:
        return "all weights stream"
    return f"{kept}, {'the rest streams' if rules.may_stream else 'nothing streams'}"


def _assumed_free_bytes(device: DetectedDevice, wanted: DiagnosisSettings) -> int:
    """Free bytes for decisions: as reported, or the total if unknown."""
    if device.free_bytes is not None:
        return device.free_bytes
    if device.kind.facts.reports_memory:
        return device.capabilities.total_bytes
    return wanted.budget_bytes or UNREPORTED_BYTES


def _reserve_reason(kind: DeviceKind, wanted: DiagnosisSettings) -> str:
    if kind.computes_on_host:
        return "no other program uses it"
    return "default reserve for other programs" if wanted.reserve_bytes is None else "it is configured"


def _capacity_reason(device: DetectedDevice, wanted: DiagnosisSettings) -> str:
    if device.free_bytes is None and not device.kind.facts.reports_memory:
        return "the device does not report its memory: the setting vram, or 1 GiB, minus the reserve"
    if device.free_bytes is None:
        free = f"{format_bytes(device.capabilities.total_bytes)} if nothing else uses it, the reserve left out"
    elif device.kind.computes_on_host:
        free = f"{format_bytes(device.free_bytes)} are free now"
    else:
        free = f"{format_bytes(device.free_bytes)} are free now, of which the reserve is left out"
    given = "" if wanted.budget_bytes is None else f", and at most {format_bytes(wanted.budget_bytes)} is configured"
    return free + given


def _dtypes(capabilities: DeviceCapabilities) -> list[Finding]:
    """Compute dtype of each role; of a diffusion model for each storage dtype, if it differs."""
    chosen = [
        (f"diffusion model in {dtype_name(s)}", component_dtype(Role.DIFFUSION_MODEL, s, capabilities))
        for s in _STORAGES
    ]
    chosen.append(("text encoder", component_dtype(Role.TEXT_ENCODER, torch.float16, capabilities)))
    chosen.append(("VAE", component_dtype(Role.VAE, torch.float16, capabilities)))
    if len({choice.reason for _, choice in chosen}) == 1:
        chosen = [("every component", chosen[0][1])]
    return [Finding(about, f"computes in {dtype_name(choice.value)}", choice.reason) for about, choice in chosen]


def _places(policy: VramPolicy, capabilities: DeviceCapabilities, room_bytes: int, host: HostMemory) -> list[Finding]:
    """Suggested devices for components placed by hand; workers plan instead."""
    if capabilities.kind.computes_on_host:
        return []
    free_bytes = host.available_bytes
    first = diffusion_first_place(policy, EXAMPLE_BYTES, room_bytes, free_bytes)
    rest = diffusion_rest_place(policy)
    encoder, vae = text_encoder_place(policy, capabilities.float16), vae_place(policy)
    size = format_bytes(EXAMPLE_BYTES)
    return [
        Finding(f"by hand: {size} diffusion model", f"first on the {first.value}", first.reason),
        Finding("by hand: idle diffusion model", f"on the {rest.value}", rest.reason),
        Finding("by hand: text encoder", f"on the {encoder.value}", encoder.reason),
        Finding("by hand: VAE", f"on the {vae.value}", vae.reason),
    ]


def _attention(capabilities: DeviceCapabilities) -> Finding:
    order = attention_priority(capabilities)
    if not order:
        return Finding("attention", "torch's own choice", "only Nvidia cards have several kernels to choose from")
    generation = ".".join(map(str, capabilities.generation or ()))
    return Finding("attention", ", ".join(order), f"fastest first, of those that generation {generation} has")


def _packed(capabilities: DeviceCapabilities) -> Finding:
    """Quantized formats that the device could multiply without unpacking."""
    generation = capabilities.generation
    if capabilities.kind is not DeviceKind.CUDA or generation is None:
        return Finding("quantized weights", "unpacked at each use", "there are kernels for Nvidia cards only")
    native = [name for name, f in FORMATS.items() if f.native_from is not None and generation >= f.native_from]
    said = ".".join(map(str, generation))
    if not native:
        return Finding("quantized weights", "unpacked at each use", f"generation {said} multiplies none of the formats")
    chosen = f"unpacked at each use; optionally multiplied without unpacking: {', '.join(native)}"
    return Finding("quantized weights", chosen, f"generation {said} has kernels for these, which are less exact")


def _copies(kind: DeviceKind, host: HostMemory) -> Sequence[Finding]:
    if kind.facts.torch_type != "cuda":
        return (Finding("copies", "direct, one after the other", "copy streams and pinned memory are CUDA's"),)
    ring_bytes = min(SLOTS, pinned_budget_bytes(host) // SLOT_BYTES) * SLOT_BYTES
    ahead = f"{COPY_STREAMS} streams, up to {format_bytes(AHEAD_BYTES)} ahead"
    staging = f"through {format_bytes(ring_bytes)} of pinned memory" if ring_bytes else "without pinned memory"
    why = "half of the host's free memory, and no less than 2 GiB, is left to others"
    return (
        Finding("copies", ahead, "weights that do not fit stream in while the card computes"),
        Finding("staging", staging, why),
    )


def _beside_plans(capabilities: DeviceCapabilities, on_wsl: bool) -> Sequence[Finding]:
    """Memory that plans leave out, and how the allocator takes memory."""
    kind = capabilities.kind
    if kind is not DeviceKind.CUDA:
        return ()
    left_out = format_bytes(workspace_bytes(kind, capabilities.generation, capabilities.total_bytes, {}))
    segments = Finding("memory segments", "growing", "models of different sizes leave no gaps")
    if on_wsl:
        segments = Finding("memory segments", "of fixed size", "the driver of WSL may refuse segments that grow")
    return (
        Finding("workspaces", f"{left_out}, out of what a worker may use", "cuBLAS has one on each stream"),
        segments,
    )


def _self_test_problem(error: RuntimeError) -> Problem:
    return Problem(str(error), "install the torch that this release was made for: see constraints.txt", True)


def version_problems(installed: Mapping[str, str]) -> tuple[Problem, ...]:
    """Return a note for each untested version of the `installed` libraries. Tests the names inside diffusers' modules
    on which options depend if its version is untested."""
    found = [Problem(str(each), "nothing if it works; else a tested version") for each in untested(installed)]
    if any(each.library == "diffusers" for each in untested(installed)):
        from modelpool.pool.weights.patcher.blocks import diffusers_names

        try:
            diffusers_names.self_test()
        except Exception as error:  # whatever another version does
            found.append(Problem(f"diffusers {installed['diffusers']}: {error}", "install a tested version", True))
    return tuple(found)


def self_test_problems(seen: Collection[DeviceKind] = ()) -> tuple[Problem, ...]:
    """Return the behaviours that the pool requires and this torch lacks.

    Registers the device type `sim` for the process, unless the package of a vendor has taken torch's only slot for such
    types, or `seen` has a device kind with a package that takes it.
    """
    from modelpool.pool.devices.sim import device as sim

    others = [kind.facts.package for kind in seen if kind.facts.package is not None]
    claimed = torch_private.python_backend_name()
    try:
        torch_private.self_test()
        if host_kind() is not DeviceKind.SIM:
            return (
                Problem(f"torch {torch.__version__} cannot simulate GPUs", "nothing; for sim, torch 2.10 or newer"),
            )
        if not others and claimed in ("privateuseone", sim.BACKEND_NAME):
            sim.self_test()
            return ()
    except RuntimeError as error:
        return (_self_test_problem(error),)
    what = f"torch has one place for device types of other packages, and {others[0] if others else claimed} takes it"
    return (Problem(f"{what}: no simulated GPUs in addition", "nothing; for sim, an environment without that package"),)
