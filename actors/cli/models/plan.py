"""`modelpool plan`: predicts how a model runs in a given amount of GPU memory, without running it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.request_options import NO_FIELDS, Fields, with_request_options
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.errors import UserError, counted, format_bytes, parse_bytes, unusable_field
from modelpool.pool.values.specs.spec import JobId, Stage

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.actors.cli.terminal.plots import Plot
    from modelpool.actors.config.config import ModelsSection, PoolConfig
    from modelpool.actors.control.forecast import Forecast, StageForecast
    from modelpool.actors.control.gang_forecast import GangForecast
    from modelpool.actors.graph.common.task_collector import JobGraph
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.pool.catalog.catalog import Catalog
    from modelpool.pool.engine.kernel_costs import KernelCost
    from modelpool.pool.values.specs.spec import ComponentKey
    from modelpool.pool.weights.plan.eviction_plan import ModuleBytes

#: assumed bytes per second to the GPU: pinned memory over PCIe 4.0 x8, or unpinned over x16
ASSUMED_LINK = "12GB"
_PLAN = "Plan"
_VRAM = "Memory to plan for: 24GiB, 64MiB (default: as configured; simulated GPUs and the CPU have their own defaults)."
_RESERVE = "Part of it to leave to other programs (default: as configured, else nothing)."
_PLOT = "Plot the seconds against GPU memory: as text, or to a FILE.svg, .png or .pdf."
_LINK = f"Bytes per second from host to GPU (default: {ASSUMED_LINK}, assumed)."
_GPU_LINK = "Bytes per second from one GPU to the others that share an output (default: as configured, else none)."
#: amounts of memory that a plot has points for, besides those at which the plan changes
PLOTTED = 24


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The result of `modelpool plan`.

    device_source, policy_source, link_source  where the value comes from
    link_bytes_per_second                      host to device
    reserve_bytes  of the memory, left to other programs
    ahead_bytes    of the memory, taken by copies ahead of computing, in addition to the plan
    batch_limit    the most images that the pool would run together
    batch_bytes    activations of each stage with all images in one run
    kernels        kernels for the quantized weights of each component, with their costs
    calls          how the diffusion model is called while it is resident
    curve          expected seconds of the images by bytes of memory, if a plot is wanted
    gangs          each number of GPUs that may share the sampling of an image, if several may
    gang_link_bytes_per_second  between these GPUs; 0 if it is not known
    """

    model: str
    device_kind: str
    device_source: str
    policy: str
    policy_source: str
    link_bytes_per_second: float
    link_source: str
    vram_bytes: int
    reserve_bytes: int
    ahead_bytes: int
    width: int
    height: int
    steps: int
    forecast: Forecast
    batch_limit: int
    job_file_batch: int
    job_file_batch_reason: str
    batch_bytes: dict[str, int]
    kernels: dict[str, tuple[KernelCost, ...]]
    calls: str
    curve: tuple[tuple[int, float], ...] = ()
    gangs: tuple[GangForecast, ...] = ()
    gang_link_bytes_per_second: float = 0.0


