"""`modelpool inspect`: identifies a file or folder of weights, a list of keys, or an output file."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.request.video_output_fields import AUDIO_FORMATS, FORMATS, SHARED_FORMATS, VIDEO_FORMATS
from modelpool.pool.values.core.errors import (
    CorruptFile,
    UnknownArchitecture,
    UserError,
    counted,
    format_bytes,
    unusable_field,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.actors.config.config import ModelsSection, PoolConfig
    from modelpool.actors.graph.features.recipe import Recipe
    from modelpool.pool.families.detection.file_facts import FileFacts
    from modelpool.pool.models.loading.describe import CheckpointInfo, LoraInfo
    from modelpool.pool.values.core.fast_path import FastPath

#: metadata values of training tools can have kilobytes
_MOST_CHARACTERS = 200
#: after a fact that the file does not state
_USUAL = " (usual for the family)"
_MOST_NAMES = 5


_CHECK = "Read all weights and check that they are finite numbers; exits with 2 if not."
Check = Annotated[bool, typer.Option("--check", help=_CHECK, metavar=" ", show_default=False)]


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """The result of an inspection, as JSON values and as tables."""

    plain: dict[str, Any]
    tables: tuple[RenderableType, ...]


def inspect_file(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A .safetensors, .png, .mp4 or .wav file, a folder of weights, a .json list of keys and shapes, "
            "or the URL of an output.",
            show_default=False,
        ),
    ],
    check: Check = False,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """Identify a FILE: a checkpoint or a part of one, a LoRA (with matching models), or the recipe of an output.

    Weights are identified by the names and shapes of their tensors: family, size, storage, components, and whether
    this version can run them. A folder may be a diffusers folder or contain loose files.
    """
    from modelpool.actors.cli.terminal.screen import print_json, show, user_console

    where = PoolOptions(config=config, allow_pickle=allow_pickle)
    with _on_this_machine(file) as path:
        found = inspect_path(path, where)
        if check:
            found = _checked(path, found, where)
    if as_json:
        print_json(sys.stdout, found.plain)
        return
    console = user_console(sys.stdout)
    for part in found.tables:
        show(console, part)


@contextlib.contextmanager
def _on_this_machine(file: str) -> Iterator[Path]:
    """The path of a file, or of a copy of an output in an object store. Raises UserError."""
    from modelpool.actors.config.output_address import output_address
    from modelpool.actors.outputs.store import OutputStore

    address = output_address(file, "FILE")
    if isinstance(address, Path):
        yield address
        return
    store, _, name = address.rpartition("/")
    endings = tuple(f".{ending}" for ending in FORMATS)
    if not name.lower().endswith(endings):
        raise unusable_field("FILE", file, f"a path, or the URL of an output that ends in {', '.join(endings)}")
    with OutputStore(store).local_file(name) as path:
        yield path


def inspect_path(file: Path, options: PoolOptions) -> Findings:
    """Inspect `file`. Raises UserError if it is not recognised."""
    if file.is_dir():
        return _folder(file, options)
    from modelpool.actors.outputs.image_metadata import is_image

    if not file.is_file():
        raise UserError(f"{file}: no such file")
    with file.open("rb") as opened:
        start = opened.read(16)
    if is_image(start):
        return _image(file)
    if file.suffix.lower().removeprefix(".") in {*VIDEO_FORMATS, *AUDIO_FORMATS} - SHARED_FORMATS:
        return _video(file)
    return _key_list(file) if _is_key_list(file) else _weights(file, options)


def _checked(file: Path, found: Findings, options: PoolOptions) -> Findings:
    """Add the check of all weights to `found`. Raises CorruptFile naming tensors with non-finite numbers."""
    from modelpool.actors.cli.models.inspect_weights import files_of_weights
    from modelpool.actors.cli.terminal.tables import facts_table
    from modelpool.pool.weights.quant.mapped_file import check_finite
    from modelpool.pool.weights.quant.open_weights import open_weights

    if found.plain["kind"] in ("image", "video", "audio") or _is_key_list(file):
        raise UserError(f"--check: {file} contains no weights; expected a file or folder of weights")
    for each in files_of_weights(file):
        check_finite(open_weights(each, allow_pickle=_models(options).allow_pickle).mapped)
    tables = facts_table([("checked", "all weights are finite numbers")])
    return Findings({**found.plain, "finite": True}, (*found.tables, tables))


def _is_key_list(file: Path) -> bool:
    from modelpool.pool.files.formats.model_description import is_description
    from modelpool.pool.files.formats.shard_index import is_index

    return file.is_file() and file.suffix == ".json" and not is_index(file) and not is_description(file)


def _models(options: PoolOptions) -> ModelsSection:
    return _settings(options).models


def _settings(options: PoolOptions) -> PoolConfig:
    from modelpool.actors.cli.terminal.open_pool import settings_for

    return settings_for(options)


def _weights(file: Path, options: PoolOptions) -> Findings:
    """Inspect a file of weights: runnable ones as checkpoints, others with the reason."""
    from modelpool.actors.cli.models.inspect_weights import file_facts
    from modelpool.pool.families.detection.file_facts import Kind
    from modelpool.pool.models.loading.describe import describe, describe_lora
    from modelpool.pool.models.loading.recognition_input import recognise_file

    allow_pickle = _models(options).allow_pickle
    facts = recognise_file(file, allow_pickle=allow_pickle)
    try:
        path = _settings(options).pool.fast_paths.of(file.stem)
        return _checkpoint(describe(file, allow_pickle=allow_pickle), facts, _sha256(file, options), path)
    except UnknownArchitecture as problem:
        if facts.kind is Kind.LORA:
            info = describe_lora(file, allow_pickle=allow_pickle)
            return _lora(info, _sha256(file, options), options)
        if facts.kind is Kind.UNKNOWN:
            raise
        plain, tables = file_facts(file, facts, str(problem).removeprefix(f"{file}: "))
        return Findings(plain, tables)


def _key_list(file: Path) -> Findings:
    from modelpool.actors.cli.models.inspect_weights import file_facts
    from modelpool.pool.models.loading.recognition_input import recognise_key_list

    return Findings(*file_facts(file, recognise_key_list(file)))


def _folder(folder: Path, options: PoolOptions) -> Findings:
    from modelpool.actors.cli.models.inspect_weights import folder_facts
    from modelpool.actors.cli.terminal.tables import facts_table
    from modelpool.pool.models.loading.recognition_input import recognise_folder

    facts = recognise_folder(folder)
    plain, tables = folder_facts(folder, facts)
    if not facts.pipeline:
        return Findings(plain, tables)
    runs, description = _runs(folder, _models(options).allow_pickle)
    return Findings(
        {**plain, "runs": runs, "problem": "" if runs else description}, (*tables, facts_table([("runs", description)]))
    )


def _runs(folder: Path, allow_pickle: bool) -> tuple[bool, str]:
    """Return whether this version runs the model in a diffusers folder, and as what or why not."""
    from modelpool.pool.models.loading.describe import describe

    try:
        info = describe(folder, allow_pickle=allow_pickle)
    except UserError as problem:
        return False, str(problem).removeprefix(f"{folder}: ")
    return True, f"as {info.title}, {info.width}x{info.height} pixels"


def _recipe_lines(file: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """Return the lines of a recipe. Raises UserError if its values have wrong types."""
    from modelpool.actors.cli.models.recipe_table import recipe_facts

    try:
        return recipe_facts(recipe)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{file}: the recipe in this file cannot be read ({error})") from error


def _image(file: Path) -> Findings:
    from modelpool.actors.cli.terminal.tables import facts_table
    from modelpool.actors.outputs.image_file import read_parameters, read_recipe

    try:
        recipe = read_recipe(file)
    except UserError as no_recipe:
        try:
            parameters = read_parameters(file)
        except UserError:
            raise no_recipe from None
        facts = [("prompt", parameters.prompt), ("negative", parameters.negative), *parameters.values.items()]
        return Findings(
            {"kind": "image", "path": str(file), "parameters": dataclasses.asdict(parameters)},
            (facts_table([("image", f"{file} (A1111 parameters, no modelpool recipe)"), *facts]),),
        )
    plain = {"kind": "image", "path": str(file), "digest": recipe.digest, "recipe": recipe.as_json()}
    return Findings(plain, (facts_table([("image", str(file)), *_recipe_lines(file, recipe)]),))


def _video(file: Path) -> Findings:
    from modelpool.actors.cli.terminal.tables import facts_table
    from modelpool.actors.outputs.output_file import read_video_recipe

    recipe = read_video_recipe(file)
    kind = "video" if recipe.frames else "audio"
    plain = {"kind": kind, "path": str(file), "digest": recipe.digest, "recipe": recipe.as_json()}
    return Findings(plain, (facts_table([(kind, str(file)), *_recipe_lines(file, recipe)]),))


def _checkpoint(info: CheckpointInfo, recognised: FileFacts, sha256: str, path: FastPath) -> Findings:
    from modelpool.actors.cli.models.inspect_weights import predictions, sizes
    from modelpool.actors.cli.terminal.plain_values import plain_value
    from modelpool.actors.cli.terminal.tables import facts_table, rows_table

    facts = [
        ("checkpoint", info.path),
        ("family", info.title),
        ("size", f"{format_bytes(info.file_bytes)}, of which {format_bytes(info.other_bytes)} belong to no component"),
        ("native size", f"{info.width}x{info.height} pixels{_USUAL if info.is_usual_size else ''}"),
        ("sha256", sha256),
    ]
    rows = [
        (
            component.role.value.replace("_", " "),
            str(component.tensors),
            f"{component.parameters:,}",
            format_bytes(component.storage_bytes),
            ", ".join(f"{dtype} {format_bytes(count)}" for dtype, count in component.dtypes.items()),
        )
        for component in info.components
    ]
    headings = ("component", "tensors", "parameters", "in the file", "dtypes")
    device, decided, calls = _decisions(info, path)
    running = {"device": device, "components": decided, "calls": calls}
    plain = {
        "kind": "checkpoint",
        "sha256": sha256,
        **plain_value(info),
        "running": running,
        "recognised": plain_value(recognised),
    }
    stated = predictions(recognised.prediction)
    facts.append(("prediction", stated or f"{info.prediction}{_USUAL}"))
    table = rows_table(headings, rows, right=headings[1:4])
    here = facts_table(
        [
            ("on this machine", device),
            *((role.replace("_", " "), description) for role, description in decided.items()),
            ("model calls", calls),
        ]
    )
    found = facts_table(sizes(recognised.diffusion) if recognised.diffusion else ())
    return Findings(plain, (facts_table(facts), table, here, found, facts_table(_metadata(info.metadata))))


def _decisions(info: CheckpointInfo, path: FastPath) -> tuple[str, dict[str, str], str]:
    """Return the name of this machine's device, the casting decision and reason for each component, and how the
    diffusion model is called while it is resident, as `path` requests."""
    from modelpool.pool.devices.capabilities import default_device_kind, detect_capabilities
    from modelpool.pool.engine.load_decisions import component_operations

    kind = default_device_kind()
    found = detect_capabilities(kind)
    decided = {c.role.value: str(component_operations(c.role, c.dtypes, found)) for c in info.components}
    return found.name, decided, path.on(kind.value).words


def _lora(info: LoraInfo, sha256: str, options: PoolOptions) -> Findings:
    from modelpool.actors.cli.terminal.plain_values import plain_value
    from modelpool.actors.cli.terminal.tables import facts_table, rows_table

    matches = lora_matches(info, sha256, options)
    facts = [
        ("LoRA", info.path),
        ("kind", f"{', '.join(info.algorithms)}, {', '.join(info.styles)} key naming"),
        ("size", f"{format_bytes(info.file_bytes)} in {counted(info.tensors, 'tensor')}"),
        *((role.value.replace("_", " "), counted(count, "module")) for role, count in info.modules.items()),
        ("ranks", ", ".join(f"{rank} ({count})" for rank, count in info.ranks.items()) or "none"),
        ("alphas", ", ".join(f"{alpha:g} ({count})" for alpha, count in info.alphas.items()) or "none"),
        ("sha256", sha256),
    ]
    if info.unknown:
        more = f" and {len(info.unknown) - _MOST_NAMES} more" if len(info.unknown) > _MOST_NAMES else ""
        facts.append(("not recognised", ", ".join(info.unknown[:_MOST_NAMES]) + more))
    plain = {"kind": "lora", "sha256": sha256, "models": matches, **plain_value(info)}
    table = rows_table(("model", "matches"), [(m["model"], m["verdict"]) for m in matches])
    tables = (facts_table(facts), *((table,) if matches else ()), facts_table(_metadata(info.metadata)))
    return Findings(plain, tables)


def lora_matches(info: LoraInfo, sha256: str, options: PoolOptions) -> list[dict[str, Any]]:
    """Match the LoRA with each known model: counts of its keys, or the reason why it does not fit."""
    from modelpool.pool.catalog.catalog import Catalog
    from modelpool.pool.models.loading.open_model import OpenModel
    from modelpool.pool.values.core.stage_params import LoraRef

    models = _models(options)
    catalog = Catalog(
        models.folders, models.loras, "cpu", models.registry, True, models.allow_pickle, models.assemblies
    )
    lora = LoraRef(Path(info.path).stem, info.path, sha256, 1.0)
    found: list[dict[str, Any]] = []
    for listing in catalog.models():
        if listing.problem:
            continue
        try:
            match = OpenModel(catalog.find_model(listing.name), "cpu").match(lora)
        except UserError as refusal:
            found.append({"model": listing.name, "belongs": False, "verdict": f"no: {refusal}"})
            continue
        matched = f"{match.matched} of its {counted(match.total, 'key')} matched"
        verdict = f"yes: {match.warning or matched}"
        found.append({"model": listing.name, "belongs": True, "verdict": verdict})
    return found


def _metadata(metadata: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (
            key,
            value
            if len(value) <= _MOST_CHARACTERS
            else f"{value[:_MOST_CHARACTERS]}... ({counted(len(value), 'character')})",
        )
        for key, value in sorted(metadata.items())
    ]


def _sha256(file: Path, options: PoolOptions) -> str:
    """Return the SHA-256 that the registry keeps for the weights."""
    from modelpool.pool.catalog.registry.folder_scan import weights_file
    from modelpool.pool.catalog.registry.registry import open_registry

    models = _models(options)
    registry = open_registry(models.folders, models.loras, models.registry)
    try:
        return registry.hashes(weights_file(file)).sha256
    except OSError as error:
        raise CorruptFile(f"{file}: cannot be read: {error.strerror or error}") from error
