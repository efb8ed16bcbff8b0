"""The web page at `/`: its files, and the calls below /api that only a page needs: live state, ends by a filter,
thumbnails, retries and the history of a job.

The files hold no data and need no key; the page sends the key with every call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import heapq
import uuid
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from modelpool.actors.http.native.native_api import INTERFACE, submission_json
from modelpool.actors.http.page.job_parameters import (
    recipe_fields,
    recipe_parameters,
    request_fields,
    request_parameters,
)
from modelpool.actors.http.page.live_entries import end_entry
from modelpool.actors.http.page.live_view import LiveView
from modelpool.actors.http.page.node_graph import graph_json
from modelpool.actors.http.page.thumbnails import MEDIA_TYPE, Thumbnails
from modelpool.actors.http.service.access import Caller
from modelpool.actors.http.service.bodies import as_object
from modelpool.actors.http.service.event_stream import EVENT_STREAM, with_pings
from modelpool.actors.http.service.gate import PAGE_FILES_PATH, PAGE_PATH
from modelpool.actors.http.service.node_outlines import outlines_of_recipe
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import Services, caller_of
from modelpool.actors.http.service.shown_messages import shown_values
from modelpool.actors.http.service.submission_inputs import INPUTS_FOLDER, with_own_inputs, written_for_submission
from modelpool.actors.http.service.submissions import HttpSubmission
from modelpool.actors.outputs.file_content import recipe_of_file
from modelpool.actors.outputs.results.history_json import history_json
from modelpool.actors.request.requests import GenerateRequest

#: the folder of the page's files in this package, and the file at `/`
FILES_FOLDER, INDEX_FILE = "static", "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: only files and answers of this server, no inline scripts and styles, no frames
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_FILE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
#: outputs never change; another user of the same browser has another key
_THUMBNAIL_HEADERS = {
    "Cache-Control": "private, max-age=86400, immutable",
    "Vary": "Authorization, X-API-Key",
    "X-Content-Type-Options": "nosniff",
}
#: ends that one call looks at, and after how many it lets other calls run
MOST_SEARCHED, SEARCHED_AT_ONCE = 20_000, 500


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page."""

    content: bytes
    media_type: str
    tag: str


@dataclass(frozen=True, slots=True)
class EndFilter:
    """Which ends a caller wants. `text` is in lower case; "" matches all, as does an empty state or submission."""

    text: str
    state: str
    submission: str

    def matches(self, submission: HttpSubmission, place: int) -> bool:
        """Whether the end at `place` of a submission is wanted."""
        end = submission.ends[place]
        if self.state and end.state != self.state:
            return False
        if not self.text:
            return True
        texts = (end.job_id, end.kind, end.message, str(end.seed), *submission.texts_of(end.index))
        return any(self.text in text.lower() for text in texts)


def page_files() -> dict[str, PageFile]:
    """Read the files of the page, by name."""
    found = {}
    for each in resources.files(__package__).joinpath(FILES_FOLDER).iterdir():
        media_type = _MEDIA_TYPES.get(each.name[each.name.rfind(".") :])
        if media_type is not None:
            content = each.read_bytes()
            found[each.name] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return found


