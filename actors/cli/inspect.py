"""`modelpool inspect`: what a file or folder of weights, a list of keys or an image is, from itself alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions
from modelpool.actors.request.video_output_fields import AUDIO_FORMATS, VIDEO_FORMATS
from modelpool.pool.core.errors import CorruptFile, UnknownArchitecture, UserError, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.actors.graph.recipe import Recipe
    from modelpool.actors.settings.config import ModelsSection
    from modelpool.pool.detection.facts import FileFacts
    from modelpool.pool.loading.describe import CheckpointInfo, LoraInfo

#: metadata of training tools run to kilobytes a value
_MOST_CHARACTERS = 200
_MOST_NAMES = 5


_CHECK = "Read every weight, and make sure that all are finite numbers; ends with 2 where one is not."
Check = Annotated[bool, typer.Option("--check", help=_CHECK, metavar=" ", show_default=False)]


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What was found: for programs, and for people."""

    plain: dict[str, Any]
    shown: tuple[RenderableType, ...]


def inspect_file(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .safetensors, .png, .mp4 or .wav file, a folder of weights, or a .json list of keys and shapes.",
            show_default=False,
        ),
    ],
    check: Check = False,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """Show what a FILE is: a checkpoint or a part of one, a LoRA (and which models it belongs to), an image's recipe.

    Weights are recognised from the names and shapes of their tensors: which family, how large, how stored, what is
    inside, and whether this version can run it. A folder may be one of diffusers or hold loose files.
    """
    from modelpool.actors.cli.screen import people_console, print_json, show

    where = PoolOptions(config=config, allow_pickle=allow_pickle)
    found = look_at(file, where)
    if check:
        found = _checked(file, found, where)
    if as_json:
        print_json(sys.stdout, found.plain)
        return
    console = people_console(sys.stdout)
    for part in found.shown:
        show(console, part)


def look_at(file: Path, options: PoolOptions) -> Findings:
    """What `file` is. Raises UserError when it is nothing of ours."""
    if file.is_dir():
        return _folder(file, options)
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    with file.open("rb") as opened:
        start = opened.read(8)
    if start.startswith(b"\x89PNG"):
        return _image(file)
    if file.suffix.lower().removeprefix(".") in (*VIDEO_FORMATS, *AUDIO_FORMATS):
        return _video(file)
    return _key_list(file) if _is_key_list(file) else _weights(file, options)


def _checked(file: Path, found: Findings, options: PoolOptions) -> Findings:
    """`found`, after every weight of `file` was read. Raises CorruptFile naming those that are not finite numbers."""
    from modelpool.actors.cli.inspect_weights import files_of_weights
    from modelpool.actors.cli.tables import facts_table
    from modelpool.pool.mapping.mapped_file import MappedFile, check_finite

    if found.plain["kind"] in ("image", "video", "audio") or _is_key_list(file):
        raise UserError(f"--check: {file} holds no weights, expected a file or folder of weights")
    for each in files_of_weights(file):
        check_finite(MappedFile.open(each, allow_pickle=_models(options).allow_pickle))
    shown = facts_table([("checked", "every weight is a finite number")])
    return Findings({**found.plain, "finite": True}, (*found.shown, shown))


def _is_key_list(file: Path) -> bool:
    from modelpool.pool.formats.model_description import is_description
    from modelpool.pool.formats.shard_index import is_index

    return file.is_file() and file.suffix == ".json" and not is_index(file) and not is_description(file)


def _models(options: PoolOptions) -> ModelsSection:
    from modelpool.actors.cli.open_pool import settings_for

    return settings_for(options).models


def _weights(file: Path, options: PoolOptions) -> Findings:
    """A file of weights: one that runs with what it would run as, anything else with why it does not."""
    from modelpool.actors.cli.inspect_weights import file_facts
    from modelpool.pool.detection.facts import Kind
    from modelpool.pool.loading.describe import describe, describe_lora
    from modelpool.pool.loading.recognition_input import recognise_file

    allow_pickle = _models(options).allow_pickle
    facts = recognise_file(file, allow_pickle=allow_pickle)
    try:
        return _checkpoint(describe(file, allow_pickle=allow_pickle), facts, _sha256(file, options))
    except UnknownArchitecture as problem:
        if facts.kind is Kind.LORA:
            info = describe_lora(file, allow_pickle=allow_pickle)
            return _lora(info, _sha256(file, options), options)
        if facts.kind is Kind.UNKNOWN:
            raise
        plain, shown = file_facts(file, facts, str(problem).removeprefix(f"{file}: "))
        return Findings(plain, shown)


def _key_list(file: Path) -> Findings:
    from modelpool.actors.cli.inspect_weights import file_facts
    from modelpool.pool.loading.recognition_input import recognise_key_list

    return Findings(*file_facts(file, recognise_key_list(file)))


def _folder(folder: Path, options: PoolOptions) -> Findings:
    from modelpool.actors.cli.inspect_weights import folder_facts
    from modelpool.actors.cli.tables import facts_table
    from modelpool.pool.loading.recognition_input import recognise_folder

    facts = recognise_folder(folder)
    plain, shown = folder_facts(folder, facts)
    if not facts.pipeline:
        return Findings(plain, shown)
    runs, said = _runs(folder, _models(options).allow_pickle)
    return Findings({**plain, "runs": runs, "problem": "" if runs else said}, (*shown, facts_table([("runs", said)])))


def _runs(folder: Path, allow_pickle: bool) -> tuple[bool, str]:
    """Whether this version runs the model in a folder of diffusers, and as what or why not."""
    from modelpool.pool.loading.describe import describe

    try:
        info = describe(folder, allow_pickle=allow_pickle)
    except UserError as problem:
        return False, str(problem).removeprefix(f"{folder}: ")
    return True, f"as {info.title}, {info.width}x{info.height} pixels"


