"""The native interface, `/api/jobs`: submit, list, follow, cancel, explain and download."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from modelpool.actors.control.detached.records import SubmissionRecord, SubmissionState
from modelpool.actors.control.metrics.exposition import CONTENT_TYPE, metrics_text
from modelpool.actors.http.comfy.comfy_export import is_workflow
from modelpool.actors.http.service.access import Caller, check_number
from modelpool.actors.http.service.bodies import as_object, json_body
from modelpool.actors.http.service.caller_images import check_url
from modelpool.actors.http.service.encoded_images import BEST_QUALITY, image_bytes
from modelpool.actors.http.service.event_stream import EVENT_STREAM, event, with_pings
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import ClientGone, Services, caller_of
from modelpool.actors.http.service.shown_messages import shown_values
from modelpool.actors.http.service.submission_inputs import INPUTS_FOLDER, written_for_submission
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, RunningTask, Submissions
from modelpool.actors.http.service.user_views import families_for, status_for
from modelpool.actors.http.service.webhooks import Webhooks
from modelpool.actors.outputs.results.history_json import history_json
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.bounds import over_bound, reworded
from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.requests import SPELLINGS, GenerateRequest
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS, SCHEDULES
from modelpool.pool.values.core.errors import UserError, counted
from modelpool.pool.values.core.previews import MEDIA_TYPE
from modelpool.pool.values.core.run_options import MAIN_SETTING, RUN_OPTIONS, RunOption, limits_of

INTERFACE = "native"
#: keys of each owner that are remembered in a pool without a journal
MOST_KEYS = 2000
MAX_KEY_LENGTH = 200
#: ends in one answer; the others follow by `after`
MOST_LISTED_ENDS = 1000
#: LoRAs in all requests of a call; each takes a KB of memory, and as few as four bytes of a body
MAX_CALL_LORAS = 50_000
#: keys of a submission besides its requests
_SUBMISSION_KEYS = ("requests", "webhook", "detached")
_SCHEMAS = "#/components/schemas/"
_NOT_STORED = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class NewJobs:
    """The body of a submission, checked as far as this is possible without the pool.

    detached  whether the pool's journal runs it; None: if the pool has one, and there is an idempotency key or another
              server that may be asked about it
    """

    requests: tuple[dict[str, Any], ...]
    webhook: str = ""
    detached: bool | None = None

    @classmethod
    def of(cls, body: Any, most_requests: int) -> NewJobs:
        """Parse one request, a list of up to `most_requests`, or {"requests":, "webhook":, "detached":}. Raises
        HttpProblem."""
        if isinstance(body, list):
            check_number(len(body), most_requests)  # first: all that follows takes time for each
            return cls(tuple(as_object(each, f"requests[{place}]") for place, each in enumerate(body)))
        fields = as_object(body)
        if is_workflow(fields) or isinstance(fields.get("prompt"), dict):
            raise HttpProblem(
                400, 'body: found a workflow of ComfyUI, expected a request; POST {"prompt": ...} to /prompt'
            )
        if fields.get("requests") is None and not fields.keys() - _SUBMISSION_KEYS:
            raise HttpProblem(400, "requests: missing; expected a list of requests")
        if fields.get("requests") is None:
            return cls(({name: value for name, value in fields.items() if name != "requests"},))
        for name in fields:
            if name not in _SUBMISSION_KEYS:
                raise HttpProblem(400, f"{name}: unknown; expected {', '.join(_SUBMISSION_KEYS)}")
        requests, detached = fields["requests"], fields.get("detached")
        if not isinstance(requests, list):
            raise HttpProblem(400, "requests: expected a list of requests")
        if not (detached is None or isinstance(detached, bool)):
            raise HttpProblem(400, f"detached: found {detached!r}, expected true or false")
        webhook = fields.get("webhook") or ""
        return cls(cls.of(requests, most_requests).requests, webhook, detached)

    @property
    def count(self) -> int:
        """The number of outputs. Raises UnusableField."""
        return sum(map(_outputs_of, self.requests))


@dataclass(slots=True)
class _Keyed:
    """A submission under an idempotency key, and the hash of its body: on its way, or its id. Nothing else of it is
    kept, so that keys keep no submission that the server has forgotten."""

    body_sha256: str
    arriving: asyncio.Future[HttpSubmission] | None
    submission_id: str = ""


class Idempotency:
    """The submissions of the latest idempotency keys. Belongs to one event loop."""

    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions
        #: by owner
        self._owners: dict[str, OrderedDict[str, _Keyed]] = {}

    async def once(
        self, owner: str, key_id: str, body_sha256: str, submit: Callable[[], Coroutine[Any, Any, HttpSubmission]]
    ) -> HttpSubmission:
        """Return the submission under a key; submit if there is none. Raises HttpProblem (409 for another body, 410 for
        a submission that is forgotten), and what `submit` raises; then the key is free again.
        """
        of_owner = self._owners.setdefault(owner, OrderedDict())
        known = of_owner.get(key_id)
        if known is None:
            arriving = asyncio.ensure_future(submit())
            known = of_owner[key_id] = _Keyed(body_sha256, arriving)
            arriving.add_done_callback(partial(_note_arrived, of_owner, key_id, known))
            while len(of_owner) > MOST_KEYS:
                of_owner.popitem(last=False)
        if known.body_sha256 != body_sha256:
            raise HttpProblem(409, "Idempotency-Key: it was used for another body")
        if known.arriving is not None:
            # a client that goes must not cancel what another one waits for
            return await asyncio.shield(known.arriving)
        try:
            return await self._submissions.find(known.submission_id, owner)
        except HttpProblem as problem:
            if problem.status != 404:
                raise
            message = f"submission {known.submission_id} has ended, and the server remembers it no more"
            raise HttpProblem(410, f"Idempotency-Key: {message}; its outputs stay") from None


def _note_arrived(
    of_owner: OrderedDict[str, _Keyed], key_id: str, keyed: _Keyed, arrived: asyncio.Future[HttpSubmission]
) -> None:
    if not arrived.cancelled() and arrived.exception() is None:
        keyed.submission_id, keyed.arriving = arrived.result().id, None
    elif of_owner.get(key_id) is keyed:
        del of_owner[key_id]


def native_router(services: Services, webhooks: Webhooks, start: Callable[[Coroutine[Any, Any, None]], None]) -> Any:
    """Return the routes below /api. `start` runs a coroutine in the background."""
    router = APIRouter(tags=["native"])
    _add_submissions(router, services, webhooks, start)
    _add_submission(router, services)
    _add_pool(router, services)
    return router


def _add_submissions(
    router: APIRouter,
    services: Services,
    webhooks: Webhooks,
    start: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """Add the calls that submit requests and list submissions."""
    idempotency = Idempotency(services.submissions)
    max_bytes = services.settings.upload_bound_bytes
    extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": submission_schema()}}}}

    @router.post("/api/jobs", status_code=201, openapi_extra=extra, summary="Submit requests")
    async def submit(request: Request) -> Response:
        caller = caller_of(request)
        body = await json_body(request, max_bytes)
        new = NewJobs.of(body, services.settings.queued_jobs)
        if new.webhook:
            _check_webhook(services, new.webhook)
        key = request.headers.get("idempotency-key")
        if key is None:
            is_shared = new.detached is None and services.has_siblings and await services.keeps_jobs()
            jobs_id = _fresh_id() if new.detached or is_shared else None
            submission = await _notifying(webhooks, start, new.webhook, _submitted(services, caller, new, jobs_id))
        else:
            submission = await _submitted_once(services, idempotency, webhooks, start, caller, new, key, body)
        return JSONResponse(submission_json(submission), 201, {"Location": f"/api/jobs/{submission.id}"})

    @router.get("/api/jobs", summary="List submissions, newest first")
    async def list_jobs(request: Request, limit: int = Query(100, ge=1, le=1000)) -> dict[str, Any]:
        owner = caller_of(request).owner
        found = services.submissions.of(owner)[: -limit - 1 : -1]
        listed = [submission_json(each, most_ends=0) for each in found]
        if services.has_siblings and await services.keeps_jobs():
            known = {each.id for each in found}
            records = await asyncio.to_thread(services.pool.detached)
            listed += [
                record_json(each)
                for each in records
                if each.submission_id not in known and (not owner or each.user == owner)
            ]
            listed.sort(key=lambda each: each["created_at"], reverse=True)
        return {"submissions": listed[:limit]}


def _add_submission(router: APIRouter, services: Services) -> None:
    """Add the calls about one submission."""

    @router.get("/api/jobs/{submission_id}", summary="Show a submission and its outputs")
    async def show(request: Request, submission_id: str, after: int = Query(0, ge=0)) -> dict[str, Any]:
        return submission_json(await _found(services, request, submission_id), after)

    @router.get("/api/jobs/{submission_id}/events", summary="Follow a submission: server-sent events")
    async def follow(
        request: Request, submission_id: str, after: int | None = Query(None, ge=0), previews: bool = False
    ) -> Response:
        submission = await _found(services, request, submission_id)
        last = request.headers.get("last-event-id", "")
        seen = after if after is not None else int(last) if last.isdecimal() and len(last) < 12 else 0
        return StreamingResponse(with_pings(_events(submission, seen, previews)), media_type=EVENT_STREAM)

    @router.get(
        "/api/jobs/{submission_id}/preview",
        summary="Show the newest preview of a job that is being sampled, or of any of them; 204 if there is none",
        response_class=Response,
    )
    async def preview(request: Request, submission_id: str, index: int | None = Query(None, ge=0)) -> Response:
        submission = await _found(services, request, submission_id)
        submission.ask_for_previews()
        newest = next(reversed(submission.previews.values()), None) if index is None else submission.previews.get(index)
        if newest is None:
            return Response(status_code=204, headers=_NOT_STORED)
        about = {"X-Index": str(newest.index), "X-Step": str(newest.step), "X-Steps": str(newest.steps)}
        return Response(newest.content, media_type=MEDIA_TYPE, headers={**_NOT_STORED, **about})

    @router.delete("/api/jobs/{submission_id}", summary="Cancel what has not ended")
    async def cancel(request: Request, submission_id: str) -> dict[str, Any]:
        submission = await _found(services, request, submission_id)
        await submission.cancel()
        return submission_json(submission, most_ends=0)

    @router.get("/api/jobs/{submission_id}/why", summary="Explain where the tasks of a job ran")
    async def why(request: Request, submission_id: str, index: int = Query(0, ge=0)) -> dict[str, Any]:
        submission = await _found(services, request, submission_id)
        history = await services.history(caller_of(request), _job_id(submission, index))
        return as_object(shown_values(history_json(history)))

    @router.get("/api/jobs/{submission_id}/story", summary="Show the event log of a job")
    async def story(request: Request, submission_id: str, index: int = Query(0, ge=0)) -> dict[str, Any]:
        submission = await _found(services, request, submission_id)
        history = await services.history(caller_of(request), _job_id(submission, index))
        return {"job": history.job_id, "lines": shown_values([dataclasses.asdict(line) for line in history.lines])}

    @router.get("/api/jobs/{submission_id}/outputs/{index}", summary="Download an output")
    async def output(
        request: Request, submission_id: str, index: int, file: str = Query("", max_length=300)
    ) -> Response:
        return file_response(await services.output_path(submission_id, index, caller_of(request).owner, file))


def _add_pool(router: APIRouter, services: Services) -> None:
    """Add the calls about the pool, and signed addresses of outputs."""

    @router.get("/files/{name:path}", include_in_schema=False)
    async def signed(
        name: str, until: int, signature: str, file_format: str = "", quality: int = Query(BEST_QUALITY, ge=0, le=100)
    ) -> Response:
        path = services.signed_file(name, until, signature, file_format, quality)
        if not file_format:
            return file_response(path)
        content = await asyncio.to_thread(image_bytes, path, file_format, quality)
        shown_name = f"inline; filename*=utf-8''{quote(path.stem)}.{file_format}"
        return Response(content, media_type=f"image/{file_format}", headers={"Content-Disposition": shown_name})

    # not /api/models, which is a call of ComfyUI
    @router.get("/api/choices", summary="List what requests name: models, LoRAs, other files, samplers, options")
    async def choices() -> dict[str, Any]:
        listings = await services.listings()
        return {
            "models": [
                {"name": each.name, "family": each.family, "width": each.width, "height": each.height}
                for each in listings.models
            ],
            "loras": [each.name for each in listings.loras],
            **dataclasses.asdict(listings.files),
            "samplers": [{"name": name, "label": each.display} for name, each in SAMPLERS.items()],
            "schedules": [{"name": name, "label": label} for name, label in SCHEDULES.items()],
            "options": [_option_json(name, kind) for name, kind in RUN_OPTIONS.items()],
        }

    @router.get("/api/status", summary="Show the state of the pool")
    async def status(request: Request) -> dict[str, Any]:
        now = await asyncio.to_thread(services.pool.status)
        if (user := caller_of(request).user) is not None:
            jobs = {job.job_id for job in now.failures}
            own = {job_id for job_id in jobs if services.submissions.has_job(user, job_id)}
            now = status_for(now, user, own)
        return as_object(
            shown_values({**dataclasses.asdict(now), "waiting": dict(now.waiting), "jobs": dict(now.jobs)})
        )

    @router.get("/metrics", summary="Metrics of the pool for Prometheus")
    async def metrics(request: Request) -> Response:
        families = await asyncio.to_thread(services.pool.metrics)
        if (user := caller_of(request).user) is not None:
            families = families_for(families, user)
        families = (*families, *services.limits.families())
        return Response(metrics_text(families), media_type=CONTENT_TYPE)


def _option_json(name: str, kind: type[RunOption]) -> dict[str, Any]:
    """Return an option of a run with its settings, the main one first."""
    defaults = {each.name: each.default for each in dataclasses.fields(kind)}
    main = MAIN_SETTING.get(name, "")
    settings = [
        {"name": setting, "default": defaults[setting], **dataclasses.asdict(limits)}
        for setting, limits in limits_of(kind).items()
    ]
    settings.sort(key=lambda each: each["name"] != main)
    meaning = " ".join((kind.__doc__ or "").partition("Source:")[0].split())
    return {"name": name, "meaning": meaning, "main": main, "settings": settings}


def submission_json(submission: HttpSubmission, after: int = 0, most_ends: int = MOST_LISTED_ENDS) -> dict[str, Any]:
    """Return a submission as JSON values, with its ends behind the first `after`."""
    counts = submission.counts
    return {
        "id": submission.id,
        "state": "lost" if submission.lost else "ended" if submission.over else "active",
        "interface": submission.interface,
        "detached": submission.detached,
        "created_at": submission.created_at,
        "jobs": submission.total,
        **{state: counts[state] for state in ("succeeded", "failed", "cancelled")},
        "waits_for": submission.lost or submission.held,
        "running": [running_json(task) for task in submission.running],
        "ends": [end_json(submission, end) for end in submission.ends[after : after + most_ends]],
    }


def record_json(record: SubmissionRecord) -> dict[str, Any]:
    """Return a submission of the pool's journal as JSON values, as `submission_json` without what runs and its ends."""
    return {
        "id": record.submission_id,
        "state": "ended" if record.state is SubmissionState.ENDED else "active",
        "interface": INTERFACE,
        "detached": True,
        "created_at": record.created_at,
        "jobs": record.request_count,
        "succeeded": record.succeeded,
        "failed": record.failed,
        "cancelled": record.cancelled,
        "waits_for": record.trouble,
        "running": [],
        "ends": [],
    }


