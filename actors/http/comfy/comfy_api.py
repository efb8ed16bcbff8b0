"""The interface of ComfyUI: /prompt, /queue, /history, /view, /upload, /interrupt, /object_info and /ws.

Calls about the server are in `comfy_server_api`.

Each path also exists below /api, as newer clients call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from fastapi import APIRouter, Query, Request, WebSocket
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.websockets import WebSocketDisconnect

from modelpool.actors.http.comfy.comfy_export import api_format, is_exported, is_workflow
from modelpool.actors.http.comfy.comfy_graph import OutputNode, PoolNames
from modelpool.actors.http.comfy.comfy_images import (
    LOADS_IMAGE,
    WorkflowImages,
    image_size_of,
    is_animation_of,
    with_alpha,
)
from modelpool.actors.http.comfy.comfy_node_info import described, facts_of
from modelpool.actors.http.comfy.comfy_own_nodes import kinds_with
from modelpool.actors.http.comfy.comfy_problems import rejection
from modelpool.actors.http.comfy.comfy_prompts import (
    ComfyPrompts,
    ImageFrame,
    PreviewFrame,
    Prompt,
    Socket,
    StatesMessage,
)
from modelpool.actors.http.comfy.comfy_server_api import add_server_routes, socket_features
from modelpool.actors.http.comfy.comfy_value_nodes import SEARCH_STEPS
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.http.service.access import Caller
from modelpool.actors.http.service.answers import json_parts, list_parts, object_parts
from modelpool.actors.http.service.bodies import FormBody, form_body, json_object
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import Services, caller_of
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.request.audio_fields import is_audio
from modelpool.actors.request.control_video_fields import is_moving
from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError, counted

INTERFACE = "comfyui"
#: largest workflow: images are uploaded, and not part of it
MAX_WORKFLOW_BYTES = 1 << 20
MAX_ID_LENGTH = 100
_MOST_TITLE = 100
#: largest message of a client to its web socket
MOST_ANNOUNCED = 1 << 16
#: workflows of up to as many nodes are read on the loop, which takes less than handing them to a thread
_SMALL_NODES = 50
#: videos of one workflow with facts that are kept while it is read
_MOST_VIDEOS = 64


def comfy_router(services: Services, prompts: ComfyPrompts) -> APIRouter:
    """Return the routes of ComfyUI."""
    uploads = Uploads(services.folder / "uploads")
    routes = APIRouter(tags=["comfyui"])
    _add_prompt_routes(routes, services, prompts, uploads)
    _add_file_routes(routes, services, prompts, uploads)
    add_server_routes(routes, services)
    _add_socket(routes, prompts, socket_features(services))
    router = APIRouter()
    router.include_router(routes)
    router.include_router(routes, prefix="/api", include_in_schema=False)
    return router


def _add_prompt_routes(router: APIRouter, services: Services, prompts: ComfyPrompts, uploads: Uploads) -> None:
    @router.post("/prompt", summary="Queue a workflow")
    async def queue_prompt(request: Request) -> Response:
        body = await json_object(request, MAX_WORKFLOW_BYTES)
        try:
            prompt = await _submitted(services, prompts, uploads, request, body)
        except WorkflowRejected as rejected:
            if rejected.is_over_bound:
                services.limits.acted("request_fields", "refused a workflow that has too much")
            names = await _names(services, uploads, caller_of(request).owner)
            facts = await asyncio.to_thread(facts_of, body.get("prompt"), rejected.errors, names)
            return JSONResponse(rejected.as_json(facts), 400)
        return JSONResponse({"prompt_id": prompt.prompt_id, "number": prompt.number, "node_errors": {}})

    @router.get("/prompt", summary="Count the workflows that wait or run")
    async def show_prompt(request: Request) -> dict[str, Any]:
        count = sum(map(len, prompts.active(caller_of(request).owner)))
        return {"exec_info": {"queue_remaining": count}}

    @router.get("/queue", summary="List the workflows that wait or run")
    async def queue(request: Request) -> Response:
        running, pending = (
            list_parts(p.entry_text for p in found) for found in prompts.active(caller_of(request).owner)
        )
        return json_parts(request, chain(('{"queue_running":',), running, (',"queue_pending":',), pending, ("}",)))

    @router.post("/queue", summary="Cancel workflows that wait")
    async def change_queue(request: Request) -> Response:
        clear, listed = _selection(await json_object(request, MAX_WORKFLOW_BYTES))
        ids = frozenset(listed)
        _, pending = prompts.active(caller_of(request).owner)
        for prompt in pending:
            if clear or prompt.prompt_id in ids:
                await prompt.submission.cancel()
        return Response()

    @router.post("/interrupt", summary="Cancel the workflows that run")
    async def interrupt(request: Request) -> Response:
        body = await json_object(request, MAX_WORKFLOW_BYTES) if await request.body() else {}
        running, _ = prompts.active(caller_of(request).owner)
        for prompt in running:
            if body.get("prompt_id") in (None, prompt.prompt_id):
                await prompt.submission.cancel()
        return Response()

    @router.get("/history", summary="List the workflows that have ended, oldest first")
    async def history(request: Request, max_items: int = Query(200), offset: int = Query(-1)) -> Response:
        ended = [prompt for prompt in prompts.of(caller_of(request).owner) if prompt.submission.over]
        listed = page_of(ended, max_items, offset)
        return json_parts(request, object_parts((each.prompt_id, each.history_text) for each in listed))

    @router.get("/history/{prompt_id}", summary="Show a workflow that has ended")
    async def history_of(request: Request, prompt_id: str) -> Response:
        prompt = prompts.find(caller_of(request).owner, prompt_id)
        ended = () if prompt is None or not prompt.submission.over else (prompt,)
        return json_parts(request, object_parts((each.prompt_id, each.history_text) for each in ended))

    @router.post("/history", summary="Forget workflows that have ended")
    async def change_history(request: Request) -> Response:
        clear, ids = _selection(await json_object(request, MAX_WORKFLOW_BYTES))
        prompts.forget(caller_of(request).owner, None if clear else ids)
        return Response()


def _add_file_routes(router: APIRouter, services: Services, prompts: ComfyPrompts, uploads: Uploads) -> None:
    max_bytes = services.settings.upload_bound_bytes

    @router.get("/view", summary="Download an image")
    async def view(
        request: Request, filename: str, subfolder: str = "", kind: str = Query("output", alias="type")
    ) -> Response:
        owner = caller_of(request).owner
        if kind == "input":
            content = await _uploaded(uploads, owner, filename, subfolder)
            return Response(content, media_type="application/octet-stream")
        path = prompts.output(owner, filename)
        return FileResponse(path, filename=filename, content_disposition_type="inline")

    @router.post("/upload/image", summary="Upload an image, a video or audio for nodes that load it")
    async def upload_image(request: Request) -> dict[str, Any]:
        form = await form_body(request, max_bytes)
        return await _stored(uploads, caller_of(request).owner, form, *_file_of(form))

    @router.post("/upload/mask", summary="Upload a mask: the alpha channel of an image that is known")
    async def upload_mask(request: Request) -> dict[str, Any]:
        form = await form_body(request, max_bytes)
        name, content = _file_of(form)
        owner = caller_of(request).owner
        original = await _original(prompts, uploads, owner, form)
        return await _stored(uploads, owner, form, name, await asyncio.to_thread(with_alpha, original, content))

    @router.get("/object_info", summary="Describe the nodes")
    async def object_info(request: Request) -> dict[str, Any]:
        names = await _names(services, uploads, caller_of(request).owner)
        return {name: described(kind, names) for name, kind in names.kinds.items()}

    @router.get("/object_info/{name}", summary="Describe a node")
    async def object_info_of(request: Request, name: str) -> dict[str, Any]:
        names = await _names(services, uploads, caller_of(request).owner)
        return {name: described(names.kinds[name], names)} if name in names.kinds else {}


def _file_of(form: FormBody) -> tuple[str, bytes]:
    """Return the name and the content of the file of an upload. Raises HttpProblem."""
    files = form.files.get("image", ())
    if len(files) != 1:
        raise HttpProblem(400, f"image: found {counted(len(files), 'file')}, expected one")
    return files[0]


async def _stored(uploads: Uploads, owner: str, form: FormBody, name: str, content: bytes) -> dict[str, Any]:
    """Store the file of an upload, and return the answer. Raises HttpProblem, and UserError."""
    if form.texts.get("type", "input") not in ("input", "temp"):
        raise HttpProblem(400, f"type: found {form.texts['type'][:40]!r}, expected input")
    subfolder = form.texts.get("subfolder", "")
    overwrite = form.texts.get("overwrite", "").lower() in ("true", "1")
    stored = await asyncio.to_thread(uploads.add, owner, name, content, subfolder, overwrite)
    return {"name": stored, "subfolder": subfolder, "type": "input"}


async def _uploaded(uploads: Uploads, owner: str, filename: str, subfolder: str) -> bytes:
    """Return an image that was uploaded. Raises HttpProblem (404)."""
    try:
        return await asyncio.to_thread(uploads.content, owner, f"{subfolder}/{filename}" if subfolder else filename)
    except UserError as problem:
        raise HttpProblem(404, str(problem)) from None


async def _original(prompts: ComfyPrompts, uploads: Uploads, owner: str, form: FormBody) -> bytes:
    """Return the image to which a mask belongs: an upload, or an output. Raises HttpProblem."""
    expected = 'original_ref: expected {"filename": NAME, "subfolder": NAME, "type": "input" or "output"}'
    try:
        named = parse_json(form.texts.get("original_ref", "").encode(), MAX_WORKFLOW_BYTES)
    except NotJson:
        raise HttpProblem(400, expected) from None
    if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
        raise HttpProblem(400, expected)
    filename, subfolder = named.get("filename", ""), named.get("subfolder", "")
    if named.get("type", "input") == "input":
        return await _uploaded(uploads, owner, filename, subfolder)
    return await asyncio.to_thread(prompts.output(owner, filename).read_bytes)


def _add_socket(router: APIRouter, prompts: ComfyPrompts, features: Mapping[str, Any]) -> None:
    @router.websocket("/ws")
    async def messages(socket: WebSocket) -> None:
        client_id = socket.query_params.get("clientId", "")[:MAX_ID_LENGTH] or uuid.uuid4().hex
        await socket.accept()
        known = Socket(client_id, caller_of(socket).owner)
        prompts.connect(known)
        reading = asyncio.create_task(_read_until_closed(socket, known, features))
        try:
            while (message := await known.messages.get()) is not None:
                if isinstance(message, StatesMessage):
                    await socket.send_json(message.take())
                elif isinstance(message, PreviewFrame):
                    await socket.send_bytes(message.take())
                elif isinstance(message, ImageFrame):
                    if content := await asyncio.to_thread(message.take):
                        await socket.send_bytes(content)
                else:
                    await socket.send_json(message)
            if not reading.done():
                await socket.close()
        except (WebSocketDisconnect, RuntimeError):  # closed by the client, before or while something is sent
            return
        finally:
            prompts.disconnect(known)
            reading.cancel()


async def _read_until_closed(socket: WebSocket, known: Socket, features: Mapping[str, Any]) -> None:
    """Read what a client announces; notice that it goes. Messages that ComfyUI's clients do not send are ignored."""
    while (received := await socket.receive())["type"] != "websocket.disconnect":
        text = received.get("text")
        if isinstance(text, str) and len(text) <= MOST_ANNOUNCED:
            with contextlib.suppress(NotJson):
                known.heard(parse_json(text.encode(), MOST_ANNOUNCED), features)
    known.close()


