"""`Services`: what the interfaces share: the pool, submissions, limits, images of callers and addresses of outputs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.service.access import AccessControl, Caller
from modelpool.actors.http.service.access import caller_of as caller_of
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.caller_names import check_names, may_name_paths
from modelpool.actors.http.service.gate import SIGNED_PATH
from modelpool.actors.http.service.held_shares import HeldShare, HeldShares
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.http.service.ports import HttpPool
from modelpool.actors.http.service.problems import HttpProblem, not_stored
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, Submissions, owner_folder
from modelpool.actors.http.service.turns import Turns
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.bounds import check_characters, over_bound
from modelpool.actors.request.field_table import ADAPTIVE_BATCH
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import journaled_id
from modelpool.pool.values.core.errors import OutputFailed, UnknownName, UserError, counted
from modelpool.pool.values.specs.spec import JobId

if TYPE_CHECKING:
    from starlette.requests import Request

    from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing
    from modelpool.scheduler.core.history import JobHistory

#: folders of what callers send, and of their outputs, in the folder of a server
OWN_FOLDERS = ("uploads", "inputs", "users")
#: how long a signed address of an output is valid, as in the OpenAI API
SIGNED_SECONDS = 3600
#: how long the lists of models and LoRAs are used: reading them asks the controller
LISTING_SECONDS = 5.0
#: calls that build requests at a time, in all and of each owner: fewer than there are threads
MOST_BUILDING, MOST_BUILDING_OF_OWNER = 20, 8


class ClientGone(HttpProblem):
    """The client closed its connection; its jobs are cancelled. Status 499, as logs of proxies call it."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


@dataclass(frozen=True, slots=True)
class Listings:
    """The usable models, LoRAs and other files of the pool, as of `at` on the monotonic clock."""

    models: tuple[ModelListing, ...]
    loras: tuple[LoraListing, ...]
    files: FileNames
    at: float

    @property
    def names(self) -> frozenset[str]:
        """The names of all."""
        named = frozenset((*(model.name for model in self.models), *(lora.name for lora in self.loras)))
        return named | self.files.all


