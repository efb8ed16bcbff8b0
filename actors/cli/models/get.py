"""`modelpool models get`: copies the example model, or fetches one of the Hugging Face hub, into a folder of models.

Starts no pool. A fetch that was stopped or killed continues with the same command.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.models.opened_registry import model_settings, opened_registry
from modelpool.actors.cli.terminal import options
from modelpool.actors.config.example_model import (
    EXAMPLE_NAME,
    LORAS_FOLDER,
    MODELS_FOLDER,
    example_folder,
)
from modelpool.pool.values.core.errors import OutputFailed, UserError, format_bytes, unusable_field

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.hub_names import HubName
    from modelpool.pool.catalog.registry.registry import RegistryEntry
    from modelpool.pool.files.fetch.hub_download import DownloadPlan
    from modelpool.pool.files.fetch.hub_source import Hub, HubRevision, HubSource

GET_HELP = (
    "Fetch a model into a folder of models: `ORG/NAME[:FILE][@REVISION]` from the Hugging Face hub, or the example "
    "`shapes`, which needs no network.\n\nOnly weights, configurations and tokenizers are fetched, no pickles. A fetch "
    "that was stopped or killed continues with the same command. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have the "
    "meaning that they have for huggingface_hub."
)
_EXPECTED = f"ORG/NAME, ORG/NAME:FILE or ORG/NAME@REVISION of the Hugging Face hub, or {EXAMPLE_NAME}"
_FOLDER = "Folder of models (default: the first one of the configuration, else ./models)."
_VARIANT = 'Precision of the weights of a diffusers folder, such as "fp16" (default: the plain ones).'
_DRY_RUN = "Only print what would be fetched."
_FORCE = "Replace files of other content."

What = Annotated[str, typer.Argument(metavar="MODEL", help=_EXPECTED, show_default=False)]
Folder = Annotated[Path | None, typer.Option("--folder", help=_FOLDER, metavar="DIR", show_default=False)]
Variant = Annotated[str, typer.Option("--variant", help=_VARIANT, metavar="NAME", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help=_DRY_RUN, metavar=" ", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help=_FORCE, metavar=" ", show_default=False)]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where the files of a fetched model are. `paths` are the files, below `folder`; `commit` is "" for the example."""

    name: str
    folder: Path
    paths: tuple[Path, ...]
    size_bytes: int
    commit: str = ""