async def _submitted(
    services: Services, prompts: ComfyPrompts, uploads: Uploads, request: Request, body: Mapping[str, Any]
) -> Prompt:
    """Queue a workflow. Raises WorkflowRejected, and HttpProblem."""
    caller = caller_of(request)
    client_id, prompt_id = body.get("client_id"), body.get("prompt_id")
    prompt_id = uuid.uuid4().hex if prompt_id is None else prompt_id
    for name, value in (("client_id", client_id or "-"), ("prompt_id", prompt_id)):
        if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH:
            found = counted(len(value), "character") if isinstance(value, str) else type(value).__name__
            raise HttpProblem(400, f"{name}: found {found}, expected a text of 1 to {MAX_ID_LENGTH} characters")
    extra_data = body.get("extra_data") or {}
    if not isinstance(extra_data, dict):
        raise HttpProblem(400, "extra_data: expected a table")
    with prompts.reserved(caller.owner, prompt_id):
        prompts.check_room(caller.owner)
        graph = body.get("prompt")
        if graph is None and is_workflow(body):
            raise WorkflowRejected(
                "no_prompt", 'prompt: missing; expected {"prompt": WORKFLOW}, found the workflow itself'
            )
        names = await _names(services, uploads, caller.owner)
        if graph and is_exported(graph):
            graph = await asyncio.to_thread(api_format, graph, names.kinds)
        # other callers get their turn while a large workflow is read
        is_quick = is_read_quickly(graph)
        outputs = outputs_of(graph, names) if is_quick else await asyncio.to_thread(outputs_of, graph, names)
        assert isinstance(graph, dict), "a workflow with outputs"

        def build() -> Sequence[GenerateRequest]:
            return _requests(services, caller, graph, outputs, names, uploads)

        try:
            submission = await services.submit(caller, build, INTERFACE, sum(each.count for each in outputs))
        except (HttpProblem, WorkflowRejected):
            raise
        except UserError as problem:
            raise rejection(graph, outputs, problem, names.kinds) from None
        prompt = Prompt.of(
            prompts.next_number(), prompt_id, client_id, graph, extra_data, outputs, submission, names.kinds
        )
        prompts.add(prompt)
        submission.name_nodes(_titles(graph))
        return prompt