@with_request_options(("width", "loras", "steps", "cfg", "sampler", "vae_tile", "vae_frames", "upscale", "gpus"))
def plan_memory(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model name or path.", show_default=False)],
    vram: Annotated[str | None, options._option("--vram", _VRAM, _PLAN, "SIZE")] = None,
    fields: Fields = NO_FIELDS,
    batch: Annotated[int, options._option("--batch", "Number of images (default: 1).", _PLAN, "N")] = 1,
    prompt: Annotated[
        str, options._option("--prompt", "Prompt; only its length matters (default: empty).", _PLAN, "TEXT")
    ] = "",
    link: Annotated[str | None, options._option("--link", _LINK, _PLAN, "SIZE")] = None,
    gpu_link: Annotated[str | None, options._option("--gpu-link", _GPU_LINK, _PLAN, "SIZE")] = None,
    device: options.Device = None,
    vram_policy: options.Policy = None,
    reserve_vram: Annotated[str | None, options._option("--reserve-vram", _RESERVE, _PLAN, "SIZE")] = None,
    plot: Annotated[str | None, options._option("--plot", _PLOT, options._OUTPUT, "[FILE]")] = None,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """Show how generating images with a MODEL uses GPU memory, and how much slower a small GPU would be.

    Runs nothing and needs no GPU. The figures are those that a pool would plan with.
    """
    from modelpool.actors.cli.terminal.plots import plot_file, show_plots
    from modelpool.actors.cli.terminal.screen import print_json, show, user_console

    if batch < 1:
        raise unusable_field("--batch", batch, "a whole number from 1")
    file = plot_file(plot, as_json)
    where = PoolOptions(config=config, device=device, vram=vram, vram_policy=vram_policy, reserve_vram=reserve_vram)
    found = memory_plan(model, prompt, dict(fields), batch, link, where, PLOTTED if plot is not None else 0, gpu_link)
    console = user_console(sys.stdout)
    if as_json:
        print_json(sys.stdout, as_plain(found))
    else:
        for part in tables_of(found):
            show(console, part)
    if plot is not None:
        show_plots(
            user_console() if as_json else console, f"{found.model} on {found.device_kind}", plots_of(found), file
        )


def memory_plan(
    model: str,
    prompt: str,
    fields: dict[str, Any],
    batch: int,
    link: str | None,
    options: PoolOptions,
    plotted: int = 0,
    gpu_link: str | None = None,
) -> MemoryPlan:
    """Plan `batch` images, and with `plotted` in about so many other amounts of memory; with `gpu_link` as the speed
    between GPUs that share one. Raises UserError, and DoesNotFit if they cannot be generated in this memory."""
    from modelpool.actors.cli.terminal.open_pool import settings_for
    from modelpool.actors.control.forecast import Speeds, forecast, needs_most
    from modelpool.actors.control.gang_forecast import gang_forecasts
    from modelpool.actors.control.pool_plan import auto_batch_of
    from modelpool.actors.graph.build_graph import build_graph
    from modelpool.actors.graph.features.auto_batch import BatchTerms
    from modelpool.actors.graph.memory_fit import too_little_memory
    from modelpool.actors.request.field_table import AUTO_BATCH
    from modelpool.actors.request.placeholders import with_placeholders
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.pool.devices.kind_names import DeviceKind
    from modelpool.pool.devices.vram_policy import capacity_bytes as usable_bytes
    from modelpool.pool.devices.vram_policy import choose_policy, rules_for

    config = settings_for(options)
    link_bytes = _link_bytes("--link", link or ASSUMED_LINK)
    gang_link = _link_bytes("--gpu-link", gpu_link) if gpu_link else config.pool.gang_link_bytes_per_second or 0
    kind, kind_source = _device_kind(config)
    policy = choose_policy(config.pool.policy, DeviceKind(kind))
    rules = rules_for(policy.value)
    vram_bytes = config.pool.budget_bytes or _usual_bytes(kind)
    reserve_bytes = 0 if DeviceKind(kind).computes_on_host else config.pool.reserve_bytes or 0
    room_bytes = usable_bytes(None, vram_bytes, reserve_bytes)
    ahead_bytes = ahead_bytes_of(kind, room_bytes)
    capacity_bytes = room_bytes - ahead_bytes
    catalog = _catalog(config.models, kind)
    request = GenerateRequest(model=model, prompt=prompt, seed=0, **fields)
    request = with_placeholders(request, catalog.model_defaults(catalog.find_model(model)))
    recipe, graph = build_graph(request, JobId("planned"), catalog)
    terms = BatchTerms(dataclasses.replace(auto_batch_of(config), least_bytes=vram_bytes))
    of_file, _ = build_graph(request.model_copy(update={"batch": AUTO_BATCH}), JobId("planned"), catalog, terms)
    task, least_bytes = needs_most(graph, rules)
    if least_bytes > capacity_bytes:
        notes = "" if rules.may_stream else f" and all weights (policy {policy.value} does not stream)"
        notes += ", room for copies ahead" if ahead_bytes else ""
        notes += f", {format_bytes(reserve_bytes)} for other programs" if reserve_bytes else ""
        raise too_little_memory(task, memory_for(least_bytes, kind, reserve_bytes), vram_bytes, notes)

    def forecast_in(room_bytes: int) -> Forecast:
        ahead = ahead_bytes_of(kind, room_bytes)
        speeds = Speeds(link_bytes, overlaps=ahead > 0, ahead_bytes=ahead)
        return forecast(graph, room_bytes - ahead, speeds, batch, lambda key: _modules(catalog, graph, key), rules)

    found = forecast_in(room_bytes)
    holds_shares = rules.may_stream and rules.weights_share >= 1 and DeviceKind(kind) is not DeviceKind.CPU
    speeds = Speeds(link_bytes, overlaps=ahead_bytes > 0)
    gangs = gang_forecasts(graph, capacity_bytes, speeds, gang_link if holds_shares else 0)
    amounts = plotted_bytes(found, kind, reserve_bytes, vram_bytes, plotted) if plotted else ()
    curve = tuple((memory, forecast_in(usable_bytes(None, memory, reserve_bytes)).seconds) for memory in amounts)
    return MemoryPlan(
        model=recipe.model,
        device_kind=kind,
        device_source=kind_source,
        policy=policy.value.value,
        policy_source=policy.reason,
        link_bytes_per_second=link_bytes,
        link_source="from --link" if link else "assumed",
        vram_bytes=vram_bytes,
        reserve_bytes=reserve_bytes,
        ahead_bytes=ahead_bytes,
        width=recipe.width,
        height=recipe.height,
        steps=recipe.steps,
        forecast=found,
        batch_limit=config.scheduler.batch_limit,
        job_file_batch=of_file.batch or 1,
        job_file_batch_reason=of_file.batch_reason,
        batch_bytes=_batch_bytes(catalog, graph, request, batch) if batch > 1 else {},
        kernels=_kernels(catalog, model, kind, config.pool.products),
        calls=config.pool.fast_paths.of(recipe.model).on(kind).words,
        curve=curve,
        gangs=gangs,
        gang_link_bytes_per_second=gang_link,
    )


def _catalog(models: ModelsSection, kind: str) -> Catalog:
    from modelpool.pool.catalog.catalog import Catalog
    from modelpool.pool.catalog.registry.remote_models import open_remote

    remote = open_remote(models.sources, models.cache_settings)
    return Catalog(
        models.folders, models.loras, kind, models.registry, True, models.allow_pickle, models.assemblies, remote
    )


def plotted_bytes(found: Forecast, kind: str, reserve_bytes: int, vram_bytes: int, count: int) -> tuple[int, ...]:
    """Return amounts of memory to plot, ascending: `count` even ones from the minimum to beyond the last change of the
    plan, and the amounts at which it changes."""
    limits = [found.smallest_bytes, found.whole_bytes, *([found.resident_bytes] if found.resident_bytes else [])]
    changes = [memory_for(each, kind, reserve_bytes) for each in limits]
    least, most = changes[0], max(*changes, vram_bytes if vram_bytes < 2 * max(changes) else 0)
    most += (most - least) // 8
    even = (least + (most - least) * place // max(1, count - 1) for place in range(count))
    return tuple(sorted({*even, *changes, *([vram_bytes] if vram_bytes <= most else [])}))


def plots_of(found: MemoryPlan) -> list[Plot]:
    """Return the plot of the seconds against memory, with the amounts at which the plan changes."""
    from modelpool.actors.cli.terminal.plots import Limit, Plot, PlotLine, time_words

    made = found.forecast
    limits = [("no tiling from", made.whole_bytes), ("fully resident from", made.resident_bytes)]
    marks = tuple(
        Limit(name, memory_for(count, found.device_kind, found.reserve_bytes)) for name, count in limits if count
    )
    points = tuple((float(memory), seconds) for memory, seconds in found.curve)
    planned = float(found.vram_bytes) if points and found.vram_bytes <= points[-1][0] else None
    title = f"expected seconds of {counted(made.images, 'image')}, the first loads of weights included"
    line = PlotLine(f"{found.model}, from {format_bytes(int(points[0][0]))} on", points, planned) if points else None
    x_words: Callable[[float], str] = lambda memory: format_bytes(int(memory))  # noqa: E731
    return [Plot(title, "GPU memory", (line,) if line else (), x_words, time_words, x_limits=marks, is_bytes=True)]


def tables_of(found: MemoryPlan) -> tuple[RenderableType, ...]:
    """Return the plan as tables."""
    from modelpool.actors.cli.terminal.tables import facts_table

    made = found.forecast
    parts: list[RenderableType] = [facts_table(_settings_facts(found)), _stages_table("first image", made.first)]
    if made.again:
        parts.append(_stages_table("later images", made.again))
    why = [(stage.stage.value, sentence) for stage in made.first for sentence in stage.why]
    if why:
        parts.append(facts_table(why))
    if found.gangs:
        parts.append(_gangs_table(found))
    if found.kernels:
        parts.append(_kernels_table(found.kernels))
    parts.append(facts_table(_summary_facts(found)))
    return tuple(parts)


def as_plain(found: MemoryPlan) -> dict[str, Any]:
    """Return the plan as JSON values."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            more = {"slowdown": value.slowdown} if hasattr(value, "slowdown") else {}
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)} | more
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return getattr(value, "value", value)

    result: dict[str, Any] = plain(found)
    return result


def _settings_facts(found: MemoryPlan) -> list[tuple[str, str]]:
    parts = {"reserved for other programs": found.reserve_bytes, "used for copies ahead": found.ahead_bytes}
    taken = " and ".join(f"{format_bytes(count)} {use}" for use, count in parts.items() if count)
    link = f"{found.link_bytes_per_second / 1e9:.3g} GB/s, {found.link_source}"
    return [
        ("model", f"{found.model} at {found.width}x{found.height}, {counted(found.steps, 'step')}"),
        ("device", f"{found.device_kind} ({found.device_source})"),
        ("policy", f"{found.policy} ({found.policy_source})"),
        ("model calls", found.calls),
        ("memory", format_bytes(found.vram_bytes) + (f", of which {taken}" if taken else "")),
        ("speeds", f"link {link}; compute speed is a rough estimate (order of magnitude)"),
    ]


def _summary_facts(found: MemoryPlan) -> list[tuple[str, str]]:
    from modelpool.actors.cli.terminal.screen import counted, duration

    made = found.forecast
    facts = [
        (
            counted(made.images, "image"),
            f"one at a time: about {duration(made.seconds)}, {format_bytes(made.bus_bytes)} transferred",
        )
    ]
    passes = f"{counted(found.job_file_batch, 'image')} per forward pass"
    facts.append(("in a job file", f"{passes}: {found.job_file_batch_reason}"))
    if found.batch_bytes:
        activations = ", ".join(f"{stage} {format_bytes(count)}" for stage, count in found.batch_bytes.items())
        words = _batch_words(found.batch_limit, made.images)
        facts.append(("as one batch", f"activations of {activations}; {words}"))
    smallest, whole, resident = (
        format_bytes(memory_for(count, found.device_kind, found.reserve_bytes)) if count is not None else "never"
        for count in (made.smallest_bytes, made.whole_bytes, made.resident_bytes)
    )
    streams = "no streaming" if found.policy == VramPolicy.HIGH else "fully streamed"
    facts += [
        ("minimum", f"{smallest} ({streams}, tiled)"),
        ("no tiling from", whole),
        ("fully resident from", resident if made.resident_bytes is not None else f"never, with policy {found.policy}"),
    ]
    return facts


def _batch_words(limit: int, images: int) -> str:
    """Describe what the pool would batch; whether batching is faster is measured at run time."""
    if limit == 1:
        return "the pool runs one image at a time (batch_limit is 1)"
    so_many = "all" if limit >= images else f"up to {limit}"
    return f"with batch_limit {limit} the pool batches {so_many} images if they fit and batching is faster"


def _stages_table(title: str, stages: Sequence[StageForecast]) -> RenderableType:
    from modelpool.actors.cli.terminal.tables import rows_table

    headings = (
        title,
        "weights",
        "resident",
        "loaded",
        "streamed",
        "evicted",
        "activations",
        "scratch",
        "peak",
        "slower",
    )
    rows = [
        (
            stage.stage.value + (f", {stage.sampled_by}" if stage.sampled_by else "") + _divided(stage),
            format_bytes(stage.weight_bytes),
            _resident(stage),
            format_bytes(stage.upload_bytes),
            format_bytes(stage.streamed_bytes),
            format_bytes(sum(count for _, count in stage.evicted)),
            format_bytes(stage.activation_bytes),
            format_bytes(stage.scratch_bytes),
            format_bytes(stage.planned_bytes),
            f"{stage.seconds.slowdown:.2f}x",
        )
        for stage in stages
    ]
    return rows_table(headings, rows, right=headings[1:])


def _resident(stage: StageForecast) -> str:
    """Return the resident weights with their share; a join of parts has no weights."""
    if not stage.weight_bytes:
        return format_bytes(0)
    return f"{format_bytes(stage.resident_bytes)} ({stage.resident_bytes / stage.weight_bytes:.0%})"


def _gangs_table(found: MemoryPlan) -> RenderableType:
    """What each number of GPUs keeps, and gets in each step."""
    from modelpool.actors.cli.terminal.tables import rows_table

    speed = found.gang_link_bytes_per_second
    link = f"GPU link {speed / 1e9:.3g} GB/s" if speed else "GPU link unknown (--gpu-link): weights come from the host"
    headings = (f"GPUs that share a run, {link}", "resident", "held for all", "from GPUs", "from host", "per step")
    many = len({each.components for each in found.gangs}) > 1
    rows = [
        (
            str(each.gpus) + (f", {each.components[0]}" if many else ""),
            format_bytes(each.resident_bytes),
            format_bytes(each.share_bytes),
            f"{format_bytes(each.peer_bytes)}/step",
            f"{format_bytes(each.host_bytes)}/step",
            f"{each.step_seconds:.3g} s",
        )
        for each in found.gangs
    ]
    return rows_table(headings, rows, right=headings[1:])


def _kernels_table(kernels: dict[str, tuple[KernelCost, ...]]) -> RenderableType:
    from modelpool.actors.cli.terminal.tables import rows_table

    headings = ("quantized weights", "kernel", "layers", "traffic per call", "products", "")
    rows = [
        (
            f"{role.replace('_', ' ')}, {cost.format}",
            cost.kernel + (" (used)" if cost.is_used else ""),
            str(cost.layers),
            format_bytes(cost.traffic_bytes),
            f"{cost.rate:g}x",
            cost.why,
        )
        for role, costs in kernels.items()
        for cost in costs
    ]
    return rows_table(headings, rows, right=headings[2:5])


def _kernels(catalog: Catalog, model: str, kind: str, products: str) -> dict[str, tuple[KernelCost, ...]]:
    """Return the kernels for the quantized weights of each component, on the GPU of this machine if it is of this
    kind."""
    from modelpool.pool.devices.capabilities import capabilities_of, detect_capabilities
    from modelpool.pool.devices.kind_names import DeviceKind
    from modelpool.pool.engine.kernel_costs import kernel_costs
    from modelpool.pool.engine.load_decisions import stored_formats
    from modelpool.pool.weights.ops.layer_choice import Products

    try:
        card = detect_capabilities(DeviceKind(kind))
    except UserError:  # this machine has no such device
        card = capabilities_of(kind)
    found = {}
    for component in catalog.opened_components(catalog.find_model(model)):
        compute_bytes = component.form.compute_dtype.itemsize
        costs = kernel_costs(stored_formats(component.weights), compute_bytes, card, Products(products))
        if costs:
            found[component.role.value] = costs
    return found


def _divided(stage: StageForecast) -> str:
    return "" if stage.division is None else f", {stage.division.words}"


def _link_bytes(option: str, given: str) -> int:
    """Parse bytes per second. Raises UnusableField."""
    try:
        return parse_bytes(given)
    except UserError:
        raise unusable_field(option, given, "bytes per second, such as 12GB") from None


def _device_kind(config: PoolConfig) -> tuple[str, str]:
    """Return the device kind that a pool on this machine would use, and its source."""
    from modelpool.pool.devices.capabilities import default_device_kind
    from modelpool.pool.devices.kind_names import AUTO, RAY_COUNTS, DeviceKind, choose_kind

    is_disabled = config.pool.policy is VramPolicy.DISABLED
    requested = None if config.pool.device == AUTO else DeviceKind(config.pool.device)
    detected = () if requested is not None or is_disabled else (default_device_kind(),)
    has_gpus = any(kind in RAY_COUNTS for kind in detected)
    found = choose_kind(requested, detected, has_gpus, is_disabled).value
    if is_disabled:
        return found, "the policy disables GPUs"
    if requested is not None:
        return found, "from configuration"
    return found, "detected" if has_gpus else "no GPU detected that a pool would use by default"


def _usual_bytes(kind: str) -> int:
    from modelpool.pool.devices.device_kinds import DEFAULT_SIM_BYTES, CpuMemory

    if kind == "sim":
        return DEFAULT_SIM_BYTES
    if kind == "cpu":
        return CpuMemory(None).total_bytes()
    raise UserError("--vram is required: the memory to plan for, such as 8GiB")


def memory_for(capacity_bytes: int, kind: str, reserve_bytes: int = 0) -> int:
    """Return the least memory of such a device that leaves `capacity_bytes` after copies ahead and `reserve_bytes`."""
    memory_bytes = capacity_bytes
    while memory_bytes - ahead_bytes_of(kind, memory_bytes) < capacity_bytes:
        memory_bytes += capacity_bytes - (memory_bytes - ahead_bytes_of(kind, memory_bytes))
    return memory_bytes + reserve_bytes


def ahead_bytes_of(kind: str, vram_bytes: int) -> int:
    """Return the bytes that an engine keeps for copies ahead on a device of this kind."""
    from modelpool.pool.devices.uploads import AHEAD_BYTES
    from modelpool.pool.engine.engine import AHEAD_SHARE

    return min(AHEAD_BYTES, vram_bytes // AHEAD_SHARE) if kind in ("cuda", "rocm") else 0


def _modules(catalog: Catalog, graph: JobGraph, key: ComponentKey) -> Sequence[ModuleBytes]:
    from modelpool.pool.values.core.stage_params import (
        DecodeParams,
        OperationParams,
        OutputShape,
        UpscaleParams,
        upscaler_key,
    )

    task = next(t for t in graph.job.tasks if any(use.component == key for use in t.uses))
    work = graph.works[task.task_id]
    if isinstance(work, UpscaleParams):
        if work.vae is not None and key != upscaler_key(work.model):
            return catalog.figures.modules(work.vae, DecodeParams(work.vae, OutputShape(work.width, work.height)))
        return catalog.upscalers.modules(work)
    assert not isinstance(work, OperationParams), "operations use no component"
    return catalog.figures.modules(work.model, work)


def _batch_bytes(catalog: Catalog, graph: JobGraph, request: GenerateRequest, batch: int) -> dict[str, int]:
    """Return the activations of one run of all images by stage (the largest task of each stage); texts are encoded
    once in any case.
    """
    from modelpool.pool.values.core.stage_params import OperationParams, UpscaleParams

    tokens = catalog.text_tokens(catalog.find_model(request.model), request.prompt)
    most_bytes = {Stage.SAMPLE.value: 0, Stage.DECODE.value: 0}
    for task in graph.job.tasks:
        if task.stage.value in most_bytes:
            work = graph.works[task.task_id]
            if isinstance(work, UpscaleParams):
                needed_bytes = catalog.upscalers.execution_modes(work)[0].activation_bytes * batch
            elif not isinstance(work, OperationParams):  # which is of another stage
                needed_bytes = catalog.figures.batch_bytes(work.model, work, batch, tokens)
            most_bytes[task.stage.value] = max(most_bytes[task.stage.value], needed_bytes)
    return most_bytes
