"""`modelpool doctor`: what this machine has, what a pool decides from it and why, and what to do about what is wrong.

Starts nothing and takes no memory of a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.pool.devices.detection import TorchBuild
    from modelpool.pool.devices.kind_names import DeviceKind
    from modelpool.pool.devices.nvml import NvmlReading
    from modelpool.pool.engine.diagnosis import DeviceDiagnosis, Diagnosis, Wanted

EXIT_BROKEN = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Software:
    """What runs here."""

    modelpool: str
    python: str
    torch: TorchBuild
    driver: str
    ray: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Everything that the command tells."""

    software: Software
    diagnosis: Diagnosis


def doctor(
    device: options.Device = None,
    vram: options.Vram = None,
    vram_policy: options.Policy = None,
    reserve_vram: options.Reserve = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what this machine has and what is decided from it, with the reasons. Exits with 1 when no pool can run."""
    from modelpool.actors.cli.screen import people_console, print_json, show

    report = make_report(PoolOptions(config, None, device, vram, None, vram_policy, reserve_vram))
    if as_json:
        print_json(sys.stdout, as_plain(report))
    else:
        console = people_console(sys.stdout)
        for part in views(report):
            show(console, part)
    raise typer.Exit(0 if report.diagnosis.is_usable else EXIT_BROKEN)


def make_report(given: PoolOptions) -> Report:
    """Ask this machine. Raises UserError for an option or a configuration that is wrong."""
    from modelpool.pool.devices.detection import detect
    from modelpool.pool.devices.nvml import find_nvml, read_nvml
    from modelpool.pool.engine.diagnosis import diagnose, self_test_problems

    wanted = _wanted(given)
    nvml = read_nvml(find_nvml())
    found = detect(nvml)
    kinds = {device.kind for device in found.devices}
    found = dataclasses.replace(found, problems=found.problems + self_test_problems(kinds))
    return Report(_software(nvml), diagnose(found, wanted))


def as_plain(report: Report) -> dict[str, Any]:
    """The report as what JSON can say, and `usable`: whether a pool can run."""
    plain = _plain(report)
    assert isinstance(plain, dict), "a report is a dataclass"
    return {**plain, "usable": report.diagnosis.is_usable}


def views(report: Report) -> list[RenderableType]:
    """The report for people, a table a topic."""
    from modelpool.actors.cli.tables import facts_table, rows_table
    from modelpool.pool.core.errors import format_bytes

    software, diagnosis = report.software, report.diagnosis
    torch = software.torch
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "the CPU alone"
    facts = [
        ("modelpool", f"{software.modelpool}, Python {software.python}, Ray {software.ray}"),
        ("torch", f"{torch.version}, built for {built}"),
        *([("driver", f"Nvidia {software.driver}")] if software.driver else []),
        ("host memory", _host_line(diagnosis)),
        ("may be pinned", format_bytes(diagnosis.pinned_budget_bytes)),
    ]
    parts: list[RenderableType] = [facts_table(facts)]
    for one in diagnosis.devices:
        parts.append(facts_table(device_lines(one)))
        rows = [(finding.about, finding.chosen, finding.because) for finding in one.findings]
        parts.append(rows_table(("decided", "what", "because"), rows))
    if diagnosis.problems:
        rows = [("broken" if p.is_broken else "note", p.what, p.remedy) for p in diagnosis.problems]
        parts.append(rows_table(("", "what is not as it might be", "what to do"), rows))
    return parts


def _wanted(given: PoolOptions) -> Wanted:
    from modelpool.actors.cli.open_pool import settings_for
    from modelpool.pool.devices.kind_names import DeviceKind
    from modelpool.pool.engine.diagnosis import Wanted

    pool = settings_for(given).pool
    return Wanted(
        device=None if pool.device == "auto" else DeviceKind(pool.device),
        budget_bytes=pool.budget_bytes,
        policy=pool.policy,
        reserve_bytes=pool.reserve_bytes,
        on_windows=sys.platform == "win32",
    )


def _software(nvml: NvmlReading) -> Software:
    from modelpool.pool.devices.detection import torch_build

    return Software(
        modelpool=_version("modelpool"),
        python=sys.version.split()[0],
        torch=torch_build(),
        driver=nvml.driver,
        ray=_version("ray"),
    )


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _host_line(diagnosis: Diagnosis) -> str:
    import psutil

    from modelpool.pool.core.errors import format_bytes

    host, machine_bytes = diagnosis.host, int(psutil.virtual_memory().total)
    limited = f", a control group's limit (the machine has {format_bytes(machine_bytes)})"
    limit = limited if host.total_bytes < machine_bytes else ""
    return f"{format_bytes(host.available_bytes)} free of {format_bytes(host.total_bytes)}{limit}"


def device_lines(one: DeviceDiagnosis) -> list[tuple[str, str]]:
    """What one device is and has: names and texts."""
    from modelpool.pool.core.errors import format_bytes

    device = one.device
    title = device.kind.facts.title
    name = title if device.capabilities.name == title else f"{device.capabilities.name}, {title}"
    total = format_bytes(device.capabilities.total_bytes)
    memory = f"{format_bytes(one.free_bytes or 0)} free of {total}"
    if one.free_bytes is None:
        memory = f"{total}; free: not asked, {_why_not_asked(device.kind)}" if device.kind.facts.tells_memory else "?"
    users = [f"{u.name} ({u.pid})" + (f" {format_bytes(u.used_bytes)}" if u.used_bytes else "") for u in device.users]
    lines = [
        (f"{device.kind.value}:{device.index}", name + (", which a pool uses" if one.is_used else "")),
        ("memory", memory),
    ]
    return lines + ([("used by", ", ".join(users))] if users else [])


def _why_not_asked(kind: DeviceKind) -> str:
    if kind.value == "cuda":
        return "install nvidia-ml-py"
    return "since the answer takes memory of the device; its maker's own tool tells"


def _plain(value: Any) -> Any:
    """Dataclasses, enumerations and tuples as dictionaries, their values and lists."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
