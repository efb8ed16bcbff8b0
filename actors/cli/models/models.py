"""`modelpool models`: lists, adds, fetches, names, hashes and removes files of weights.

Reads headers, and complete files for hashes. Starts no pool and changes no file of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.models.get import GET_HELP, get
from modelpool.actors.cli.models.opened_registry import model_settings, opened_registry
from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import CorruptFile

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.registry import Registry, RegistryEntry

_ADD = "Add files and folders of weights, in the layouts of ComfyUI, A1111 and Forge, and hash new files."
_ASSEMBLE = "Combine separate files into one model: writes NAME.model.json into the model folder that contains them."
_REMOVE = "Remove an added path or an alias. Files of weights are never touched."
_SCAN = "Hash new files, so that they can be named by hash. Exits with 1 if a file cannot be used."
_ALIAS = "Give TARGET a second name: a file (by path or name), or the content with a hash."

Hashing = Annotated[bool, typer.Option("--hash/--no-hash", help="Hash new files now (default), or on first use.")]


def _file(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, metavar="FILE", show_default=False)


DiffusionModel = Annotated[str | None, _file("--diffusion-model", "The diffusion model.")]
LowNoise = Annotated[
    str | None, _file("--low-noise", "The low-noise expert, for models with two experts (Wan 2.2 14B).")
]
Unconditional = Annotated[
    str | None, _file("--unconditional", "The model without text, for models that are guided by one (Ideogram 4).")
]
Vae = Annotated[str | None, _file("--vae", "The VAE, or a checkpoint that contains it.")]
TextEncoders = Annotated[list[str] | None, _file("--text-encoder", "Repeatable, in any order.")]
VisionEncoder = Annotated[
    str | None, _file("--vision-encoder", "The CLIP vision encoder, for models with an image input.")
]
WholeCheckpoint = Annotated[str | None, _file("--checkpoint", "A complete checkpoint, for all parts that are not set.")]
_FOLDER = "Where to write; must contain all files (default: the models folder that contains them)."
Folder = Annotated[Path | None, typer.Option("--folder", help=_FOLDER, metavar="DIR", show_default=False)]
_FORCE = "Overwrite an existing description."
Force = Annotated[bool, typer.Option("--force", help=_FORCE, metavar=" ", show_default=False)]


def models_app() -> typer.Typer:
    """Build the command with its subcommands; without one it lists."""
    app = typer.Typer(
        help="List, add, fetch, name and remove models, LoRAs and other files of weights.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_alone)
    app.command("list")(list_models)
    app.command("add", help=_ADD, no_args_is_help=True)(add)
    app.command("get", help=GET_HELP, no_args_is_help=True)(get)
    app.command("scan", help=_SCAN)(scan)
    app.command("alias", help=_ALIAS, no_args_is_help=True)(alias)
    app.command("assemble", help=_ASSEMBLE, no_args_is_help=True)(assemble)
    app.command("remove", help=_REMOVE, no_args_is_help=True)(remove)
    return app


def _alone(
    context: typer.Context,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    if context.invoked_subcommand is None:
        list_models(context, allow_pickle, as_json, config, pool)
        return
    flags = (("--allow-pickle", allow_pickle), ("--json", as_json), ("--config", config), ("--pool", pool))
    for flag, given in flags:
        if given:
            raise typer.BadParameter(f"place {flag} after {context.invoked_subcommand}", context)


def list_models(
    context: typer.Context,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """List all usable files, and the unusable ones with reasons. With --pool: models and LoRAs of a running pool."""
    from modelpool.actors.cli.models.models_view import print_pool, print_registry

    if pool is not None:
        with session_of(context).open_pool(PoolOptions(pool=pool)) as running:
            print_pool(pool, running.models(), running.loras(), as_json, running.status().pins)
        return
    print_registry(opened_registry(config, allow_pickle), as_json)


def add(
    locations: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files or folders.", show_default=False)],
    hashing: Hashing = True,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _ADD."""
    from modelpool.actors.cli.models.models_view import added_report
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console
    from modelpool.pool.catalog.registry.changes import add_location

    registry = opened_registry(config, allow_pickle)
    roots = []
    for path in locations:
        added = add_location(registry, path)
        roots.append(added.path)
        plain, lines = added_report(added)
        if as_json:
            print_json(sys.stdout, plain)
        for line, style in lines if not as_json else ():
            say(user_console(), line, style)
    if hashing:  # reopened as a pool would open it now: if nothing is configured, added models replace the example
        _hash(opened_registry(config, allow_pickle), as_json, tuple(roots))