def end_json(submission: HttpSubmission, end: JobEnd) -> dict[str, Any]:
    """Return the end of a job as JSON values."""
    found: dict[str, Any] = {"index": end.index, "job": end.job_id, "state": end.state, "seed": end.seed}
    found |= end.labels.as_json()
    if end.address:
        return {**found, "address": end.address, **end.facts}
    if end.path is None:
        return {**found, "kind": end.kind, "message": end.message}
    url = f"/api/jobs/{submission.id}/outputs/{end.index}"
    return {**found, "file": end.path.name, "url": url, **end.facts}


def file_response(path: Path) -> FileResponse:
    """Return the file of an output."""
    return FileResponse(path, filename=path.name, content_disposition_type="inline")


def preview_json(submission: HttpSubmission, preview: ImagePreview) -> dict[str, Any]:
    """Return what names a preview: where it is, and the step that it shows."""
    url = f"/api/jobs/{submission.id}/preview?index={preview.index}&step={preview.step}"
    return {"index": preview.index, "job": preview.job_id, "step": preview.step, "steps": preview.steps, "url": url}


async def _events(submission: HttpSubmission, after: int, previews: bool) -> AsyncIterator[bytes]:
    """Yield each end with its number as the id of the event, so that a client that connects again misses none. With
    `previews`, have some made meanwhile; those that exist are named in any case."""
    with submission.previews_wanted() if previews else contextlib.nullcontext():
        async for text in _events_of(submission, after):
            yield text