def get(
    what: What,
    folder: Folder = None,
    variant: Variant = "",
    dry_run: DryRun = False,
    force: Force = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See GET_HELP."""
    is_example = what == EXAMPLE_NAME
    name = None if is_example else hub_name_of(what)
    place = (folder or default_folder(config)).absolute()
    if name is None:
        fetched = copy_example(place, overwrite=force, dry_run=dry_run)
    else:
        fetched = _from_hub(name, place, variant, dry_run, force)
    _report(fetched, dry_run, as_json, config, what if name is not None and name.revision else "")


def hub_name_of(text: str) -> HubName:
    """Return the name on the hub that `text` is. Raises UnusableField."""
    from modelpool.pool.catalog.registry.hub_names import HubName

    found = HubName.parse(text.replace(":", "/", 1))
    if found is None or not (":" in text or not found.file):
        raise unusable_field("MODEL", text, _EXPECTED)
    return found


def default_folder(config: Path | None) -> Path:
    """Return the folder of models that a pool started here reads first; ./models if only the example is there."""
    folders = model_settings(config).folders
    example = example_folder()
    own = [each for each in folders if example is None or not each.resolve().is_relative_to(example.resolve())]
    return own[0] if own else Path(MODELS_FOLDER)


def copy_example(folder: Path, *, overwrite: bool = False, dry_run: bool = False) -> Fetched:
    """Copy the example model to `folder`, and its LoRAs to a folder `loras` next to it. Files that are there with equal
    content stay. Raises OutputFailed for other content unless `overwrite`, UserError if this installation lacks it.
    """
    source = example_folder()
    if source is None:
        raise UserError(
            f"this installation lacks the example model {EXAMPLE_NAME}; expected the one of a wheel or clone"
        )
    loras = folder.parent / LORAS_FOLDER
    pairs = [(path, folder / path.name) for path in sorted((source / MODELS_FOLDER).iterdir())]
    pairs += [(path, loras / path.name) for path in sorted((source / LORAS_FOLDER).iterdir())]
    missing = [(path, copy) for path, copy in pairs if not (copy.exists() and _equal(path, copy))]
    for _, copy in missing:
        if copy.exists() and not overwrite:
            raise OutputFailed(
                f"{copy}: exists with other content; select another folder with --folder, or use --force"
            )
    for path, copy in missing if not dry_run else ():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            # a folder of its own for each process: another one may copy the same file now
            with tempfile.TemporaryDirectory(prefix=".copy-", dir=copy.parent) as own:
                temporary = Path(own) / copy.name
                shutil.copyfile(path, temporary)
                temporary.replace(copy)
        except OSError as error:
            raise OutputFailed(f"{copy}: cannot be written ({error.strerror})") from None
    size_bytes = sum(path.stat().st_size for path, _ in pairs)
    return Fetched(EXAMPLE_NAME, folder, tuple(copy for _, copy in pairs), size_bytes)


def open_hub() -> Hub:
    """Return the hub that the environment selects, with the user's token. Raises UserError if that forbids its use."""
    from huggingface_hub import constants, get_token

    from modelpool.pool.files.fetch.hub_source import Hub

    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so nothing is fetched from the Hugging Face hub; unset it to fetch")
    return Hub(constants.ENDPOINT, get_token() or "")


def wanted_files(source: HubSource, revision: HubRevision, file: str, variant: str) -> tuple[str, ...]:
    """Return the files of the revision that are needed; reads the index of a diffusers folder. Raises as
    `pool.files.fetch.hub_selection`."""
    from modelpool.pool.files.fetch.hub_selection import chosen_weights, folder_files, is_model_index
    from modelpool.pool.files.fetch.source import MAX_SMALL_BYTES, read_all
    from modelpool.pool.files.formats.model_folder import INDEX_FILE
    from modelpool.pool.files.formats.strict_json import BadJson, read_object
    from modelpool.pool.values.core.errors import CorruptFile

    sizes = {path: each.file.size_bytes for path, each in revision.files.items()}
    if file or not is_model_index(sizes):
        if variant:
            raise unusable_field(
                "--variant", variant, "none: only diffusers folders have variants; name a file instead"
            )
        return chosen_weights(revision.repository, sizes, file)
    index = revision.files[INDEX_FILE].file
    try:
        if index.size_bytes > MAX_SMALL_BYTES:
            raise BadJson("is too large")
        content = read_object(read_all(source, index))
    except BadJson as error:
        raise CorruptFile(f"{index.url}: the file {error}, expected the index of a diffusers folder") from None
    return folder_files(revision.repository, content, tuple(sizes), variant)


def _from_hub(name: HubName, place: Path, variant: str, dry_run: bool, force: bool) -> Fetched:
    """Fetch a repository or a file of it. Raises UserError, and ends the command when it was stopped."""
    from modelpool.actors.cli.models.download_view import download_view
    from modelpool.actors.cli.terminal.interrupts import StopRequest
    from modelpool.actors.cli.terminal.screen import counted, say, user_console
    from modelpool.pool.files.fetch.hub_download import download, plan_download
    from modelpool.pool.files.fetch.hub_source import HubSource

    console, source = user_console(), HubSource(open_hub())
    say(console, f"asking {source.url} for {name.repository}")
    revision = source.revision(name.repository, name.revision)
    if revision.repository != name.repository:
        say(console, f"{name.repository} is {revision.repository} now", "yellow")
    names = wanted_files(source, revision, name.file, variant)
    plan = plan_download([revision.files[each] for each in names], place / revision.repository, overwrite=force)
    say(console, _planned_words(revision, plan))
    paths = tuple(each.path for each in plan.files)
    fetched = Fetched(revision.repository, plan.folder, paths, plan.size_bytes, revision.commit)
    if dry_run:
        for each in plan.files:
            size = format_bytes(each.source.file.size_bytes)
            say(console, f"  {each.source.file.path} ({size}{', is there' if each.is_complete else ''})")
        return fetched
    began_seconds = time.monotonic()
    with StopRequest() as stop:
        with download_view(console, plan) as arrived:
            is_complete = download(plan, source, arrived, lambda: stop.requested)
        if not is_complete:
            say(console, "stopped; what was fetched is kept, and the same command continues", "yellow")
            raise typer.Exit(stop.exit_code)
    if plan.left_bytes:
        seconds = max(time.monotonic() - began_seconds, 0.001)
        speed = format_bytes(round(plan.left_bytes / seconds))
        count = counted(sum(not each.is_complete for each in plan.files), "file")
        say(console, f"fetched {count}, {format_bytes(plan.left_bytes)} in {seconds:.1f} s ({speed}/s)")
    return fetched


def _planned_words(revision: HubRevision, plan: DownloadPlan) -> str:
    from modelpool.actors.cli.terminal.screen import counted

    size = format_bytes(plan.size_bytes)
    left = "all of it is there" if not plan.left_bytes else f"{format_bytes(plan.left_bytes)} to fetch"
    what = f"{revision.repository} at {revision.revision} (commit {revision.commit[:8]})"
    free = f"{format_bytes(plan.free_bytes)} free there"
    return f"{what}: {counted(len(plan.files), 'file')}, {size}, {left}, to {plan.folder} ({free})"


def _report(fetched: Fetched, dry_run: bool, as_json: bool, config: Path | None, with_revision: str = "") -> None:
    """Print where the files are, and how to use them. `with_revision` is the fetched name if it has a revision: it is
    no name of these files."""
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console

    entries, problems = ([], []) if dry_run else _entries_of(fetched, config)
    if as_json:
        plain: dict[str, Any] = {
            "kind": "fetched",
            "name": fetched.name,
            "commit": fetched.commit,
            "folder": str(fetched.folder),
            "files": [str(path) for path in fetched.paths],
            "file_bytes": fetched.size_bytes,
            "fetched": not dry_run,
            "names": [entry.name for entry in entries],
            "problems": list(problems),
        }
        print_json(sys.stdout, plain)
        return
    console = user_console()
    if dry_run:
        say(console, "nothing was fetched (--dry-run)")
        return
    say(console, f"{fetched.name} is in {fetched.folder}")
    for problem in problems:
        say(console, f"unusable: {problem}", "yellow")
    for entry in entries:
        say(console, f"{entry.name}: {_described(entry)}")
    if not entries and not problems:
        folder = fetched.folder if fetched.commit == "" else fetched.folder.parents[1]
        say(console, f"this folder is not part of any pool yet; run: modelpool models add {folder}", "yellow")
    if with_revision and entries:
        names = " or ".join(entry.name for entry in entries)
        say(console, f"its name in jobs is {names}, without the revision: {with_revision} means the hub's cache")


def _entries_of(fetched: Fetched, config: Path | None) -> tuple[list[RegistryEntry], list[str]]:
    """Return what a pool started here finds in the fetched files, and what it cannot use with the reasons."""
    listing = opened_registry(config).listing()
    paths = set(fetched.paths) | ({fetched.folder} if fetched.commit else set())
    entries = [entry for entry in listing.entries if entry.file.path.absolute() in paths]
    problems = [f"{r.path}: {r.problem}" for r in listing.refused if r.path.absolute() in paths]
    return entries, problems


def _described(entry: RegistryEntry) -> str:
    from modelpool.pool.catalog.registry.file_purpose import LORAS, MODELS

    if entry.kind in MODELS:
        return f'{entry.facts.title}; use it: modelpool generate "..." --model {entry.name}'
    kind = "file of weights" if entry.kind is None else entry.kind.value
    return f"{kind}; use it: --lora {entry.name}" if entry.kind in LORAS else kind


def _equal(first: Path, second: Path) -> bool:
    """Whether two files have equal content."""
    if first.stat().st_size != second.stat().st_size:
        return False
    parts: Sequence[bytes] = [path.read_bytes() for path in (first, second)]
    return parts[0] == parts[1]