def is_read_quickly(graph: Any) -> bool:
    """Whether a workflow is small, and has no node that takes long: images are opened, frames of videos are counted,
    and texts are searched."""
    if not isinstance(graph, dict) or len(graph) > _SMALL_NODES:
        return False
    kinds = [node.get("class_type") for node in graph.values() if isinstance(node, dict)]
    files = (*LOADS_IMAGE, "LoadVideo", "LoadAudio", "VHS_LoadVideo", "VHS_LoadAudioUpload")
    return not any(kind in kinds for kind in (*files, *SEARCH_STEPS))


def _titles(graph: Mapping[str, Any]) -> dict[str, str]:
    """Return the titles of the nodes of a workflow: their kinds, and what the editor calls them if that differs."""
    found = {}
    for node_id, node in graph.items():
        kind, meta = node["class_type"], node.get("_meta")
        title = meta.get("title") if isinstance(meta, dict) else None
        found[node_id] = f"{title} ({kind})" if isinstance(title, str) and title not in ("", kind) else kind
        found[node_id] = found[node_id][:_MOST_TITLE]
    return found


def _requests(
    services: Services,
    caller: Caller,
    graph: Any,
    outputs: Sequence[OutputNode],
    names: PoolNames,
    uploads: Uploads,
) -> list[GenerateRequest]:
    """Return the requests of a workflow. Raises WorkflowRejected."""
    images = WorkflowImages(
        lambda name: uploads.image(caller.owner, name),
        services.settings.call_pixels,
        services.pixels_of_call(caller).take,
    )
    found: list[GenerateRequest] = []
    #: several nodes may save the same images
    known: dict[tuple[Any, ...], list[GenerateRequest]] = {}
    for output in outputs:
        what = output.made
        if what not in known:
            try:
                known[what] = requests_of(output, names, images)
            except HttpProblem:  # a limit, and not this workflow
                raise
            except UserError as problem:
                raise rejection(graph, [output], problem, names.kinds) from None
        found += known[what]
    return found


