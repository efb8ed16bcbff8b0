"""`modelpool upscale`: enlarges image files with an upscaler."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import with_option_groups
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.command_ports import Pool, PoolStage
    from modelpool.actors.config.output_address import OutputAddress
    from modelpool.actors.outputs.enlarged_file import SourceFacts
    from modelpool.actors.request.upscale_fields import Upscale
    from modelpool.pool.values.core.stage_params import PixelArray

#: images that are with the pool at a time: enough for all GPUs of a machine, and a bound of the memory of the driver
_AHEAD = 16
_EXIT_FAILED = 1
#: characters of an upscaler's name that are not part of names of files
_UNSAFE = re.compile(r"[^\w.-]+")

Images = Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image file; repeatable.", show_default=False)]
With = Annotated[
    str,
    typer.Option("--with", metavar="NAME:SCALE", help="Upscaler, and the scale of the result (default: its own)."),
]
Tile = Annotated[
    int | None,
    typer.Option("--tile", metavar="N", help="Edge of tiles in pixels (default: one tile if memory allows it)."),
]
Overlap = Annotated[
    int | None, typer.Option("--overlap", metavar="N", help="Overlap of tiles (default: an eighth of the tile).")
]
Format = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="png, webp, jpg or avif (default: that of the image).")
]
Quality = Annotated[int | None, typer.Option("--quality", metavar="N", help="Quality of jpg, webp and avif, 1 to 100.")]


@with_option_groups
def upscale(
    context: typer.Context,
    images: Images,
    upscaler: With,
    tile: Tile = None,
    overlap: Overlap = None,
    file_format: Format = None,
    quality: Quality = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
    *,
    where: PoolOptions,
) -> None:
    """Enlarge images with an upscaler, such as ESRGAN. A result is named by its image and the upscaler, and keeps the
    metadata of the image. Results that exist already are skipped.
    """
    from modelpool.actors.cli.terminal.open_pool import checked_output
    from modelpool.actors.request.requests import GenerateRequest

    wanted = _upscale_of(upscaler, tile, overlap)
    encoding: dict[str, Any] = {"format": file_format, "quality": quality}
    checked = GenerateRequest(model="any", prompt="", **{k: v for k, v in encoding.items() if v is not None})
    if checked.format is not None and checked.format not in ("png", "webp", "jpg", "avif"):
        raise unusable_field("--format", checked.format, "png, webp, jpg or avif")
    planned = planned_files(images, wanted, checked.format)
    output = checked_output(where, out)
    session = session_of(context)
    session.check_names(where).check_upscaler(wanted.model)
    raise typer.Exit(_run(context, where, planned, wanted, output, checked.quality, as_json))


def _upscale_of(text: str, tile: int | None, overlap: int | None) -> Upscale:
    """Return what the options mean. Raises UserError."""
    named = _checked(text)
    given = {name: value for name, value in (("tile", tile), ("overlap", overlap)) if value is not None}
    return _checked({**named.model_dump(exclude_none=True), **given}) if given else named


def _checked(value: str | dict[str, Any]) -> Upscale:
    """Return an upscaler as a request names it. Raises UserError."""
    from modelpool.actors.request.requests import GenerateRequest

    fields: dict[str, Any] = {"upscale": value}
    found = GenerateRequest(model="any", prompt="", **fields).upscale
    if found is None:
        raise unusable_field("--with", value, "the name of an upscaler")
    return found


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """An image, and the name and the format of its result."""

    source: Path
    name: str
    ending: str
    facts: SourceFacts


def planned_files(images: Sequence[Path], wanted: Upscale, ending: str | None) -> list[PlannedFile]:
    """Return the result of each image: with names that differ, also from results of images of other folders. Raises
    UserError for the first file that is no image.
    """
    from modelpool.actors.outputs.enlarged_file import source_facts

    upscaler = _UNSAFE.sub("-", Path(wanted.model).name.removesuffix(".safetensors").removesuffix(".pth"))
    scale = "" if wanted.scale is None else f"-{wanted.scale:g}x"
    taken: set[str] = set()
    planned = []
    for image in images:
        facts = source_facts("IMAGE", image)
        used = ending or facts.ending
        stem, count = f"{image.stem}-{upscaler}{scale}", 1
        name = f"{stem}.{used}"
        while name.lower() in taken:  # some file systems do not tell cases apart
            count += 1
            name = f"{stem}-{count}.{used}"
        taken.add(name.lower())
        planned.append(PlannedFile(image, name, used, facts))
    return planned


def _run(
    context: typer.Context,
    where: PoolOptions,
    planned: Sequence[PlannedFile],
    wanted: Upscale,
    output: OutputAddress,
    quality: int | None,
    as_json: bool,
) -> int:
    """Enlarge images without a result yet; return the exit code."""
    from modelpool.actors.cli.run.run_jobs import started
    from modelpool.actors.cli.terminal.screen import counted, json_on_stdout, print_json, say, user_console
    from modelpool.actors.outputs.enlarged_file import encode_enlarged
    from modelpool.actors.outputs.layout import objects_at

    console, objects = user_console(), objects_at(output)
    existing = objects.sizes()
    missing = [one for one in planned if one.name not in existing]
    if len(missing) < len(planned):
        say(console, f"{counted(len(planned) - len(missing), 'image')} already in {output} and skipped")
    for one in missing:
        if one.facts.is_clear:
            say(console, f"{one.source}: its transparent areas become white", "yellow")
    if not missing:
        return 0
    failed = 0
    with (
        json_on_stdout() if as_json else contextlib.nullcontext() as stream,
        started(session_of(context), where) as running,
    ):
        for place, (one, result) in enumerate(_enlarged(running, missing, wanted), start=1):
            problem = result if isinstance(result, str) else ""
            if not isinstance(result, str):
                content = encode_enlarged(result, one.facts, one.ending, quality)
                problem = "" if objects.create(one.name, content) else f"another program has created {one.name}"
            if problem or isinstance(result, str):
                failed += 1
                say(console, f"{one.source}: {problem}", "red")
                continue
            height, width = result.shape[:2]
            say(console, f"[{place}/{len(missing)}] {one.name}  {width}x{height}")
            if stream is not None:
                path = f"{str(output).rstrip('/')}/{one.name}"
                print_json(stream, {"source": str(one.source), "path": path, "width": width, "height": height})
    if failed < len(missing):
        say(console, f"images: {output}", "bold")
    return _EXIT_FAILED if failed else 0


def _enlarged(
    pool: Pool, planned: Sequence[PlannedFile], wanted: Upscale
) -> Iterator[tuple[PlannedFile, PixelArray | str]]:
    """Yield each image with its pixels, or with why there are none; `_AHEAD` are with the pool at a time."""
    from modelpool.actors.outputs.results.outcomes import JobFailed
    from modelpool.pool.values.core.stage_params import ImagePixels

    pending: deque[tuple[PlannedFile, PoolStage | str]] = deque()
    left = iter(planned)
    while True:
        while len(pending) < _AHEAD and (one := next(left, None)) is not None:
            try:
                pending.append((one, pool.upscale(one.source, wanted)))
            except UserError as problem:
                pending.append((one, str(problem)))
        if not pending:
            return
        one, stage = pending.popleft()
        if isinstance(stage, str):
            yield one, stage
            continue
        try:
            result = stage.result()
        except JobFailed as failed:
            yield one, f"{failed.failure.kind.value}: {failed.failure.message}"
        else:
            assert isinstance(result, ImagePixels), "an enlarged image"
            yield one, result.pixels_HWC
