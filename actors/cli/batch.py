"""`modelpool batch`: a file of requests to images in a folder; the same command again goes on where it stopped."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions
from modelpool.actors.cli.session import session_of

BATCH_HELP = (
    "Make the images of a file, a request a line. Broken lines are told by number; the others are made."
    "\n\n"
    "A line is a JSON object with fields of a request (prompt, model, negative, loras, steps, cfg, sampler, schedule, "
    "width, height, seed, clip_skip, decoder, low_noise, image, mask, strength, paste, hires, controls, regions, "
    "reference, reference_as, image_cfg, noise_level, frames, frame_rate, last_image, video, video_mask, motion, "
    "image_noise, elevation, seconds, format, priority, user, deadline), "
    "or a row of a CSV file whose header names such fields. The same "
    "command again goes on where it stopped: what is in --out already is left out."
)


def batch(
    context: typer.Context,
    job_file: Annotated[
        Path, typer.Argument(metavar="JOBS", help="JOBS.jsonl or JOBS.csv: a request a line.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for images, manifest, contact sheet.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option("--model", help="For lines that name no model.", metavar="NAME", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Varies the seeds of lines without one.", metavar="N")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Make what is in --out already, too.", metavar=" ")] = False,
    priority: options.Priority = None,
    user: options.User = None,
    deadline: options.Deadline = None,
    as_json: options.AsJson = False,
    gpus: options.Gpus = None,
    device: options.Device = None,
    vram: options.Vram = None,
    vram_policy: options.Policy = None,
    reserve_vram: options.Reserve = None,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """Read the file, start a pool, make what is missing. Exits with 2 when no line of the file can be used."""
    from modelpool.actors.cli.job_file import read_job_file
    from modelpool.actors.cli.run_jobs import Run, Wanted, make_all, started
    from modelpool.actors.cli.screen import counted, people_console, say
    from modelpool.actors.request.requests import GenerateRequest

    defaults: dict[str, Any] = options.terms(priority, user, deadline)
    if model is not None:
        defaults["model"] = model
    GenerateRequest(**{"model": "any", "prompt": "", **defaults})  # complain once, not on every line
    jobs = read_job_file(job_file, defaults, seed)
    console = people_console()
    for line in jobs.broken:
        say(console, f"{job_file}:{line.number}: {line.message}", "red")
    if jobs.broken:
        say(console, f"{counted(len(jobs.broken), 'line')} of {job_file} cannot be used, {len(jobs.lines)} can", "red")
    session = session_of(context)
    if not jobs.lines:
        raise typer.Exit(2)
    where = PoolOptions(config, gpus, device, vram, pool, vram_policy, reserve_vram)
    with started(session, where) as running:
        wanted = (Wanted(place, line.request, f"{job_file}:{line.number}: ") for place, line in enumerate(jobs.lines))
        go_on = shlex.join(["modelpool", *session.arguments])
        run = Run(tuple(wanted), out, not again, as_json, go_on, refused=len(jobs.broken), tell_why=True)
        raise typer.Exit(make_all(run, running))
