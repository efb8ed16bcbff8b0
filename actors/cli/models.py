"""`modelpool models`: which files of weights there are, and adding, naming, hashing and forgetting them.

Reads headers, and whole files where hashes are wanted. Starts no pool and changes no file of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions
from modelpool.actors.cli.session import session_of
from modelpool.pool.core.errors import CorruptFile

if TYPE_CHECKING:
    from modelpool.actors.settings.config import ModelsSection
    from modelpool.pool.registry.registry import Entry, Registry

_ADD = "Add FILES and FOLDERS of weights, as ComfyUI, A1111 and Forge lay them out, and hash what is new in them."
_ASSEMBLE = (
    "Make one model, NAME, of separate files: writes NAME.model.json into the folder of models that they lie in."
)
_REMOVE = "Forget what was added, or an alias. No file of weights is touched."
_SCAN = "Hash what has no hash yet, so that all can be named by hash; ends with 1 where a file cannot be used."
_ALIAS = "Call what TARGET means NAME too: the file at a path or of a name, or the content with a hash."

Hashing = Annotated[bool, typer.Option("--hash/--no-hash", help="Hash new files now (default), or when they are used.")]


def _file(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, metavar="FILE", show_default=False)


DiffusionModel = Annotated[str | None, _file("--diffusion-model", "The diffusion model.")]
LowNoise = Annotated[
    str | None, _file("--low-noise", "Of two diffusion models (Wan 2.2 of 14B) the one for low noise.")
]
Vae = Annotated[str | None, _file("--vae", "The VAE, or a checkpoint that has it.")]
TextEncoders = Annotated[list[str] | None, _file("--text-encoder", "May be given again; in any order.")]
VisionEncoder = Annotated[str | None, _file("--vision-encoder", "CLIP's, for models that see an image.")]
WholeCheckpoint = Annotated[str | None, _file("--checkpoint", "A whole checkpoint, for all that is not given.")]
_FOLDER = "Where to write it; all files lie there (default: the folder of models around them)."
Folder = Annotated[Path | None, typer.Option("--folder", help=_FOLDER, metavar="DIR", show_default=False)]
_FORCE = "Write over a description that is there."
Force = Annotated[bool, typer.Option("--force", help=_FORCE, metavar=" ", show_default=False)]


def models_app() -> typer.Typer:
    """The command with its subcommands; alone it lists."""
    app = typer.Typer(
        help="List the models, LoRAs and other files of weights that can be named; add, name and forget them.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_alone)
    app.command("list")(list_models)
    app.command("add", help=_ADD, no_args_is_help=True)(add)
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
            raise typer.BadParameter(f"{flag} belongs after {context.invoked_subcommand}", context)


def list_models(
    context: typer.Context,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """List what can be named, what is not used and why. With --pool: the models and LoRAs of a running pool."""
    from modelpool.actors.cli.models_view import print_pool, print_registry

    if pool is not None:
        with session_of(context).open_pool(PoolOptions(pool=pool)) as running:
            print_pool(pool, running.models(), running.loras(), as_json)
        return
    print_registry(_registry(config, allow_pickle), as_json)


def add(
    places: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files or folders.", show_default=False)],
    hashing: Hashing = True,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _ADD."""
    from modelpool.actors.cli.models_view import told_added
    from modelpool.actors.cli.screen import people_console, print_json, say
    from modelpool.pool.registry.changes import add_place

    registry = _registry(config, allow_pickle)
    roots = []
    for path in places:
        added = add_place(registry, path)
        roots.append(added.path)
        plain, lines = told_added(added)
        if as_json:
            print_json(sys.stdout, plain)
        for line, style in lines if not as_json else ():
            say(people_console(), line, style)
    if hashing:  # as a pool would see them now: where nothing is configured, added models take the example's place
        _hash(_registry(config, allow_pickle), as_json, tuple(roots))


def scan(
    allow_pickle: options.AllowPickle = False, as_json: options.AsJson = False, config: options.Config = None
) -> None:
    """See _SCAN."""
    from modelpool.actors.cli.models_view import refused_table
    from modelpool.actors.cli.screen import counted, people_console, print_json, say, show

    registry = _registry(config, allow_pickle)
    failed = _hash(registry, as_json, None)
    listing = registry.listing()
    for refused in listing.refused if as_json else ():
        print_json(sys.stdout, {"kind": "refused", "path": str(refused.path), "problem": refused.problem})
    if not as_json:
        console = people_console()
        if listing.refused:
            show(console, refused_table(listing.refused))
        unfinished = f", {counted(len(listing.unfinished), 'unfinished download')}" if listing.unfinished else ""
        say(console, f"{counted(len(listing.entries), 'file')}, {len(listing.refused)} not used{unfinished}")
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
    from modelpool.actors.cli.screen import people_console, print_json, say
    from modelpool.pool.registry.changes import set_alias

    made, before = set_alias(_registry(config, allow_pickle), name, target)
    if as_json:
        print_json(sys.stdout, {"kind": "alias", "name": made.name, "path": made.path, "sha256": made.sha256})
        return
    stood = f" (it stood for {before.target})" if before is not None and before.target != made.target else ""
    say(people_console(), f"{made.name} is {made.target}{stood}")


