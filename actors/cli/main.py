"""The `modelpool` command: its subcommands, its exit codes.

Exit codes: 0 all is made; 1 something failed; 2 the command or a file is wrong, and nothing was started; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import typer

from modelpool.actors.cli.batch import BATCH_HELP, batch
from modelpool.actors.cli.convert import convert
from modelpool.actors.cli.doctor import doctor
from modelpool.actors.cli.explain import story, why
from modelpool.actors.cli.generate import generate
from modelpool.actors.cli.inspect import inspect_file
from modelpool.actors.cli.merge import merge
from modelpool.actors.cli.models import models_app
from modelpool.actors.cli.plan import plan_memory
from modelpool.actors.cli.plan_cluster import plan_cluster
from modelpool.actors.cli.replay import replay, trace
from modelpool.actors.cli.serve import down, status, up
from modelpool.actors.cli.session import Session, new_session
from modelpool.actors.cli.simulate import simulate
from modelpool.actors.cli.top import top
from modelpool.pool.core.errors import UserError

EXIT_FAILED = 1
EXIT_WRONG = 2

HELP = (
    "Images from a pool of GPUs."
    "\n\n"
    "Without --config, the first of these that is there is used: the file that MODELPOOL_CONFIG names; modelpool.toml "
    "here; the folders ./models and ./loras here; what `modelpool models add` added; the small example model of a "
    "checkout. What --gpus, --device and --vram say goes before what a configuration says."
    "\n\n"
    'Try:  modelpool generate "a red circle" "a blue square" -n 4 --out images'
)


def build_app() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        name="modelpool",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    app.command(no_args_is_help=True)(generate)
    app.command(help=BATCH_HELP, no_args_is_help=True)(batch)
    app.command()(up)
    app.command()(status)
    app.command()(top)
    app.command(no_args_is_help=True)(why)
    app.command(no_args_is_help=True)(story)
    app.command()(down)
    app.add_typer(models_app(), name="models")
    app.command("inspect", no_args_is_help=True)(inspect_file)
    app.command(no_args_is_help=True)(merge)
    app.command(no_args_is_help=True)(convert)
    app.command("plan", no_args_is_help=True)(plan_memory)
    app.command(no_args_is_help=True)(simulate)
    app.command("plan-cluster", no_args_is_help=True)(plan_cluster)
    app.command(no_args_is_help=True)(replay)
    app.command(no_args_is_help=True)(trace)
    app.command()(doctor)
    return app


def run(arguments: Sequence[str], session: Session | None = None) -> int:
    """Run the command; its exit code. What a person got wrong is one line on stderr."""
    from modelpool.actors.cli.screen import people_console, say

    warnings.showwarning = lambda message, *_: say(people_console(), f"modelpool: {message}", "yellow")
    try:
        build_app()(list(arguments), prog_name="modelpool", obj=session or new_session(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except UserError as error:
        say(people_console(), f"modelpool: {error}", "red")
        return EXIT_WRONG
    except RuntimeError as error:
        if not _is_told(error):
            raise
        say(people_console(), f"modelpool: {error}", "red")
        return EXIT_FAILED
    return 0


def _is_told(error: RuntimeError) -> bool:
    """An error of ours that says all there is to say: the pool went away."""
    from modelpool.actors.results.outcomes import PoolLost

    return isinstance(error, PoolLost)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def _version_asked(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        from modelpool.scheduler.core import state

        core = "" if str(state.__file__).endswith(".py") else ", scheduler compiled"
        try:
            typer.echo(f"modelpool {version('modelpool')}{core}")
        except PackageNotFoundError:
            typer.echo(f"modelpool, not installed: run from its folder{core}")
        raise typer.Exit


_VERSION = typer.Option(
    False, "--version", help="Show the version.", metavar=" ", callback=_version_asked, is_eager=True
)


def _version(version: bool = _VERSION) -> None:
    """`version` is handled by its callback."""
