"""Tables of `modelpool inspect` for weights that this version does not run as a model: files, folders, key lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.pool.values.core.errors import counted as counted_noun
from modelpool.pool.values.core.errors import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.pool.families.detection.file_facts import ComponentFacts, FileFacts, FolderFacts, PredictionHint

_BILLION, _MILLION = 10**9, 10**6
#: title of upscalers
_UPSCALER = "an upscaler"
#: how files that are not models are used, by the beginning of their titles
_USES = {
    "a ControlNet": "with a matching model: --control NAME=IMAGE",
    "a T2I-Adapter": "with a matching model: --control NAME=IMAGE",
    "an IP-Adapter": "with a matching model: --image-prompt NAME=IMAGE",
    "a Redux": "with a matching model: --image-prompt NAME=IMAGE",
    "a textual inversion embedding": "in a prompt: embedding:NAME",
    _UPSCALER: "for outputs: --upscale NAME",
}
#: options of `modelpool models assemble` for parts of models, by the name of their kind
_PART_OPTIONS = {"VAE": "--vae", "text encoder": "--text-encoder", "vision encoder": "--vision-encoder"}


def file_facts(path: Path, facts: FileFacts, problem: str = "") -> tuple[dict[str, Any], tuple[RenderableType, ...]]:
    """Describe a file as JSON values and as tables; `problem` is why this version does not run it."""
    from modelpool.actors.cli.terminal.plain_values import plain_value
    from modelpool.actors.cli.terminal.tables import facts_table

    plain = {"kind": facts.kind.value, "path": str(path), **_without(plain_value(facts), "kind"), "problem": problem}
    lines = [("file", str(path)), ("description", verdict(facts))]
    use = _use(facts)
    if facts.title == _UPSCALER and problem:  # a list of keys has no problem, and no weights to read
        network, unknown = _network(path)
        plain, use = {**plain, "network": network}, "" if unknown else use
        problem = unknown or problem
        lines += [("network", network)] if network else []
    if problem and use:
        lines.append(("usage", use))
    elif problem:
        lines.append(("problem", problem))
    if facts.prediction:
        lines.append(("prediction", predictions(facts.prediction)))
    if facts.components and facts.other_tensors:
        rest = f"{_tensors(facts.other_tensors)} that belong to no component"
        lines.append(("other", rest + (f", {format_bytes(facts.other_bytes)}" if facts.other_bytes else "")))
    tables: list[RenderableType] = [facts_table(lines)]
    if facts.components:
        tables.append(components_table({str(i): each for i, each in enumerate(facts.components)}))
    if facts.diffusion is not None:
        tables.append(facts_table(sizes(facts.diffusion)))
    return plain, tuple(tables)


def _network(path: Path) -> tuple[str, str]:
    """Return the network of an upscaler, or else why this version does not run it."""
    from modelpool.pool.inference.upscalers.open_upscaler import upscaler_plan_of
    from modelpool.pool.values.core.errors import UserError

    try:
        # the caller has read the header; pickles run nothing
        return upscaler_plan_of(str(path), allow_pickle=True).title, ""
    except UserError as problem:
        return "", str(problem)


def _use(facts: FileFacts) -> str:
    """Return how a file that is not a model is used with one; empty for others."""
    if not facts.runs:
        return ""
    option = _PART_OPTIONS.get(facts.kind.value)
    if option and any(each.name for each in facts.components):
        return f"as part of a model: modelpool models assemble NAME {option} FILE ..."
    return next((use for title, use in _USES.items() if facts.title.startswith(title)), "")


def folder_facts(path: Path, facts: FolderFacts) -> tuple[dict[str, Any], tuple[RenderableType, ...]]:
    """Describe a folder as JSON values and as tables."""
    from modelpool.actors.cli.terminal.plain_values import plain_value
    from modelpool.actors.cli.terminal.tables import facts_table, rows_table

    plain = {"kind": "folder", "path": str(path), **plain_value(facts)}
    lines = [("folder", str(path)), ("description", facts.title)]
    if facts.pipeline:
        lines.append(("pipeline", facts.pipeline))
    if facts.prediction:
        lines.append(("prediction", predictions(facts.prediction)))
    lines += [(name, named) for name, named in facts.other.items()]
    tables: list[RenderableType] = [facts_table(lines)]
    if facts.components:
        tables.append(components_table(facts.components))
        models = [each for each in facts.components.values() if each.config and each.latent]
        tables += [facts_table(sizes(each)) for each in models[:1]]
    if facts.files:
        rows = [(name, *_kind_and_description(found)) for name, found in facts.files.items()]
        tables.append(rows_table(("file", "kind", "description"), rows))
    return plain, tuple(tables)


def files_of_weights(place: Path) -> tuple[Path, ...]:
    """Return the files of the weights at `place`: the file itself, or the files and shards of a folder.

    Raises CorruptFile and UnsafeFile for a damaged folder, and for a link that points outside it.
    """
    from modelpool.pool.files.formats.containment import contained
    from modelpool.pool.files.formats.model_folder import (
        CONFIG_FILES,
        is_model_folder,
        read_component,
        read_model_folder,
    )
    from modelpool.pool.files.formats.weights_file import loose_weights

    if not place.is_dir():
        return (place,)
    if is_model_folder(place):
        return tuple(Path(part.weights) for part in read_model_folder(place).components.values() if part.weights)
    if any((place / name).is_file() for name in CONFIG_FILES) and (own := read_component(place).weights):
        return (Path(own),)
    return tuple(contained(file, place) for file in loose_weights(place))


def verdict(facts: FileFacts) -> str:
    """Describe a file in one sentence: what it is, its size, and whether its family runs."""
    from modelpool.pool.families.detection.file_facts import Kind
    from modelpool.pool.families.supported import running_families, why_not

    if not facts.components:
        is_known = facts.kind is not Kind.UNKNOWN
        beyond = "" if facts.runs or not is_known else "; recognised, does not run: this version uses no such files"
        return f"{facts.title} ({_tensors(facts.other_tensors)}){beyond}"
    first = facts.diffusion or facts.components[0]
    description = f"recognised as {first.title} ({_size(first)})"
    if facts.diffusion is None or not first.name:
        return description
    if first.name in running_families():
        return f"{description}; its family runs"
    return f"{description}; recognised, does not run: {why_not(first.runs)}"


def components_table(components: Mapping[str, ComponentFacts]) -> RenderableType:
    """Build the table of components: description, size, storage and prefix."""
    from modelpool.actors.cli.terminal.tables import rows_table

    headings = ("component", "description", "tensors", "parameters", "in the file", "dtypes", "where")
    rows = [
        (
            each.kind.value,
            each.title or "-",
            str(each.tensors),
            f"{each.parameters:,}",
            format_bytes(each.storage_bytes) if each.dtypes else "-",
            ", ".join(f"{dtype} {format_bytes(count)}" for dtype, count in each.dtypes.items()) or "-",
            each.prefix or "-",
        )
        for each in components.values()
    ]
    return rows_table(headings, rows, right=headings[2:5])


def sizes(model: ComponentFacts) -> Iterable[tuple[str, str]]:
    """Yield the facts about a diffusion model in addition to its size."""
    if model.name:
        yield "family", model.name + (f" ({model.comfyui} in ComfyUI)" if model.comfyui else "")
    yield "architecture", f"{model.runs} (diffusers)" if model.runs else "not available in any dependency"
    yield "naming", model.naming
    if model.latent:
        yield "latents", model.latent
    for field, value in model.config.items():
        yield field, str(list(value) if isinstance(value, tuple) else value)


def predictions(hints: Iterable[PredictionHint]) -> str:
    """Return the prediction types of a model, with their sources."""
    return ", ".join(f"{hint.kind} ({hint.source})" for hint in hints)


def _size(component: ComponentFacts) -> str:
    return f"{counted(component.parameters)} parameters" + (f", {component.dtype}" if component.dtype else "")


def counted(parameters: int) -> str:
    """Format a number of parameters: 860 M, 3.3 B."""
    if parameters >= _BILLION:
        return f"{parameters / _BILLION:.1f} B"
    return f"{parameters / _MILLION:.0f} M" if parameters >= _MILLION else f"{parameters:,}"


def _tensors(count: int) -> str:
    return counted_noun(count, "tensor")


def _kind_and_description(found: FileFacts | str) -> tuple[str, str]:
    return ("problem", found) if isinstance(found, str) else (found.kind.value, verdict(found))


def _without(plain: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in names}