async def _events_of(submission: HttpSubmission, after: int) -> AsyncIterator[bytes]:
    number, before = after, ""
    named: dict[int, ImagePreview] = {}
    async for change in submission.changes(after):
        for end in change.ends:
            number += 1
            yield event("job", end_json(submission, end), str(number))
        if submission.over:
            continue
        running = [running_json(task) for task in change.running]
        now = {"ended": number, "jobs": submission.total, "running": running, "waits_for": change.held}
        if (text := json.dumps(now)) != before:
            before = text
            yield event("progress", now)
        found, named = named, dict(submission.previews)
        for index, preview in named.items():
            if found.get(index) is not preview:
                yield event("preview", preview_json(submission, preview))
    yield event("end", submission_json(submission, most_ends=0))


async def _found(services: Services, request: Request, submission_id: str) -> HttpSubmission:
    return await services.submissions.find(submission_id, caller_of(request).owner)


def _job_id(submission: HttpSubmission, index: int) -> str:
    """Return the id of a job. Raises HttpProblem (404)."""
    if index >= submission.total:
        raise HttpProblem(404, f"index: found {index}, expected 0 to {submission.total - 1}")
    return f"{submission.id}-{index}"


def _check_webhook(services: Services, url: Any) -> None:
    check_url("webhook", url, services.settings.url_hosts)
    if not services.settings.webhook_secret:
        raise HttpProblem(400, "webhook: this server has no [serve] webhook_secret to sign with")