class Services:
    """One for each application. Belongs to one event loop."""

    def __init__(
        self,
        pool: HttpPool,
        settings: ServeSection,
        folder: Path,
        secret: bytes,
        has_siblings: bool = False,
        limits: LimitLog | None = None,
    ) -> None:
        """`secret` signs addresses of outputs. `has_siblings`: other servers answer calls about submissions of this
        one. `limits` counts what limits do."""
        self.limits = LimitLog() if limits is None else limits
        self.pool = pool
        self.settings = settings
        self.folder = folder
        self.access = AccessControl(settings, time.monotonic)
        self.submissions = Submissions(pool, folder, settings.kept_submissions)
        self.has_siblings = has_siblings
        #: requests are built in threads, which other calls need, too
        self.building = Turns(MOST_BUILDING, MOST_BUILDING_OF_OWNER)
        held = settings.held_pixels
        self.pixels = HeldShares("decoded pixels of images", "held_pixels", 4 * held, held)
        self._secret = secret
        _keep_private(folder)
        self._listings: Listings | None = None
        #: reads the lists, once for all callers
        self._listing: asyncio.Task[Listings] | None = None
        self._keeps_jobs: bool | None = None
        #: jobs of each owner that are being submitted
        self._arriving: dict[str, int] = {}

    def images_of_call(self, caller: Caller) -> CallerImages:
        """Return a decoder for the images of one call, which holds their pixels until it frees them (`holding`)."""
        settings, take = self.settings, self.pixels_of_call(caller).take
        return CallerImages(settings.url_hosts, settings.upload_bound_bytes, settings.call_pixels, take)

    def pixels_of_call(self, caller: Caller) -> HeldShare:
        """Return the pixels that a call holds."""
        if caller.call.pixels is None:
            caller.call.pixels = HeldShare(self.pixels, caller.owner)
        return caller.call.pixels

    @contextmanager
    def holding(self, caller: Caller) -> Iterator[None]:
        """Free the pixels of a call at the end of the block, unless a submission has taken them over."""
        try:
            yield
        finally:
            if caller.call.pixels is not None:
                caller.call.pixels.free()
                caller.call.pixels = None

    async def submit(
        self,
        caller: Caller,
        build: Callable[[], Sequence[GenerateRequest]],
        interface: str,
        count: int,
        detached_id: str | None = None,
    ) -> HttpSubmission:
        """Build `count` requests in a thread, and queue them for `caller`: in the pool's journal if there is a
        `detached_id`. Too many are refused before their images are decoded.
        Raises UserError, HttpProblem (429 for too many jobs), and PoolLost.
        """
        if not count:
            raise HttpProblem(400, "requests: found none, expected at least one")
        owner = caller.owner
        with self.arriving(caller, count), self.holding(caller):
            async with self.building.turn(owner):
                if caller.call.is_gone:
                    raise ClientGone
                built = await asyncio.to_thread(build)
            for request in built:
                check_texts(request, self.settings.prompt_characters)
            names = await self.listed_names() if any(map(may_name_paths, built)) else frozenset()
            highest = self.settings.priority_of(caller.user)
            batch = 1 if detached_id is not None and self.settings.batch == ADAPTIVE_BATCH else self.settings.batch
            sized = [_with_batch(request, batch) for request in built]
            requests = [_for_caller(request, caller, names, highest) for request in sized]
            assert len(requests) == count, "as many requests as were admitted"
            try:
                if detached_id is None:
                    submission = await self.submissions.submit(requests, owner, interface)
                else:
                    submission = await self.submissions.submit_detached(requests, owner, interface, detached_id)
            except OutputFailed as failed:  # of this server: no fault of the request, as interfaces name others
                raise not_stored(str(failed)) from failed
            submission.hold(caller.call.pixels)
            caller.call.pixels = None
            return submission

    @contextmanager
    def arriving(self, caller: Caller, count: int) -> Iterator[None]:
        """Count jobs of `caller` that are no submission, or not yet one. Raises HttpProblem (429) for too many."""
        owner = caller.owner
        arriving = self._arriving.get(owner, 0)
        self.access.admit_jobs(self.submissions.unfinished(owner) + arriving, count)
        self._arriving[owner] = arriving + count
        try:
            yield
        finally:
            self._arriving[owner] -= count
            if not self._arriving[owner]:
                del self._arriving[owner]

    async def wait(self, request: Request, submission: HttpSubmission) -> None:
        """Wait until a submission is over; cancel it if the client goes. Raises ClientGone, and HttpProblem (503)."""
        ended = asyncio.ensure_future(submission.ended())
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await submission.cancel()
                raise ClientGone
            ended.result()
        finally:
            for task in (ended, gone):
                task.cancel()
            await asyncio.gather(ended, gone, return_exceptions=True)

    async def listings(self) -> Listings:
        """Return the usable files. While callers ask, they are read again in the background; a caller waits
        for them only if they are older than LISTING_SECONDS. Raises PoolLost.
        """
        now, known = time.monotonic(), self._listings
        age_seconds = now - known.at if known is not None else LISTING_SECONDS
        if age_seconds >= LISTING_SECONDS / 2 and self._listing is None:
            self._listing = asyncio.create_task(self._read_listings(now))
            self._listing.add_done_callback(_note_seen)
        if known is not None and age_seconds < LISTING_SECONDS:
            return known
        assert self._listing is not None, "it was started"
        # a client that goes must not cancel what others wait for
        return await asyncio.shield(self._listing)

    async def _read_listings(self, now: float) -> Listings:
        try:
            models = await asyncio.to_thread(self.pool.models)
            loras = await asyncio.to_thread(self.pool.loras)
            usable = tuple(sorted((each for each in models if not each.problem), key=lambda each: each.name))
            files = await asyncio.to_thread(self.pool.file_names)
            self._listings = Listings(usable, tuple(each for each in loras if not each.problem), files, now)
            return self._listings
        finally:
            self._listing = None

    async def listed_names(self) -> frozenset[str]:
        """Return the names of the files that the pool lists. Raises PoolLost."""
        return (await self.listings()).names

    async def model_or_default(self, named: str | None) -> str:
        """Return the name of a model: `named`, else the only one of the pool. Raises HttpProblem (400)."""
        if named:
            return named
        names = [listing.name for listing in (await self.listings()).models]
        if len(names) != 1:
            raise HttpProblem(400, f"model: missing; models of this pool: {', '.join(names) or 'none'}")
        return names[0]

    async def keeps_jobs(self) -> bool:
        """Whether the pool has a journal, so that submissions outlive this server."""
        if self._keeps_jobs is None:
            try:
                await asyncio.to_thread(self.pool.detached)
                self._keeps_jobs = True
            except UserError:
                self._keeps_jobs = False
            except PoolLost:
                return False
        return self._keeps_jobs

    async def history(self, caller: Caller, job_id: str) -> JobHistory:
        """Return the history of a job: of a submission of `caller`, of the user of the caller's key in another program,
        or of any without keys. What the pool does not know of a job of the journal, or no longer, follows from its
        submission. Raises HttpProblem (404).
        """
        name, _, place = journaled_id(job_id).rpartition("-")
        try:
            submission = await self.submissions.find(name, caller.owner)
        except HttpProblem:
            submission = None
        try:
            found = await asyncio.to_thread(self.pool.history, job_id)
        except UnknownName as unknown:
            problem = str(unknown)
        else:
            is_visible = submission is not None or caller.user is None or found.user == caller.user
            if is_visible and job_id in (found.job_id, journaled_id(found.job_id)):
                return found
            problem = f"job {job_id!r} is unknown"  # the pool has returned one with an id that contains this one
        if submission is None and caller.user is not None:  # the pool's message names jobs of others
            raise HttpProblem(404, f"job {job_id!r} is unknown")
        if submission is None or not place.isdecimal() or int(place) >= submission.total:
            raise HttpProblem(404, problem)
        return _history_without_the_pool(submission, int(place), job_id)

    async def output_path(self, submission_id: str, index: int, owner: str, file: str = "") -> Path:
        """Return the output of a job. `file` is its name as another server has reported it, for a submission that only
        that one follows; it is in the folder of the owner, which all of them have. Raises HttpProblem and PoolLost.
        """
        try:
            submission = await self.submissions.find(submission_id, owner)
        except (HttpProblem, PoolLost):
            if not self.has_siblings or not file or Path(file).name != file:
                raise
            path = owner_folder(self.folder, owner) / file
            if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
                raise
            return path
        end = output_of(submission, index)
        assert end.path is not None, "a job with an output"
        return end.path

    def signed_path(self, end: JobEnd, file_format: str = "", quality: int = 0) -> str:
        """Return a path of an output in `folder` that needs no key, for an hour: of the file as it is, or of an image
        in another format. Servers with the same folder and secret serve each other's."""
        assert end.path is not None, "a job with an output"
        name = end.path.relative_to(self.folder).as_posix()
        until = int(time.time()) + SIGNED_SECONDS
        wanted = f"&file_format={file_format}&quality={quality}" if file_format else ""
        signature = self._signature(name, until, file_format, quality)
        return f"{SIGNED_PATH}{quote(name)}?until={until}&signature={signature}{wanted}"

    def signed_file(self, name: str, until: int, signature: str, file_format: str = "", quality: int = 0) -> Path:
        """Return the output of a signed path, as it is on the disk. Raises HttpProblem (403, 410)."""
        expected = self._signature(name, until, file_format, quality)
        # as bytes: texts with other characters than ASCII are not compared
        is_ours = hmac.compare_digest(expected.encode(), signature.encode(errors="replace"))
        if not is_ours or until < time.time():
            raise HttpProblem(403, "the address of this output is not valid, or no longer")
        path = self.folder / name
        if not path.is_file():
            raise HttpProblem(410, f"{name} was removed from the server")
        return path

    def _signature(self, name: str, until: int, file_format: str = "", quality: int = 0) -> str:
        wanted = f"\0{file_format}\0{quality}" if file_format else ""
        text = f"{name}\0{until}{wanted}".encode(errors="surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def output_of(submission: HttpSubmission, index: int) -> JobEnd:
    """Return a job that has an output. Raises HttpProblem (404, 409, 410)."""
    if not 0 <= index < submission.total:
        raise HttpProblem(404, f"index: found {index}, expected 0 to {submission.total - 1}")
    end = submission.end_of(index)
    if end is None:
        raise HttpProblem(409, f"job {index} has not ended")
    if end.address:
        raise HttpProblem(
            409, f"the output of job {index} is in a store, which this server does not read: {end.address}"
        )
    if end.path is None:
        raise HttpProblem(404, f"job {index} has no output: {end.kind} {end.message}")
    if not end.path.is_file():
        raise HttpProblem(410, f"the output of job {index} was removed from the server")
    return end


def _keep_private(folder: Path) -> None:
    """Close the folders of callers' files to other users of the machine, where an earlier version has made them."""
    for name in OWN_FOLDERS:
        with contextlib.suppress(OSError):  # there is none, or it is another user's
            (folder / name).chmod(0o700)


def _history_without_the_pool(submission: HttpSubmission, index: int, job_id: str) -> JobHistory:
    """Return the history of a job that the pool does not know: it has not got it yet, or has forgotten it."""
    from modelpool.scheduler.core.history import JobHistory

    end = submission.end_of(index)
    if end is not None:
        note = "The pool no longer knows its tasks; the manifest has what its output was made of."
        return JobHistory(JobId(job_id), end.state, 0.0, ended_at=0.0, note=note, complete=False)
    note = submission.lost or submission.held or "waits in the journal for its turn: jobs before it have not ended"
    return JobHistory(JobId(job_id), "active", 0.0, note=note, user=submission.owner)


def _with_batch(request: GenerateRequest, batch: int | str) -> GenerateRequest:
    """Return `request` with the batch size of the configuration, if it has none."""
    if batch == 1 or "batch" in request.model_fields_set:
        return request
    return request.model_copy(update={"batch": batch})


def _for_caller(
    request: GenerateRequest, caller: Caller, listed: Set[str], highest_priority: int | None
) -> GenerateRequest:
    """Return `request` with the caller's user and, if it is configured, the caller's priority. Raises HttpProblem (403)
    if it is for another user, has a higher priority, or a deadline at that priority; and UnusableField for names that
    may be paths and are not `listed`.

    Near its deadline a job goes before all others of its priority, whatever the shares. Below the highest priority of
    the caller that lifts it no further than a higher priority would.
    """
    check_names(request, listed)
    if caller.user is None:
        return request
    if request.user not in (None, caller.user):
        raise HttpProblem(403, f"user: found {request.user!r}, expected {caller.user!r}, the user of the API key")
    update: dict[str, Any] = {"user": caller.user}
    if highest_priority is not None:
        if "priority" not in request.model_fields_set:
            update["priority"] = highest_priority
        elif request.priority > highest_priority:
            raise HttpProblem(403, f"priority: found {request.priority}, expected up to {highest_priority}")
        priority = update.get("priority", request.priority)
        if request.deadline is not None and priority >= highest_priority:
            expected = f"a priority below {highest_priority} with a deadline, which goes before others of its priority"
            raise HttpProblem(
                403, f"deadline: found {request.deadline:g} s at priority {priority}, expected {expected}"
            )
    return request.model_copy(update=update)


def check_texts(request: GenerateRequest, most_characters: int) -> None:
    """Raise OverBound for texts of a request that are longer than callers of this server may send."""
    texts = tuple(request.texts())
    for name, text in texts:
        check_characters(name, text, most_characters)
    total = sum(len(text) for _, text in texts)
    if total > 2 * most_characters:
        raise over_bound(
            "prompt, negative, regions", counted(total, "character"), f"up to {2 * most_characters} in all together"
        )


def _note_seen(reading: asyncio.Task[Listings]) -> None:
    """Note that the error of a reading for which no caller waits was seen: the next caller gets its own."""
    if not reading.cancelled():
        reading.exception()


async def disconnected(request: Request) -> None:
    """Wait until the client of a call goes. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
