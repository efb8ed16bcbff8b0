"""`modelpool verify`: checks the files of an output folder, generates them or a sample again, and compares pixels."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.run.repair import Folder, Inputs, default_inputs, outputs_of, print_damaged
from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import with_option_groups
from modelpool.actors.cli.terminal.options import PlainPoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from typing import Any

    from modelpool.actors.cli.run.generate_again import AgainRequest
    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.outputs.comparison import Comparison
    from modelpool.actors.outputs.entries import ManifestEntry
    from modelpool.actors.outputs.place import OutputPlace
    from modelpool.actors.outputs.results.outcomes import OutputResult
    from modelpool.actors.request.requests import GenerateRequest

EXIT_FAILED = 1
_SHARE = "a share such as 5% or 0.05, or all"


@with_option_groups
def verify(
    context: typer.Context,
    folder: Folder,
    sample: Annotated[
        str, typer.Option("--sample", help="Share of the files to generate again: 5%, all, or 0 for none.", metavar="X")
    ] = "all",
    seed: Annotated[int, typer.Option("--seed", help="Varies which files are in the sample.", metavar="N")] = 0,
    inputs: Inputs = None,
    as_json: options.AsJson = False,
    *,
    where: PlainPoolOptions,
) -> None:
    """Check every file of a folder against its manifest; generate a sample of them again and compare the pixels.

    Equal devices, versions, weights and settings of the pool (products, compile) must give equal bytes. Otherwise the
    pixels may differ by 2/255 on average, and 1% of them by more than 16/255; which of these differ is printed. Exits
    with 0 if everything is complete and equal or within the tolerance, else with 1.
    """
    from modelpool.actors.cli.run.run_jobs import started
    from modelpool.actors.cli.terminal.screen import counted, json_on_stdout, print_json, say, user_console
    from modelpool.actors.outputs.open_outputs import existing_outputs

    share, console, address = parse_share(sample), user_console(), outputs_of(context, folder, where.pool)
    out = existing_outputs(address)
    damaged = list(out.damaged())
    print_damaged(console, out, damaged)
    bad = {one.entry.key for one in damaged}
    complete = [entry for entry in out.entries() if entry.key not in bad]
    say(console, f"{address}: {counted(len(complete), 'complete file')}, {counted(len(damaged), 'damaged file')}")
    chosen = sampled(complete, share, seed)
    failed = bool(damaged) or out.damaged_line_count > 0
    if chosen:
        with started(session_of(context), where) as running:
            compared, missing = compared_again(out, chosen, running, inputs or default_inputs(address))
        for name, reason in missing.items():
            say(console, f"{out.path_of(name)}: not compared: {reason}", "red")
        for name, comparison in compared.items():
            text, is_good = _line(comparison)
            if not is_good:
                say(console, f"{out.path_of(name)}: {text}", "red")
        for text, count in Counter(_line(comparison)[0] for comparison in compared.values()).items():
            say(console, f"{counted(count, 'file')}: {text}")
        failed = failed or bool(missing) or not all(_line(comparison)[1] for comparison in compared.values())
        if as_json:
            with json_on_stdout() as stream:
                for name, comparison in compared.items():
                    print_json(stream, comparison_json(name, comparison))
    raise typer.Exit(EXIT_FAILED if failed else 0)


def parse_share(text: str) -> float:
    """Return 0.05 for "5%" and "0.05", 1 for "all". Raises UnusableField."""
    if text.strip().lower() == "all":
        return 1.0
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        raise unusable_field("--sample", text, _SHARE) from None
    if not 0 <= share <= 1:  # also not a number
        raise unusable_field("--sample", text, _SHARE)
    return share


def sampled(entries: Sequence[ManifestEntry], share: float, seed: int) -> list[ManifestEntry]:
    """Return a random share of `entries`, rounded up, in their order; the same for the same seed."""
    count = math.ceil(share * len(entries))
    places = random.Random(seed).sample(range(len(entries)), count)
    return [entries[place] for place in sorted(places)]


def compared_again(
    out: OutputPlace, entries: Sequence[ManifestEntry], pool: Pool, input_folders: Sequence[Path]
) -> tuple[dict[str, Comparison], dict[str, str]]:
    """Generate outputs again and compare them with their files; return the comparisons, and why there is none, by file
    name.
    """
    from modelpool.actors.cli.run.generate_again import requests_again
    from modelpool.actors.outputs.results.outcomes import OutputResult
    from modelpool.pool.values.core.errors import OutputFailed

    again, impossible = requests_again(entries, pool, input_folders)
    missing = {one.entry.file: one.reason for one in impossible}
    compared: dict[str, Comparison] = {}
    if not again:
        return compared, missing
    requests = _on_as_many_gpus(again, pool)
    left = list(range(len(again)))
    while left:
        places, left = left, []
        for result in pool.submit([requests[place] for place in places], output=False).results():
            place = places[result.index]
            one = again[place]
            if isinstance(result, OutputResult):
                try:
                    compared[one.entry.file] = _comparison(out, one, result)
                except OutputFailed as problem:
                    missing[one.entry.file] = str(problem)
            elif requests[place] is not one.request:  # this pool may have fewer GPUs
                requests[place] = one.request
                left.append(place)
            else:
                missing[one.entry.file] = f"{result.kind.value}: {result.message}"
    return compared, missing


def _on_as_many_gpus(again: Sequence[AgainRequest], pool: Pool) -> list[GenerateRequest]:
    """Return the requests, with the number of GPUs that the scheduler chose for the listed output where a request can
    have it."""
    from modelpool.actors.outputs.comparison import repeated_gpus
    from modelpool.pool.values.core.errors import UserError

    requests = [one.request for one in again]
    numbers = [repeated_gpus(one.entry.recipe, one.entry.fields.get("tasks")) for one in again]
    chosen = {place: number for place, number in enumerate(numbers) if number is not None}
    wanted = [requests[place].model_copy(update={"gpus": number}) for place, number in chosen.items()]
    for place, request, recipe in zip(chosen, wanted, pool.recipes(wanted) if wanted else (), strict=True):
        if not isinstance(recipe, UserError):
            requests[place] = request
    return requests


def comparison_json(name: str, comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {
        "file": name,
        "agreement": comparison.agreement.value,
        "differs": list(comparison.differs),
        "mean_difference": round(comparison.mean, 6),
        "share_of_large_differences": round(comparison.far, 6),
    }


#: fields of a recipe whose hashes `differences` names
_OF_WEIGHTS = frozenset({"model_sha256", "loras", "embeddings", "decoder"})


def _comparison(out: OutputPlace, one: AgainRequest, result: OutputResult) -> Comparison:
    from modelpool.actors.outputs.comparison import compare, differences, left_open, origin_of
    from modelpool.actors.outputs.file_content import is_lossless, pixels_sha256, read_content
    from modelpool.actors.outputs.folder import plain
    from modelpool.actors.outputs.results.outcomes import array_of_result

    pixels = array_of_result(result)
    listed = origin_of(one.entry.recipe, one.entry.fields.get("tasks"))
    again = [plain(task) for task in result.tasks]
    differs = differences(listed, origin_of(result.recipe, again))
    other = [name for name in one.differs if name not in _OF_WEIGHTS]
    differs = (
        *differs,
        *(f"{name} of the request" for name in other),
        *left_open(one.entry.recipe, one.entry.fields.get("tasks"), again),
    )
    sha256 = pixels_sha256(pixels)
    with out.local_file(one.entry.file) as path:
        return compare(one.entry.pixels_sha256, sha256, partial(read_content, path), pixels, differs, is_lossless(path))


def _line(comparison: Comparison) -> tuple[str, bool]:
    """Return a comparison as text, and whether it is good."""
    from modelpool.actors.outputs.comparison import Agreement

    text = comparison.agreement.value
    if comparison.agreement is not Agreement.EQUAL:
        text += f" (mean {comparison.mean * 255:.2f}/255, {comparison.far:.1%} of the values by more than 16/255)"
    if comparison.differs:
        text += f"; other {' and '.join(comparison.differs)}"
    elif comparison.agreement is Agreement.DIFFERENT:
        text += "; on the same devices with the same versions, weights and settings"
    return text, comparison.agreement is not Agreement.DIFFERENT
