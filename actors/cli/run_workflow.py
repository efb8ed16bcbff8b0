"""`modelpool run`: generates what a ComfyUI workflow describes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions
from modelpool.actors.cli.session import session_of
from modelpool.pool.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelpool.actors.cli.ports import Pool
    from modelpool.actors.request.requests import GenerateRequest

Workflow = Annotated[
    Path,
    typer.Argument(
        metavar="WORKFLOW",
        help="WORKFLOW.json, as ComfyUI saves or exports it, or a PNG file of ComfyUI, which has it inside.",
        show_default=False,
    ),
]
#: folder next to a workflow that is searched for its images, too, as that of ComfyUI
INPUT_FOLDER = "input"
_PNG_BEGINS = b"\x89PNG\r\n"
#: texts of a PNG file of ComfyUI: the workflow in the API format, and in that of the editor
_PNG_TEXTS = ("prompt", "workflow")


def run_workflow(
    context: typer.Context,
    workflow: Workflow,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.AsJson = False,
    gpus: options.Gpus = None,
    device: options.Device = None,
    vram: options.Vram = None,
    vram_policy: options.Policy = None,
    reserve_vram: options.Reserve = None,
    allow_pickle: options.AllowPickle = False,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """Generate the images of a ComfyUI workflow. Images that it loads are searched next to it, and in ./input."""
    from modelpool.actors.cli.checked_requests import WantedOutput, WantedOutputs
    from modelpool.actors.cli.open_pool import output_for
    from modelpool.actors.cli.run_jobs import CommandRun, run_requests, started
    from modelpool.actors.outputs.output_check import check_outputs
    from modelpool.actors.settings.output_address import output_address

    where = PoolOptions(config, gpus, device, vram, pool, vram_policy, reserve_vram, allow_pickle)
    graph = read_workflow(workflow)
    session = session_of(context)
    output = output_for(where, None if out is None else output_address(out, "--out"))
    check_outputs(output)
    with started(session, where) as opened:
        requests = workflow_requests(graph, workflow.parent, opened)
        wanted = tuple(WantedOutput(place, request) for place, request in enumerate(requests))
        resumed = shlex.join(["modelpool", *session.arguments, *([] if resume else ["--resume"])])
        run = CommandRun(WantedOutputs.of(wanted), output, resume, as_json, resumed, all_or_nothing=True)
        code = run_requests(run, opened)
    raise typer.Exit(code)


def read_workflow(path: Path) -> dict[str, Any]:
    """Return a workflow in the API format, converted from ComfyUI's own format if it is in that. Raises UserError."""
    from modelpool.actors.http.comfy_export import api_format
    from modelpool.actors.request.json_text import NotJson, parse_json

    try:
        content = path.read_bytes()
        return api_format(parse_json(_text_of_png(path) if content.startswith(_PNG_BEGINS) else content))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except NotJson as problem:
        raise UserError(f"{path}: {problem}") from None


def _text_of_png(path: Path) -> bytes:
    """Return the workflow in a PNG file of ComfyUI. Raises UserError."""
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            image.load()
            texts = image.info
    except (OSError, SyntaxError, ValueError) as error:  # how Pillow reports damaged files
        raise UserError(f"{path}: cannot be read ({error})") from None
    found = next((texts[name] for name in _PNG_TEXTS if isinstance(texts.get(name), str)), None)
    if found is None:
        raise UserError(f"{path}: found no workflow in it, expected the text {' or '.join(_PNG_TEXTS)} of ComfyUI")
    return str(found).encode()


def workflow_requests(graph: dict[str, Any], folder: Path, pool: Pool) -> list[GenerateRequest]:
    """Return the requests of a workflow whose images are in `folder`. Raises UserError."""
    from modelpool.actors.http.comfy_graph import PoolNames, outputs_of, requests_of

    models = {listing.name: listing.family for listing in pool.models() if not listing.problem}
    names = PoolNames(models, [listing.name for listing in pool.loras() if not listing.problem])
    return [
        request
        for output in outputs_of(graph, names)
        for request in requests_of(output, names, lambda name: _image(folder, name))
    ]


def _image(folder: Path, name: str) -> Image:
    from modelpool.actors.request.image_fields import image_of_bytes

    plain = name.removesuffix(" [input]")
    for path in (folder / plain, folder / INPUT_FOLDER / plain):
        if path.is_file():
            return image_of_bytes(name, path.read_bytes())
    raise unusable_field("image", name, f"a file in {folder} or {folder / INPUT_FOLDER}")
