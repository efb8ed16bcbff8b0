"""`modelpool batch`: generates the requests of a file into a folder; the same command again resumes."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions
from modelpool.actors.cli.request_options import NO_FIELDS, SCHEDULING_FIELDS, Fields, with_request_options
from modelpool.actors.cli.session import session_of
from modelpool.actors.request.field_table import REQUEST_FIELDS

BATCH_HELP = (
    "Generate the requests of a file, one per line. Invalid lines are reported by line number; the rest are generated."
    f"\n\nA line is a JSON object with fields of a request ({', '.join(REQUEST_FIELDS)}), a row of a CSV or Parquet "
    "file with these fields as columns, or a prompt in a .txt file. Run the same command again to resume: images that "
    "already exist in --out are skipped."
)


@with_request_options((*SCHEDULING_FIELDS, "format", "quality"))
def batch(
    context: typer.Context,
    job_file: Annotated[
        str,
        typer.Argument(
            metavar="JOBS",
            help="One request per row: .jsonl, .csv, .txt or .parquet, a folder of a dataset, a URL, or - for stdin.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            help="Folder for images, manifest and contact sheet, or a URL: s3://bucket/folder.",
            metavar="DIR_OR_URL",
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Model for lines without one.", metavar="NAME", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Varies the seeds of lines without a seed.", metavar="N")] = 0,
    again: Annotated[
        bool, typer.Option("--again", help="Also regenerate what already exists in --out.", metavar=" ")
    ] = False,
    shards: Annotated[
        int,
        typer.Option("--shards", help="Pack the outputs in WebDataset shards of N (default: files).", metavar="N"),
    ] = 0,
    shard_format: Annotated[
        str, typer.Option("--shard-format", help="Format of shards: webdataset or parquet.", metavar="NAME")
    ] = "webdataset",
    thumbnails: Annotated[
        bool, typer.Option("--thumbnails", help="Also write a small WebP of each image.", metavar=" ")
    ] = False,
    fields: Fields = NO_FIELDS,
    as_json: options.AsJson = False,
    gpus: options.Gpus = None,
    device: options.Device = None,
    vram: options.Vram = None,
    vram_policy: options.Policy = None,
    reserve_vram: options.Reserve = None,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """Read the file, start a pool, generate what is missing. Exits with 2 if no line is valid."""
    from modelpool.actors.cli.job_file import read_job_file
    from modelpool.actors.cli.run_jobs import CommandRun, WantedOutput, run_requests, started
    from modelpool.actors.cli.screen import counted, say, user_console
    from modelpool.actors.outputs.layout import FILES, declare_layout, layout_of
    from modelpool.actors.outputs.open_outputs import check_store
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.settings.output_address import output_address

    output = output_address(out, "--out")
    defaults = dict(fields) if model is None else {**fields, "model": model}
    GenerateRequest(**{"model": "any", "prompt": "", **defaults})  # report a bad option once, not for every line
    jobs = read_job_file(job_file, defaults, seed)
    console = user_console()
    for line in jobs.broken:
        say(console, f"{job_file}:{line.number}: {line.message}", "red")
    if jobs.broken:
        say(console, f"{job_file}: {counted(len(jobs.broken), 'invalid line')}, {len(jobs.lines)} valid", "red")
    session = session_of(context)
    if not jobs.lines:
        raise typer.Exit(2)
    check_store(output)
    layout = layout_of(shards, shard_format, thumbnails)
    if layout != FILES:
        declare_layout(output, layout)
    where = PoolOptions(config, gpus, device, vram, pool, vram_policy, reserve_vram)
    with started(session, where) as running:
        wanted = (
            WantedOutput(place, line.request, f"{job_file}:{line.number}: ") for place, line in enumerate(jobs.lines)
        )
        resume = shlex.join(["modelpool", *session.arguments])
        run = CommandRun(
            tuple(wanted), output, not again, as_json, resume, refused=len(jobs.broken), print_reasons=True
        )
        raise typer.Exit(run_requests(run, running))