async def _submitted(services: Services, caller: Caller, new: NewJobs, jobs_id: str | None) -> HttpSubmission:
    def build() -> Sequence[GenerateRequest]:
        return _requests(services, new, jobs_id, caller)

    folder = None if jobs_id is None else services.folder / INPUTS_FOLDER / jobs_id
    async with written_for_submission(folder):
        return await services.submit(caller, build, INTERFACE, new.count, jobs_id)


def _requests(services: Services, new: NewJobs, jobs_id: str | None, caller: Caller) -> Sequence[GenerateRequest]:
    folder: Path | None = services.folder / INPUTS_FOLDER / jobs_id if jobs_id is not None else None
    images = services.images_of_call(caller)
    loras = sum(len(each["loras"]) for each in new.requests if isinstance(each.get("loras"), list | dict))
    if loras > MAX_CALL_LORAS:
        raise over_bound("requests.loras", f"{loras} in all requests", f"up to {MAX_CALL_LORAS}")
    requests = []
    for place, fields in enumerate(new.requests):
        if caller.call.is_gone:
            raise ClientGone
        try:
            requests.append(GenerateRequest(**images.in_fields(fields, folder)))
        except HttpProblem:  # a limit, and not this request
            raise
        except UserError as problem:
            if len(new.requests) == 1:
                raise
            raise reworded(problem, f"requests[{place}]: {problem}") from None
    return [one for request in requests for one in request.expanded()]


