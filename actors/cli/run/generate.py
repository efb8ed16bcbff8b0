"""`modelpool generate`: generates images from prompts on the command line."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import with_option_groups
from modelpool.actors.cli.terminal.options import OutputOptions, PoolOptions
from modelpool.actors.cli.terminal.request_options import NO_FIELDS, Fields, with_request_options
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import missing_value, unusable_field

if TYPE_CHECKING:
    from modelpool.actors.client.start_checks import NameCheck
    from modelpool.actors.http.service.read_fields import ReadFields

Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="FILE",
        help="Use the settings in the metadata of an image (modelpool, A1111, ComfyUI), of a .txt with A1111 "
        "parameters or of a .json workflow; other options are preferred to them.",
        show_default=False,
    ),
]
#: random seeds stay small enough to read out
_DRAWN_SEEDS = 2**32
_SEEDS = 2**64


@with_request_options()
@with_option_groups
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Text prompt; repeatable. Optional with --like.", show_default=False),
    ] = None,
    model: options.Model = None,
    fields: Fields = NO_FIELDS,
    seed: options.Seed = None,
    n: options.Number = 1,
    like: Like = None,
    *,
    output: OutputOptions,
    where: PoolOptions,
) -> None:
    """Generate -n images, videos or audio clips for each PROMPT, as PNG, MP4 or WAV files with their recipe."""
    described = None if like is None else _read(like, session_of(context).check_names(where))
    wanted = _PromptBatch.of(prompts or [], n, seed, model, dict(fields), described)
    raise typer.Exit(_make(context, where, wanted, output))


def _read(path: str, names: NameCheck) -> ReadFields:
    """Return what the metadata of an image describes, and print what of it is not used. Raises UserError."""
    from modelpool.actors.cli.terminal.screen import say, user_console
    from modelpool.actors.http.read_requests import read_fields

    found = read_fields(path, names.family_of).named(names.knows)
    for note in found.notes:
        say(user_console(), f"{path}: {note}", "yellow")
    return found


@dataclass(frozen=True, slots=True)
class _PromptBatch:
    """`n` outputs for each of `prompts`, with seeds from `first_seed` on and these fields of a request."""

    prompts: tuple[str, ...]
    n: int
    first_seed: int
    model: str | None
    fields: dict[str, Any]

    @classmethod
    def of(
        cls,
        prompts: Sequence[str],
        n: int,
        seed: int | None,
        model: str | None,
        fields: dict[str, Any],
        described: ReadFields | None = None,
    ) -> _PromptBatch:
        """Create from the command line, which is preferred to what an image describes. Draws a random seed if neither
        has one."""
        if described is None:
            if not prompts:
                raise missing_value("PROMPT", "a text, or --like FILE")
            return cls(tuple(prompts), n, _seed(seed), model, fields)
        found = described.request(**{"prompt": "", **fields, **({} if model is None else {"model": model})})
        known = {name: getattr(found, name) for name in found.model_fields_set} | fields
        own = known.pop("prompt", ""), known.pop("seed", None), known.pop("model")
        text = str(described.fields.get("prompt", own[0]))
        return cls(tuple(prompts) or (text,), n, _seed(own[1] if seed is None else seed), own[2], known)


def _make(
    context: typer.Context,
    where: PoolOptions,
    wanted: _PromptBatch,
    output: OutputOptions,
) -> int:
    """Generate; return the exit code. Raises UserError for a wrong request before a pool is started."""
    from modelpool.actors.cli.run.read_inputs import with_images_read
    from modelpool.actors.cli.run.run_jobs import OutputPlan, started
    from modelpool.actors.request.name_template import NameTemplate
    from modelpool.actors.request.requests import GenerateRequest

    session = session_of(context)
    if wanted.n < 1:
        raise unusable_field("-n", wanted.n, "a whole number from 1")
    for text in (*wanted.prompts, wanted.fields.get("negative", "")):
        options.require_text("PROMPT", text)
    first = GenerateRequest(
        model=wanted.model or "any", prompt=wanted.prompts[0], seed=wanted.first_seed, **wanted.fields
    )
    if output.name is not None:
        NameTemplate.of(output.name, "--name").check(first, "a prompt of the command line")
    plan = OutputPlan.of(output, where)
    names = session.check_names(where)
    model = names.only_model() if wanted.model is None else wanted.model
    if model is not None:
        first = first.model_copy(update={"model": model})
        names.check(first)
        read = with_images_read(first)
        for prompt in dict.fromkeys(wanted.prompts):
            names.check_before_start(read.model_copy(update={"prompt": prompt}))
    with started(session, where) as running:
        name = model or options.only_model([listing.name for listing in running.models()])
        requests = (
            GenerateRequest(model=name, prompt=prompt, seed=a_seed, **wanted.fields)
            for prompt, a_seed in prompts_and_seeds(wanted.prompts, wanted.first_seed, wanted.n)
        )
        return plan.run(requests, resume_command(session.arguments, wanted.first_seed), running)


def _seed(seed: int | None) -> int:
    return secrets.randbelow(_DRAWN_SEEDS) if seed is None else seed


def prompts_and_seeds(prompts: Sequence[str], first_seed: int, n: int) -> list[tuple[str, int]]:
    """Return every prompt with the same `n` seeds, so that images of one seed can be compared."""
    return [(prompt, (first_seed + i) % _SEEDS) for prompt in prompts for i in range(n)]


def resume_command(arguments: Sequence[str], first_seed: int) -> str:
    """Return the command line that generates the missing images: same seed, existing ones skipped."""
    has_seed = any(a == "--seed" or a.startswith("--seed=") for a in arguments)
    seed = [] if has_seed else ["--seed", str(first_seed)]
    resume = [] if "--resume" in arguments else ["--resume"]
    return shlex.join(["modelpool", *arguments, *seed, *resume])