async def _names(services: Services, uploads: Uploads, owner: str) -> PoolNames:
    listings = await services.listings()
    files = await asyncio.to_thread(uploads.names, owner)
    audios, videos = ([name for name in files if is_one(name)] for is_one in (is_audio, is_moving))
    images = [name for name in files if not is_audio(name) and not is_moving(name)]
    models = {each.name: each.family for each in listings.models}
    loras = [each.name for each in listings.loras]
    read = partial(uploads.image, owner)
    kinds = kinds_with(listings.files.nodes)
    facts = lru_cache(_MOST_VIDEOS)(lambda name: uploads.video(owner, name))
    sounds = lru_cache(_MOST_VIDEOS)(lambda name: uploads.audio(owner, name))
    # ComfyUI reads the sound of a video, too
    heard = [*audios, *videos]
    about_files = image_size_of(read), facts, videos, sounds, heard, is_animation_of(read)
    return PoolNames(models, loras, images, listings.files, kinds, *about_files)


def page_of(ended: Sequence[Prompt], most: int, offset: int) -> Sequence[Prompt]:
    """Return `most` of them from `offset` on, or the latest ones for a negative offset. A negative `most` means all:
    clients send it, and a limit above what there is."""
    if offset >= 0:
        ended = ended[offset:]
        return ended if most < 0 else ended[:most]
    return ended if most < 0 else ended[max(0, len(ended) - most) :]


def _selection(body: Mapping[str, Any]) -> tuple[bool, Sequence[str]]:
    """Parse {"clear": true} or {"delete": [ids]}. Raises HttpProblem."""
    clear, ids = body.get("clear") or False, body.get("delete") or []
    if not isinstance(clear, bool) or not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise HttpProblem(400, 'body: expected {"clear": true} or {"delete": [ids]}')
    if not clear and not ids:
        raise HttpProblem(400, 'body: expected {"clear": true} or {"delete": [ids]}')
    return clear, ids