def assemble(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the model.", show_default=False)],
    diffusion_model: DiffusionModel = None,
    vae: Vae = None,
    text_encoder: TextEncoders = None,
    vision_encoder: VisionEncoder = None,
    low_noise: LowNoise = None,
    checkpoint: WholeCheckpoint = None,
    folder: Folder = None,
    force: Force = False,
    allow_pickle: options.AllowPickle = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _ASSEMBLE."""
    from modelpool.actors.cli.plain_values import plain_value
    from modelpool.actors.cli.screen import counted, people_console, print_json, say
    from modelpool.pool.registry.assembling import Chosen
    from modelpool.pool.registry.assembling import assemble as put_together

    registry, allowed = _registry(config, allow_pickle), _models(config, allow_pickle).allow_pickle
    encoders = tuple(text_encoder or ())
    files = (checkpoint, diffusion_model, vae, vision_encoder, low_noise)
    whole, model, autoencoder, seeing, low = (file or "" for file in files)
    chosen = Chosen(whole, model, autoencoder, encoders, seeing, low)
    made = put_together(registry, name, chosen, folder, overwrite=force, allow_pickle=allowed)
    if as_json:
        print_json(sys.stdout, {"kind": "model", "name": name, "is_known": made.is_known, **plain_value(made.info)})
        return
    count = counted(len(set(filter(None, (*files, *encoders)))), "file")
    say(people_console(), f"{name} is {made.info.title}, of {count}: {made.path}")
    if not made.is_known:
        say(people_console(), f"no pool looks there yet: modelpool models add {made.path.parent}", "yellow")


def remove(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="What was added, or an alias.", show_default=False)],
    as_json: options.AsJson = False,
    config: options.Config = None,
) -> None:
    """See _REMOVE."""
    from modelpool.actors.cli.screen import people_console, print_json, say
    from modelpool.pool.registry import changes

    gone = changes.remove(_registry(config), what)
    is_place = isinstance(gone, Path)
    if as_json:
        print_json(sys.stdout, {"removed": "place" if is_place else "alias", "name": str(what), "path": _target(gone)})
        return
    kept = "its files stay where they are" if is_place else f"it stood for {_target(gone)}"
    say(people_console(), f"{gone if is_place else what} is forgotten; {kept}")


def _target(gone: object) -> str:
    return str(gone) if isinstance(gone, Path) else str(getattr(gone, "target", ""))


def _models(config: Path | None, allow_pickle: bool = False) -> ModelsSection:
    from modelpool.actors.cli.open_pool import settings_for

    return settings_for(PoolOptions(config=config, allow_pickle=allow_pickle)).models


def _registry(config: Path | None, allow_pickle: bool = False) -> Registry:
    """The registry of a pool that would be started here."""
    from modelpool.pool.registry.registry import open_registry

    models = _models(config, allow_pickle)
    return open_registry(
        models.folders,
        models.loras,
        models.registry,
        allow_pickle=models.allow_pickle,
        assemblies=models.assemblies,
    )


def _hash(registry: Registry, as_json: bool, roots: tuple[Path, ...] | None) -> int:
    """Hash what has no hash yet, below `roots` where they are given; how many could not be read."""
    from modelpool.actors.cli.models_view import entry_plain, hashing_view
    from modelpool.actors.cli.screen import people_console, print_json
    from modelpool.pool.registry.changes import hash_all, unhashed

    entries = tuple(entry for entry in unhashed(registry) if roots is None or _is_below(entry, roots))
    failed = 0
    with hashing_view(people_console(), entries) as view:
        for entry, result in hash_all(registry, entries, view.begin):
            failed += isinstance(result, CorruptFile)
            view.done(entry, result)
            if as_json and not isinstance(result, CorruptFile):
                print_json(sys.stdout, entry_plain(entry, result))
    return failed


def _is_below(entry: Entry, roots: tuple[Path, ...]) -> bool:
    return any(entry.file.path.is_relative_to(root) for root in roots)