def scan(
    allow_pickle: options.AllowPickle = False, as_json: options.AsJson = False, config: options.Config = None
) -> None:
    """See _SCAN."""
    from modelpool.actors.cli.models.models_view import refused_table
    from modelpool.actors.cli.terminal.screen import counted, print_json, say, show, user_console

    registry = opened_registry(config, allow_pickle)
    failed = _hash(registry, as_json, None)
    listing = registry.listing()
    for refused in listing.refused if as_json else ():
        print_json(sys.stdout, {"kind": "refused", "path": str(refused.path), "problem": refused.problem})
    if not as_json:
        console = user_console()
        if listing.refused:
            show(console, refused_table(listing.refused))
        unfinished = f", {counted(len(listing.unfinished), 'unfinished download')}" if listing.unfinished else ""
        say(console, f"{counted(len(listing.entries), 'file')}, {len(listing.refused)} unusable{unfinished}")
    if failed or listing.refused:
        raise typer.Exit(1)


def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path, name or hash.", show_default=False)],
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _ALIAS."""
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console
    from modelpool.pool.catalog.registry.changes import set_alias

    found, before = set_alias(opened_registry(config, allow_pickle), name, target)
    if as_json:
        print_json(sys.stdout, {"kind": "alias", "name": found.name, "path": found.path, "sha256": found.sha256})
        return
    stood = f" (was {before.target})" if before is not None and before.target != found.target else ""
    say(user_console(), f"{found.name} is {found.target}{stood}")


def assemble(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.", show_default=False)],
    diffusion_model: DiffusionModel = None,
    vae: Vae = None,
    text_encoder: TextEncoders = None,
    vision_encoder: VisionEncoder = None,
    low_noise: LowNoise = None,
    unconditional: Unconditional = None,
    checkpoint: WholeCheckpoint = None,
    folder: Folder = None,
    force: Force = False,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _ASSEMBLE."""
    from modelpool.actors.cli.terminal.plain_values import plain_value
    from modelpool.actors.cli.terminal.screen import counted, print_json, say, user_console
    from modelpool.pool.catalog.registry.assembling import SelectedFiles
    from modelpool.pool.catalog.registry.assembling import assemble as assemble_files

    registry, allowed = opened_registry(config, allow_pickle), model_settings(config, allow_pickle).allow_pickle
    encoders = tuple(text_encoder or ())
    files = (checkpoint, diffusion_model, vae, vision_encoder, low_noise, unconditional)
    whole, model, autoencoder, *more = (file or "" for file in files)
    chosen = SelectedFiles(whole, model, autoencoder, encoders, *more)
    found = assemble_files(registry, name, chosen, folder, overwrite=force, allow_pickle=allowed)
    if as_json:
        print_json(sys.stdout, {"kind": "model", "name": name, "is_known": found.is_known, **plain_value(found.info)})
        return
    count = counted(len(set(filter(None, (*files, *encoders)))), "file")
    say(user_console(), f"{name} is {found.info.title}, from {count}: {found.path}")
    if not found.is_known:
        say(
            user_console(),
            f"this folder is not part of any pool yet; run: modelpool models add {found.path.parent}",
            "yellow",
        )


def remove(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="An added path, or an alias.", show_default=False)],
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _REMOVE."""
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console
    from modelpool.pool.catalog.registry import changes

    gone = changes.remove(opened_registry(config), what)
    is_place = isinstance(gone, Path)
    if as_json:
        print_json(sys.stdout, {"removed": "place" if is_place else "alias", "name": str(what), "path": _target(gone)})
        return
    kept = "its files are not deleted" if is_place else f"it was an alias of {_target(gone)}"
    say(user_console(), f"{gone if is_place else what} is removed; {kept}")


def _target(gone: object) -> str:
    return str(gone) if isinstance(gone, Path) else str(getattr(gone, "target", ""))


def _hash(registry: Registry, as_json: bool, roots: tuple[Path, ...] | None) -> int:
    """Hash the entries without a hash, below `roots` if set; return how many could not be read."""
    from modelpool.actors.cli.models.models_view import entry_plain, hashing_view
    from modelpool.actors.cli.terminal.screen import print_json, user_console
    from modelpool.pool.catalog.registry.changes import hash_all, unhashed

    entries = tuple(entry for entry in unhashed(registry) if roots is None or _is_below(entry, roots))
    failed = 0
    with hashing_view(user_console(), entries) as view:
        for entry, result in hash_all(registry, entries, view.begin):
            failed += isinstance(result, CorruptFile)
            view.done(entry, result)
            if as_json and not isinstance(result, CorruptFile):
                print_json(sys.stdout, entry_plain(entry, result))
    return failed


def _is_below(entry: RegistryEntry, roots: tuple[Path, ...]) -> bool:
    return any(entry.file.path.is_relative_to(root) for root in roots)