def _recipe_lines(file: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """A recipe, line by line. Raises UserError for one with values of other types than a recipe has."""
    from modelpool.actors.cli.recipe_table import recipe_facts

    try:
        return recipe_facts(recipe)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{file}: the recipe in this file cannot be read ({error})") from error


def _image(file: Path) -> Findings:
    from modelpool.actors.cli.tables import facts_table
    from modelpool.actors.outputs.png import read_parameters, read_recipe

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
            (facts_table([("image", f"{file} (A1111 parameters; no recipe of modelpool)"), *facts]),),
        )
    plain = {"kind": "image", "path": str(file), "digest": recipe.digest, "recipe": recipe.as_json()}
    return Findings(plain, (facts_table([("image", str(file)), *_recipe_lines(file, recipe)]),))


def _video(file: Path) -> Findings:
    from modelpool.actors.cli.tables import facts_table
    from modelpool.actors.outputs.output_file import read_video_recipe

    recipe = read_video_recipe(file)
    kind = "video" if recipe.frames else "audio"
    plain = {"kind": kind, "path": str(file), "digest": recipe.digest, "recipe": recipe.as_json()}
    return Findings(plain, (facts_table([(kind, str(file)), *_recipe_lines(file, recipe)]),))


def _checkpoint(info: CheckpointInfo, recognised: FileFacts, sha256: str) -> Findings:
    from modelpool.actors.cli.inspect_weights import predictions, sizes
    from modelpool.actors.cli.plain_values import plain_value
    from modelpool.actors.cli.tables import facts_table, rows_table

    facts = [
        ("checkpoint", info.path),
        ("family", info.title),
        ("size", f"{format_bytes(info.file_bytes)}, of which {format_bytes(info.other_bytes)} belong to no component"),
        ("native size", f"{info.width}x{info.height} pixels"),
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
    headings = ("component", "tensors", "parameters", "in the file", "of it")
    device, decided = _decisions(info)
    running = {"device": device, "components": decided}
    plain = {
        "kind": "checkpoint",
        "sha256": sha256,
        **plain_value(info),
        "running": running,
        "recognised": plain_value(recognised),
    }
    if recognised.prediction:
        facts.append(("prediction", predictions(recognised.prediction)))
    table = rows_table(headings, rows, right=headings[1:4])
    here = facts_table(
        [("on this machine", device), *((role.replace("_", " "), said) for role, said in decided.items())]
    )
    found = facts_table(sizes(recognised.diffusion) if recognised.diffusion else ())
    return Findings(plain, (facts_table(facts), table, here, found, facts_table(_metadata(info.metadata))))


def _decisions(info: CheckpointInfo) -> tuple[str, dict[str, str]]:
    """This machine's device, and what each component would run with on it, and why."""
    from modelpool.pool.devices.capabilities import default_device_kind, detect_capabilities
    from modelpool.pool.engine.load_decisions import component_operations

    found = detect_capabilities(default_device_kind())
    decided = {c.role.value: str(component_operations(c.role, c.dtypes, found)) for c in info.components}
    return found.name, decided


def _lora(info: LoraInfo, sha256: str, options: PoolOptions) -> Findings:
    from modelpool.actors.cli.plain_values import plain_value
    from modelpool.actors.cli.tables import facts_table, rows_table

    matches = lora_matches(info, sha256, options)
    facts = [
        ("LoRA", info.path),
        ("kind", f"{', '.join(info.algorithms)}, keys named as {', '.join(info.styles)} does"),
        ("size", f"{format_bytes(info.file_bytes)} in {info.tensors} tensors"),
        *((role.value.replace("_", " "), f"{count} modules") for role, count in info.modules.items()),
        ("ranks", ", ".join(f"{rank} ({count})" for rank, count in info.ranks.items()) or "none"),
        ("alphas", ", ".join(f"{alpha:g} ({count})" for alpha, count in info.alphas.items()) or "none"),
        ("sha256", sha256),
    ]
    if info.unknown:
        more = f" and {len(info.unknown) - _MOST_NAMES} more" if len(info.unknown) > _MOST_NAMES else ""
        facts.append(("not understood", ", ".join(info.unknown[:_MOST_NAMES]) + more))
    plain = {"kind": "lora", "sha256": sha256, "models": matches, **plain_value(info)}
    table = rows_table(("model", "belongs to it"), [(m["model"], m["verdict"]) for m in matches])
    shown = (facts_table(facts), *((table,) if matches else ()), facts_table(_metadata(info.metadata)))
    return Findings(plain, shown)


def lora_matches(info: LoraInfo, sha256: str, options: PoolOptions) -> list[dict[str, Any]]:
    """How the LoRA meets each model that is known: the counts of its keys, in words where it does not belong."""
    from modelpool.pool.catalog.catalog import Catalog
    from modelpool.pool.core.stage_params import LoraRef
    from modelpool.pool.loading.open_model import OpenModel

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
        verdict = f"yes: {match.matched} of its {match.total} keys matched"
        found.append({"model": listing.name, "belongs": True, "verdict": verdict})
    return found


def _metadata(metadata: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (key, value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}... ({len(value)} characters)")
        for key, value in sorted(metadata.items())
    ]


def _sha256(file: Path, options: PoolOptions) -> str:
    """The hash that the registry knows the weights by, which remembers it."""
    from modelpool.pool.registry.folders import weights_file
    from modelpool.pool.registry.registry import open_registry

    models = _models(options)
    registry = open_registry(models.folders, models.loras, models.registry)
    try:
        return registry.hashes(weights_file(file)).sha256
    except OSError as error:
        raise CorruptFile(f"{file}: cannot be read: {error.strerror or error}") from error
