"""`modelpool doctor`: reports this machine's devices, software and models, the settings a pool derives from them, and
problems.

Starts nothing and allocates no GPU memory.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import Without, with_option_groups
from modelpool.actors.cli.terminal.options import PoolOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.pool.devices.detection import Problem, TorchBuild
    from modelpool.pool.devices.kind_names import DeviceKind
    from modelpool.pool.devices.nvml import NvmlReading
    from modelpool.pool.engine.diagnosis import DeviceDiagnosis, Diagnosis, DiagnosisSettings

EXIT_BROKEN = 1
_NOT_INSTALLED = "not installed"


@dataclasses.dataclass(frozen=True, slots=True)
class Software:
    """Versions of the installed software."""

    modelpool: str
    python: str
    torch: TorchBuild
    driver: str
    ray: str


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files of weights that a pool started here would have: their number, the folders, and the reason if they cannot be
    listed. `is_example`: only the example model is there. `sources`: the sources of [models]; their files are not
    counted."""

    count: int
    folders: tuple[str, ...]
    is_example: bool = False
    problem: str = ""
    sources: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The complete report."""

    software: Software
    diagnosis: Diagnosis
    weights: WeightFiles


@with_option_groups
def doctor(
    *,
    where: Annotated[PoolOptions, Without.of("gpus", "allow_pickle", "pool")],
    as_json: options.AsJson = False,
) -> None:
    """Show the devices of this machine, the settings chosen for them with reasons, and suggestions. Exits with 1 if
    no pool can run.
    """
    from modelpool.actors.cli.terminal.screen import print_json, show, user_console

    report = make_report(where)
    if as_json:
        print_json(sys.stdout, as_plain(report))
    else:
        console = user_console(sys.stdout)
        for part in views(report):
            show(console, part)
    raise typer.Exit(0 if report.diagnosis.is_usable else EXIT_BROKEN)


def make_report(settings: PoolOptions) -> Report:
    """Inspect this machine. Raises UserError for a wrong option or configuration."""
    from modelpool.pool.devices.detection import detect
    from modelpool.pool.devices.nvml import find_nvml, read_nvml
    from modelpool.pool.devices.tested_versions import TESTED
    from modelpool.pool.engine.diagnosis import diagnose, self_test_problems, version_problems

    wanted = _requested_settings(settings)
    nvml = read_nvml(find_nvml())
    found = detect(nvml)
    kinds = {device.kind for device in found.devices}
    weights = find_weights(settings)
    problems = (*found.problems, *self_test_problems(kinds), *version_problems(_installed(TESTED)))
    found = dataclasses.replace(found, problems=(*problems, *_weight_problems(weights)))
    return Report(_software(nvml), diagnose(found, wanted), weights)


def find_weights(settings: PoolOptions) -> WeightFiles:
    """Count the files of weights that a pool started here would find, without opening them. Raises UserError for a
    wrong configuration."""
    from modelpool.actors.cli.terminal.open_pool import settings_for
    from modelpool.actors.config.example_model import example_folder
    from modelpool.pool.catalog.registry.registry import open_registry
    from modelpool.pool.values.core.errors import UserError

    models, example = settings_for(settings).models, example_folder()
    try:
        registry = open_registry(models.folders, models.loras, models.registry, assemblies=models.assemblies)
        places = [location.path for location in registry.locations()]
        count = len(registry.scan().files)
    except (UserError, OSError) as error:
        return WeightFiles(0, tuple(map(str, models.folders)), problem=str(error), sources=len(models.sources))
    is_example = example is not None and bool(places) and all(path.is_relative_to(example) for path in places)
    return WeightFiles(count, tuple(map(str, places)), is_example, sources=len(models.sources))


def _weight_problems(weights: WeightFiles) -> tuple[Problem, ...]:
    from modelpool.actors.config.example_model import WAYS_TO_MODELS
    from modelpool.pool.devices.detection import Problem

    if (weights.count or weights.sources) and not (weights.is_example or weights.problem):
        return ()
    own = "`modelpool models add FOLDER` adds your own files"
    if weights.is_example:
        fetch = "`modelpool models get ORG/NAME` fetches a model from the Hugging Face hub"
        return (Problem("only the example model is there", f"nothing, for trying out; {fetch}, and {own}"),)
    return (Problem(_weights_line(weights), f"{WAYS_TO_MODELS}; {own}"),)


def _weights_line(weights: WeightFiles) -> str:
    from modelpool.pool.values.core.errors import counted

    where = ", ".join(weights.folders) or "any folder"
    if weights.problem:
        return f"cannot be listed: {weights.problem}"
    files = f"{counted(weights.count, 'file')} of weights" if weights.count else "no files of weights"
    return f"{files} in {where}" + (f", and {counted(weights.sources, 'source')}" if weights.sources else "")


def as_plain(report: Report) -> dict[str, Any]:
    """Return the report as JSON values, plus `usable`: whether a pool can run."""
    plain = _plain(report)
    assert isinstance(plain, dict), "a report is a dataclass"
    return {**plain, "usable": report.diagnosis.is_usable}


def views(report: Report) -> list[RenderableType]:
    """Return the report as tables, one per topic."""
    from modelpool.actors.cli.terminal.tables import facts_table, rows_table
    from modelpool.pool.values.core.errors import format_bytes

    software, diagnosis = report.software, report.diagnosis
    torch = software.torch
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "CPU only"
    facts = [
        ("modelpool", f"{software.modelpool}, Python {software.python}, Ray {software.ray}"),
        ("torch", f"{torch.version}, built for {built}"),
        *([("driver", f"Nvidia {software.driver}")] if software.driver else []),
        ("host memory", _host_line(diagnosis)),
        ("pinnable", format_bytes(diagnosis.pinned_budget_bytes)),
        ("models", _weights_line(report.weights)),
    ]
    parts: list[RenderableType] = [facts_table(facts)]
    for one in diagnosis.devices:
        parts.append(facts_table(device_lines(one)))
        rows = [(finding.about, finding.chosen, finding.because) for finding in one.findings]
        parts.append(rows_table(("decided", "what", "because"), rows))
    if diagnosis.problems:
        rows = [("broken" if p.is_broken else "note", p.what, p.remedy) for p in diagnosis.problems]
        parts.append(rows_table(("", "suggestions", "remedy"), rows))
    return parts


def _requested_settings(settings: PoolOptions) -> DiagnosisSettings:
    from modelpool.actors.cli.terminal.open_pool import settings_for
    from modelpool.pool.devices.allocator_settings import is_wsl
    from modelpool.pool.devices.kind_names import DeviceKind
    from modelpool.pool.engine.diagnosis import DiagnosisSettings

    pool = settings_for(settings).pool
    return DiagnosisSettings(
        device=None if pool.device == "auto" else DeviceKind(pool.device),
        budget_bytes=pool.budget_bytes,
        policy=pool.policy,
        reserve_bytes=pool.reserve_bytes,
        on_windows=sys.platform == "win32",
        on_wsl=is_wsl(platform.release()),
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


def _installed(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    found = {name: _version(name) for name in distributions}
    return {name: version for name, version in found.items() if version != _NOT_INSTALLED}


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return _NOT_INSTALLED


def _host_line(diagnosis: Diagnosis) -> str:
    import psutil

    from modelpool.pool.values.core.errors import format_bytes

    host, machine_bytes = diagnosis.host, int(psutil.virtual_memory().total)
    limited = f", limited by a control group (the machine has {format_bytes(machine_bytes)})"
    limit = limited if host.total_bytes < machine_bytes else ""
    return f"{format_bytes(host.available_bytes)} free of {format_bytes(host.total_bytes)}{limit}"


def device_lines(one: DeviceDiagnosis) -> list[tuple[str, str]]:
    """Return names and values of one device."""
    from modelpool.pool.values.core.errors import format_bytes

    device = one.device
    title = device.kind.facts.title
    name = title if device.capabilities.name == title else f"{device.capabilities.name}, {title}"
    total = format_bytes(device.capabilities.total_bytes)
    memory = f"{format_bytes(one.free_bytes or 0)} free of {total}"
    if one.free_bytes is None:
        memory = f"{total}; free: unknown, {_why_unknown(device.kind)}" if device.kind.facts.reports_memory else "?"
    users = [f"{u.name} ({u.pid})" + (f" {format_bytes(u.used_bytes)}" if u.used_bytes else "") for u in device.users]
    lines = [
        (f"{device.kind.value}:{device.index}", name + (", used by pools" if one.is_used else "")),
        ("memory", memory),
    ]
    return lines + ([("used by", ", ".join(users))] if users else [])


def _why_unknown(kind: DeviceKind) -> str:
    if kind.value == "cuda":
        return "install nvidia-ml-py"
    return "as querying it would allocate device memory; use the vendor's tool"


def _plain(value: Any) -> Any:
    """Convert dataclasses, enumerations and tuples to dictionaries, values and lists."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