def page_router(services: Services, live: LiveView) -> Any:
    """Return the routes of the page."""
    router = APIRouter(tags=["page"])
    files, thumbnails = page_files(), Thumbnails()

    @router.get(PAGE_PATH, include_in_schema=False)
    async def index(request: Request) -> Response:
        return _file_response(files[INDEX_FILE], request)

    @router.get(PAGE_FILES_PATH + "{name}", include_in_schema=False)
    async def page_file(request: Request, name: str) -> Response:
        if name not in files:
            raise HttpProblem(404, f"{name}: the page has no such file")
        return _file_response(files[name], request)

    @router.get("/api/live", summary="Follow the pool and the latest jobs: server-sent events")
    async def follow(request: Request) -> Response:
        owner = caller_of(request).owner
        live.check_capacity(owner)
        return StreamingResponse(
            with_pings(_events(live, owner)),
            media_type=EVENT_STREAM,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @router.get("/api/ends", summary="List ended jobs of all submissions, newest first")
    async def ends(
        request: Request,
        text: str = Query("", max_length=200),
        state: str = Query("", max_length=20),
        submission: str = Query("", max_length=100),
        before: int | None = Query(None, ge=0),
        limit: int = Query(48, ge=1, le=200),
    ) -> dict[str, Any]:
        owner = caller_of(request).owner
        if submission:  # it may be in the pool's journal only
            await services.submissions.find(submission, owner)
        wanted = EndFilter(text.lower(), state, submission)
        return await found_ends(services.submissions.of(owner), wanted, before, limit)

    @router.get("/api/jobs/{submission_id}/outputs/{index}/thumbnail", summary="Show an output image in a small size")
    async def thumbnail(
        request: Request, submission_id: str, index: int, file: str = Query("", max_length=300)
    ) -> Response:
        owner = caller_of(request).owner
        path = await services.output_path(submission_id, index, owner, file)
        return Response(await thumbnails.of(path, owner), media_type=MEDIA_TYPE, headers=_THUMBNAIL_HEADERS)

    @router.get("/api/jobs/{submission_id}/requests/{index}", summary="Show the parameters and the recipe of a job")
    async def job_request(request: Request, submission_id: str, index: int) -> dict[str, Any]:
        submission = await services.submissions.find(submission_id, caller_of(request).owner)
        return as_object(shown_values(await job_parameters(submission, index)))

    @router.get("/api/jobs/{submission_id}/graph/{index}", summary="Show the nodes of a job that is a workflow")
    async def job_graph(request: Request, submission_id: str, index: int) -> dict[str, Any]:
        submission = await services.submissions.find(submission_id, caller_of(request).owner)
        return as_object(shown_values(await job_nodes(submission, index)))

    @router.post("/api/jobs/{submission_id}/retry", status_code=201, summary="Submit jobs that have no output again")
    async def retry(request: Request, submission_id: str) -> Response:
        again = await _retried(services, caller_of(request), submission_id)
        return JSONResponse(submission_json(again), 201, {"Location": f"/api/jobs/{again.id}"})

    @router.get("/api/job-history/{job_id}", summary="Explain where the tasks of a job ran, with its event log")
    async def history(request: Request, job_id: str) -> dict[str, Any]:
        found = await services.history(caller_of(request), job_id)
        lines = [dataclasses.asdict(line) for line in found.lines]
        return as_object(shown_values({**history_json(found), "lines": lines}))

    return router


async def _retried(services: Services, caller: Caller, submission_id: str) -> HttpSubmission:
    """Submit the jobs of a submission that have no output again, with their own copies of the inputs."""
    submission = await services.submissions.find(submission_id, caller.owner)
    requests = retried_requests(submission)
    jobs_id = uuid.uuid4().hex[:16] if submission.detached else None
    root = services.folder / INPUTS_FOLDER
    folder = None if jobs_id is None else root / jobs_id

    def build() -> Sequence[GenerateRequest]:
        return requests if folder is None else [with_own_inputs(each, root, folder) for each in requests]

    async with written_for_submission(folder):
        return await services.submit(caller, build, INTERFACE, len(requests), jobs_id)


async def found_ends(
    submissions: Sequence[HttpSubmission], wanted: EndFilter, before: int | None, limit: int
) -> dict[str, Any]:
    """Return up to `limit` wanted ends with numbers below `before`, newest first, and the number to go on with: None
    if there are no more. Looks at MOST_SEARCHED ends at most, and lets other calls run meanwhile.
    """
    found: list[dict[str, Any]] = []
    chosen = [each for each in submissions if wanted.submission in ("", each.id)]
    newest_first = heapq.merge(*(_newest_first(each, before) for each in chosen), key=lambda each: each[0])
    for looked, (negative, submission, place) in enumerate(newest_first):
        if len(found) == limit or looked == MOST_SEARCHED:
            return {"ends": found, "next": 1 - negative}
        if wanted.matches(submission, place):
            found.append(end_entry(submission, place))
        if looked % SEARCHED_AT_ONCE == SEARCHED_AT_ONCE - 1:
            await asyncio.sleep(0)
    return {"ends": found, "next": None}


async def job_parameters(submission: HttpSubmission, index: int) -> dict[str, Any]:
    """Return the fields of the page's form for a job, all its `parameters`, and its `recipe` if it has an output that
    is readable here. Raises HttpProblem (404) if neither the request nor the recipe is known."""
    request, end = submission.request_of(index), submission.end_of(index)
    path = None if end is None else end.path
    recipe = None if path is None else await asyncio.to_thread(recipe_of_file, path)
    if recipe is not None:
        fields = recipe_fields(recipe) if request is None else request_fields(request) | {"seed": recipe.seed}
        return {**fields, "parameters": recipe_parameters(recipe), "recipe": recipe.as_json()}
    if request is None:
        raise HttpProblem(404, f"the request of job {index} is not known to this server")
    seed = {} if end is None or end.seed is None else {"seed": end.seed}
    return {**request_fields(request), **seed, "parameters": {**request_parameters(request), **seed}, "recipe": None}


async def job_nodes(submission: HttpSubmission, index: int) -> dict[str, Any]:
    """Return the nodes of a job with their places and states; no nodes for a job without a workflow, and for one with
    a request that neither this server nor an output has."""
    outlines, end = submission.outlines_of(index), submission.end_of(index)
    if not outlines and submission.request_of(index) is None and end is not None and end.path is not None:
        recipe = await asyncio.to_thread(recipe_of_file, end.path)
        outlines = () if recipe is None else outlines_of_recipe(recipe)
    running = [task for task in submission.running if task.index == index]
    state = "cancelled" if submission.lost and end is None else "" if end is None else end.state
    return graph_json(outlines, submission.nodes_of(index), running, state, submission.titles)


def retried_requests(submission: HttpSubmission) -> list[GenerateRequest]:
    """Return the requests of jobs that failed or were cancelled, with the seeds that they had. Raises HttpProblem
    (409).
    """
    ends = [end for end in submission.ends if end.state != "succeeded"]
    if not ends:
        raise HttpProblem(409, f"submission {submission.id} has no job that failed or was cancelled")
    known = [(end, request) for end in ends if (request := submission.request_of(end.index)) is not None]
    if len(known) < len(ends):
        raise HttpProblem(409, f"submission {submission.id}: its requests are not known to this server")
    return [
        request if end.seed is None else request.model_copy(update={"seed": end.seed})
        for end, request in sorted(known, key=lambda each: each[0].index)
    ]


def _newest_first(submission: HttpSubmission, before: int | None) -> Iterator[tuple[int, HttpSubmission, int]]:
    """Iterate over the ends with numbers below `before`: the number with a minus sign, the submission and the place."""
    marks = submission.end_marks
    behind = len(marks) if before is None else bisect_left(marks, before, key=lambda mark: mark[0])
    return ((-marks[place][0], submission, place) for place in range(behind - 1, -1, -1))


async def _events(live: LiveView, owner: str) -> AsyncIterator[bytes]:
    async for text in live.changes(owner):
        yield f"event: live\ndata: {text}\n\n".encode()


def _file_response(file: PageFile, request: Request) -> Response:
    headers = {**_FILE_HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
