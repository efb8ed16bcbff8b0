"""The `modelpool` command: its subcommands and exit codes.

Exit codes: 0 success; 1 something failed; 2 wrong usage or a wrong file, nothing was started; 128 + the number of the
signal that stopped it (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from modelpool.actors.cli.cluster.autoscale import autoscale
from modelpool.actors.cli.cluster.costs import costs
from modelpool.actors.cli.cluster.doctor import doctor
from modelpool.actors.cli.cluster.events import events
from modelpool.actors.cli.cluster.explain import story, why
from modelpool.actors.cli.cluster.maintain import cordon, drain, restart, uncordon
from modelpool.actors.cli.cluster.metrics import metrics
from modelpool.actors.cli.cluster.pin import pin, unpin
from modelpool.actors.cli.cluster.serve import down, status, up
from modelpool.actors.cli.cluster.top import top
from modelpool.actors.cli.models.convert import convert
from modelpool.actors.cli.models.inspect import inspect_file
from modelpool.actors.cli.models.merge import merge
from modelpool.actors.cli.models.models import models_app
from modelpool.actors.cli.models.plan import plan_memory
from modelpool.actors.cli.run.batch import BATCH_HELP, batch
from modelpool.actors.cli.run.detached import cancel, jobs_app, progress, submit, wait
from modelpool.actors.cli.run.generate import generate
from modelpool.actors.cli.run.http_serve import serve
from modelpool.actors.cli.run.repair import repair
from modelpool.actors.cli.run.report import report
from modelpool.actors.cli.run.run_workflow import run_workflow
from modelpool.actors.cli.run.upscale import upscale
from modelpool.actors.cli.run.verify import verify
from modelpool.actors.cli.simulate.plan_cluster import plan_cluster
from modelpool.actors.cli.simulate.replay import replay, trace
from modelpool.actors.cli.simulate.simulate import simulate
from modelpool.actors.cli.terminal.found_values import name_found_values
from modelpool.actors.cli.terminal.interrupts import StoppableCommand, exit_code
from modelpool.actors.cli.terminal.literal_help import show_help_literally
from modelpool.actors.cli.terminal.plots import PlotCommand
from modelpool.actors.cli.terminal.session import Session, new_session
from modelpool.actors.cli.terminal.standard_streams import StdoutFailed, guard_streams
from modelpool.pool.values.core.errors import UserError

EXIT_FAILED = 1
EXIT_WRONG = 2
#: a warning about images that are refused for their size anyway, with an error that says so
_OF_PILLOW = "DecompressionBombWarning"

HELP = (
    "Generate images, video and audio with a pool of GPUs.\n\nWithout --config, the first of these "
    "is used: the file named by MODELPOOL_CONFIG; modelpool.toml in this folder; the folders "
    "./models and ./loras; files added with `modelpool models add`; the example model. "
    'Command-line options override the configuration file.\n\nTry:  modelpool generate "a red '
    'circle" "a blue square" -n 4 --out images'
)


def build_app() -> typer.Typer:
    """Build the command with all its subcommands."""
    app = typer.Typer(
        name="modelpool",
        help=HELP,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    app.command(no_args_is_help=True)(generate)
    app.command(help=BATCH_HELP, no_args_is_help=True)(batch)
    app.command("run", no_args_is_help=True)(run_workflow)
    app.command(no_args_is_help=True)(upscale)
    app.command(no_args_is_help=True)(submit)
    app.command(no_args_is_help=True)(wait)
    app.command()(progress)
    app.command(no_args_is_help=True)(cancel)
    app.add_typer(jobs_app(), name="jobs")
    app.command(no_args_is_help=True)(repair)
    app.command(no_args_is_help=True)(verify)
    app.command(no_args_is_help=True)(report)
    app.command()(up)
    app.command()(serve)
    app.command()(status)
    app.command()(top)
    app.command()(metrics)
    app.command()(events)
    app.command()(costs)
    app.command()(pin)
    app.command(no_args_is_help=True)(unpin)
    app.command()(autoscale)
    app.command(no_args_is_help=True)(cordon)
    app.command(no_args_is_help=True)(uncordon)
    app.command(no_args_is_help=True)(drain)
    app.command(no_args_is_help=True)(restart)
    app.command(no_args_is_help=True)(why)
    app.command(no_args_is_help=True)(story)
    app.command()(down)
    app.add_typer(models_app(), name="models")
    app.command("inspect", no_args_is_help=True)(inspect_file)
    app.command(no_args_is_help=True)(merge)
    app.command(no_args_is_help=True)(convert)
    app.command("plan", cls=PlotCommand, no_args_is_help=True)(plan_memory)
    app.command(no_args_is_help=True)(simulate)
    app.command("plan-cluster", cls=PlotCommand, no_args_is_help=True)(plan_cluster)
    app.command(no_args_is_help=True)(replay)
    app.command(no_args_is_help=True)(trace)
    app.command()(doctor)
    return app


def build_program() -> Any:
    """Build the click command that `run` calls. It keeps nothing of a call."""
    program = typer.main.get_command(build_app())
    show_help_literally(program)
    name_found_values(program)
    return program


def run(arguments: Sequence[str], session: Session | None = None) -> int:
    """Run the command and return its exit code. User errors are printed as one line on stderr."""
    from modelpool.actors.cli.terminal.screen import say, user_console

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if category.__name__ != _OF_PILLOW:
            say(user_console(), f"modelpool: {message}", "yellow")

    warnings.showwarning = show
    try:
        with StoppableCommand() as command:
            build_program()(list(arguments), prog_name="modelpool", obj=session or new_session(arguments))
    except SystemExit as end:
        if end.code == exit_code(signal.SIGINT) and command.number:  # how typer ends on a KeyboardInterrupt
            return exit_code(command.number)
        return end.code if isinstance(end.code, int) else 1
    except UserError as error:
        say(user_console(), f"modelpool: {error}", "red")
        return EXIT_FAILED if isinstance(error, StdoutFailed) else EXIT_WRONG
    except RuntimeError as error:
        if not _is_complete_message(error):
            raise
        say(user_console(), f"modelpool: {error}", "red")
        return EXIT_FAILED
    return 0


def _is_complete_message(error: RuntimeError) -> bool:
    """Whether the message of `error` is all that the user needs: the pool ended."""
    from modelpool.actors.outputs.results.outcomes import PoolLost

    return isinstance(error, PoolLost)


def main() -> None:
    """Entry point of the console script."""
    from modelpool.actors.cli.terminal.screen import say, user_console

    guard_streams()
    code = run(sys.argv[1:])
    try:
        with contextlib.suppress(BrokenPipeError):
            if sys.stdout is not None:
                sys.stdout.flush()
    except StdoutFailed as failed:
        say(user_console(), f"modelpool: {failed}", "red")
        code = code or EXIT_FAILED
    sys.exit(code)


def _print_version(show: bool) -> None:
    if show:
        from modelpool import __version__
        from modelpool.scheduler.core import state

        core = "" if str(state.__file__).endswith(".py") else ", scheduler compiled"
        print(f"modelpool {__version__}{core}", flush=True)
        raise typer.Exit


_VERSION = typer.Option(
    False, "--version", help="Print the version.", metavar=" ", callback=_print_version, is_eager=True
)


def _version(version: bool = _VERSION) -> None:
    """Handle --version; the callback does the work."""