def _outputs_of(fields: Mapping[str, Any]) -> int:
    """Return the number of outputs of a request, before its images are decoded. Raises UnusableField."""
    names = ("n", *(name for name, own in SPELLINGS.items() if own == "n"))
    given = next((fields[name] for name in names if fields.get(name) is not None), 1)
    count: int = REQUEST_FIELDS["n"].checked(given)
    return count


async def _submitted_once(
    services: Services,
    idempotency: Idempotency,
    webhooks: Webhooks,
    start: Callable[[Coroutine[Any, Any, None]], None],
    caller: Caller,
    new: NewJobs,
    key: str,
    body: Any,
) -> HttpSubmission:
    if not 0 < len(key) <= MAX_KEY_LENGTH:
        raise HttpProblem(
            400, f"Idempotency-Key: found {counted(len(key), 'character')}, expected 1 to {MAX_KEY_LENGTH}"
        )
    # a client that has gone calls again with its key
    caller = Caller(caller.user)
    key_id = "http-" + hashlib.sha256(f"{caller.owner}\0{key}".encode()).hexdigest()[:24]
    body_sha256 = await asyncio.to_thread(_digest_of, body)
    detached = new.detached if new.detached is not None else await services.keeps_jobs()

    async def submit() -> HttpSubmission:
        submitted = _submitted(services, caller, new, key_id if detached else None)
        return await _notifying(webhooks, start, new.webhook, submitted)

    return await idempotency.once(caller.owner, key_id, body_sha256, submit)


def _digest_of(body: Any) -> str:
    """Return a hash of a JSON value. Part by part: one call of the encoder would keep the interpreter from the loop."""
    digest = hashlib.sha256()
    for part in json.JSONEncoder(sort_keys=True).iterencode(body):
        digest.update(part.encode())
    return digest.hexdigest()


def _fresh_id() -> str:
    return uuid.uuid4().hex[:16]


async def _notifying(
    webhooks: Webhooks,
    start: Callable[[Coroutine[Any, Any, None]], None],
    url: str,
    submitted: Coroutine[Any, Any, HttpSubmission],
) -> HttpSubmission:
    """Return what `submitted` returns, and have its end delivered to `url`, if there is one. Raises HttpProblem (429)
    before anything is submitted if too many webhooks are pending, and what `submitted` raises.
    """
    if not url:
        return await submitted
    try:
        webhooks.reserve()
    except HttpProblem:
        submitted.close()
        raise
    try:
        submission = await submitted
    except BaseException:
        webhooks.release()
        raise

    async def deliver() -> None:
        try:
            async for _ in submission.changes():
                pass
            await webhooks.deliver(url, {"type": "submission.ended", "submission": submission_json(submission)})
        finally:
            webhooks.release()

    start(deliver())
    return submission


def submission_schema() -> dict[str, Any]:
    """Return the JSON schema of the body of a submission; `request_schemas` has what it refers to."""
    one = {"$ref": f"{_SCHEMAS}GenerateRequest"}
    many = {
        "type": "object",
        "required": ["requests"],
        "properties": {
            "requests": {"type": "array", "items": one},
            "webhook": {"type": "string", "description": "Receives the submission when it has ended."},
            "detached": {"type": "boolean", "description": "Let the pool's journal run it: it outlives this server."},
        },
        "additionalProperties": False,
    }
    return {"oneOf": [one, {"type": "array", "items": one}, many]}


def request_schemas() -> dict[str, Any]:
    """Return the schemas of a request and its parts, by name: derived from the table of fields."""
    request = GenerateRequest.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    parts: dict[str, Any] = request.pop("$defs", {})
    return {**parts, "GenerateRequest": request}


def running_json(task: RunningTask) -> dict[str, Any]:
    """Return a task on a worker as JSON values: with the nodes that it serves, for a job that is a workflow."""
    fields = dataclasses.asdict(task)
    if all(name.startswith(f"{task.stage}.") for name in task.nodes):  # a request without a workflow
        del fields["nodes"]
    return fields
