"""Submissions over HTTP: readers, bounds, lost pools, and submissions that outlive the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.control.detached.job_service import JobsProgress
from modelpool.actors.control.detached.records import RequestOutcome, SubmissionRecord, SubmissionState
from modelpool.actors.http.native.native_api import end_json
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import output_of
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, Submissions
from modelpool.actors.outputs.results.outcomes import JobFailure, PoolLost
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.outputs.results.progress import Progress, RunningJob
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import NodesEnded, SubmissionId
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId, RunErrorKind, Stage, WorkerId
from modelpool.scheduler.model.messages import Outcome

REQUEST = GenerateRequest(model="shapes", prompt="a red circle", seed=1)


class OrderedJobs:
    """Jobs that end when a test says so, as failures. See `actors.http.service.ports.HttpJobs`."""

    def __init__(self, number: int, total: int) -> None:
        self.id = f"s{number}"
        self._total = total
        self._ready: list[JobFailure] = []
        self._ended = 0
        self._lost: Exception | None = None
        self._watchers: list[Callable[[], None]] = []
        #: each change of whether previews are wanted
        self.wanted: list[float | None] = []
        self._lock = threading.Lock()

    def end(self, index: int) -> None:
        """End one job, in a thread of its own, as the pool does."""
        failure = JobFailure(index, JobId(f"{self.id}-{index}"), REQUEST, RunErrorKind.INTERNAL, "planted")

        def work() -> None:
            with self._lock:
                self._ready.append(failure)
                self._ended += 1
            self._notify()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def lose(self) -> None:
        self._lost = RuntimeError("the pool is gone")
        self._notify()

    def _notify(self) -> None:
        for changed in self._watchers:
            changed()

    def ready_results(self) -> Iterator[JobFailure]:
        while self._ready:
            with self._lock:
                ready = self._ready.pop(0)
            yield ready

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def progress(self) -> Progress:
        return Progress(self._total, 0, self._ended, 0)

    def lost(self) -> Exception | None:
        return self._lost

    def take_nodes(self) -> tuple[()]:
        return ()

    def cancel(self) -> None:
        """Nothing runs."""

    def want_previews(self, interval_seconds: float | None = 0.5) -> None:
        self.wanted.append(interval_seconds)

    def preview(self, index: int) -> None:
        return None


class OrderedPool:
    """A pool of such jobs."""

    def __init__(self) -> None:
        self.jobs: list[OrderedJobs] = []

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> OrderedJobs:
        self.jobs.append(OrderedJobs(len(self.jobs), len(list(requests))))
        return self.jobs[-1]

    def attach(self, jobs_id: str) -> Any:
        raise UserError("no detached jobs")


def run(work: Callable[[Submissions, OrderedPool], Any], kept: int = 10) -> None:
    pool = OrderedPool()

    async def all_of_it() -> None:
        submissions = Submissions(pool, Path("out"), kept)  # type: ignore[arg-type]
        await work(submissions, pool)
        await submissions.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


async def read_all(submission: HttpSubmission, after: int = 0) -> list[int]:
    return [end.index async for change in submission.changes(after) for end in change.ends]


def test_every_reader_gets_every_end_in_the_order_of_the_ends() -> None:
    async def work(submissions: Submissions, pool: OrderedPool) -> None:
        submission = await submissions.submit([REQUEST] * 3, "ann", "native")
        readers = [asyncio.create_task(read_all(submission)) for _ in range(3)]
        for index in (2, 0, 1):
            pool.jobs[0].end(index)
            await asyncio.sleep(0)
        assert await asyncio.gather(*readers) == [[2, 0, 1]] * 3
        assert await read_all(submission, after=1) == [0, 1]
        assert submission.counts == {"failed": 3}

    run(work)


class NodesOfJobs(OrderedJobs):
    """Two jobs that are workflows. While the end of the first is read, a node of the second ends, and the reader of a
    client looks."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        task = RunningJob(JobId("s0-1"), 1, REQUEST.prompt, WorkerId("gpu-0"), Stage.SAMPLE, 1, 4, ("node",))
        self.running: tuple[RunningJob, ...] = (task,)
        self.nodes: list[NodesEnded] = []

    def end_node(self) -> None:
        self.running = ()
        self.nodes.append(NodesEnded(SubmissionId("s0"), 1, JobId("s0-1"), ("node",), Stage.SAMPLE, "gpu-0", 1.0))
        self._notify()

    def begin(self) -> None:
        self._notify()

    def ready_results(self) -> Iterator[JobFailure]:
        time.sleep(0.2)  # a file is written; the loop goes on
        yield from super().ready_results()

    def take_nodes(self) -> Any:
        taken, self.nodes = tuple(self.nodes), []
        return taken

    def progress(self) -> Progress:
        return Progress(2, 0, self._ended, 0, running=self.running)


def test_a_node_that_has_ended_never_runs_in_the_same_change() -> None:
    """Before: ends of nodes were noted, a result was read, and what ran before them was told meanwhile."""
    jobs = NodesOfJobs()

    class Pool(OrderedPool):
        def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> OrderedJobs:
            self.jobs.append(jobs)
            return jobs

    async def work(submissions: Submissions) -> None:
        submission = await submissions.submit([REQUEST] * 2, "ann", "native")
        found: list[tuple[bool, bool]] = []

        async def follow() -> None:
            found.extend([(bool(each.nodes), bool(each.running)) async for each in submission.changes()])

        follower = asyncio.create_task(follow())
        jobs.begin()
        while not submission.running:
            await asyncio.sleep(0.01)
        jobs.end_node()
        jobs.end(0)
        await asyncio.sleep(0.05)
        late = asyncio.create_task(follow())  # a client that connects while the result is read
        await asyncio.sleep(0.3)
        jobs.end(1)
        await asyncio.gather(follower, late)
        assert (True, True) not in found, found
        assert (True, False) in found, found

    async def all_of_it() -> None:
        submissions = Submissions(Pool(), Path("out"), 10)  # type: ignore[arg-type]
        await work(submissions)
        await submissions.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    """It keeps no queue: it continues from its position when it reads again."""

    async def work(submissions: Submissions, pool: OrderedPool) -> None:
        submission = await submissions.submit([REQUEST] * 50, "ann", "native")
        slow = submission.changes()
        await anext(slow)
        fast = asyncio.create_task(read_all(submission))
        for index in range(50):
            pool.jobs[0].end(index)
        assert await fast == list(range(50))
        assert len((await anext(slow)).ends) == 50
        with pytest.raises(StopAsyncIteration):
            await anext(slow)

    run(work)


def test_ended_submissions_are_forgotten_and_active_ones_kept() -> None:
    async def work(submissions: Submissions, pool: OrderedPool) -> None:
        active = await submissions.submit([REQUEST], "ann", "native")
        for number in range(1, 6):
            ended = await submissions.submit([REQUEST], "ann", "native")
            pool.jobs[number].end(0)
            await ended.ended()
        last = await submissions.submit([REQUEST], "bob", "native")
        assert [each.id for each in submissions.of("ann")] == ["s0", "s4", "s5"]
        assert submissions.unfinished("ann") == 1
        assert await submissions.find(active.id, "ann") is active
        for owner, known in (("bob", active), ("ann", last)):
            with pytest.raises(UserError, match="unknown"):
                await submissions.find(known.id, owner)

    run(work, kept=2)


def test_a_lost_pool_ends_the_wait() -> None:
    async def work(submissions: Submissions, pool: OrderedPool) -> None:
        submission = await submissions.submit([REQUEST], "ann", "native")
        waiting = asyncio.create_task(submission.ended())
        pool.jobs[0].lose()
        with pytest.raises(UserError, match="the pool is gone"):
            await waiting
        assert submission.over
        assert submissions.unfinished("ann") == 0

    run(work)


def test_a_submission_that_only_a_lost_pool_knows_is_not_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads 404 gives up; one that reads 503 asks again."""

    async def work(submissions: Submissions, pool: OrderedPool) -> None:
        def attach(submission_id: str) -> OrderedJobs:
            raise PoolLost("the pool is gone")

        monkeypatch.setattr(pool, "attach", attach, raising=False)
        with pytest.raises(PoolLost):
            await submissions.find("s77", "")

    run(work)


def test_outputs_of_a_detached_submission_are_where_it_has_them(tmp_path: Path) -> None:
    """It may be of a driver, or of a server with another folder; the refusal of an input in a store has its address."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.png").write_bytes(b"content")

    class DetachedJobs:
        def __init__(self, jobs_id: str) -> None:
            self.id = jobs_id
            self._output = {"local": str(elsewhere), "stored": "s3://bucket/folder"}[jobs_id]

        def progress(self) -> JobsProgress:
            record = SubmissionRecord(self.id, SubmissionState.ENDED, self._output, "", 1, 0.0, 1)
            return JobsProgress(record, (), 0, "")

        def outcomes(self) -> Iterator[RequestOutcome]:
            yield RequestOutcome(self.id, 0, Outcome.SUCCEEDED, "a.png")

        def cancel(self) -> None:
            """Nothing runs."""

    class DetachedPool(OrderedPool):
        def attach(self, jobs_id: str) -> Any:
            return DetachedJobs(jobs_id)

    async def work() -> None:
        submissions = Submissions(DetachedPool(), tmp_path / "server", 10)  # type: ignore[arg-type]
        local, stored = [await submissions.find(name, "") for name in ("local", "stored")]
        await asyncio.gather(local.ended(), stored.ended())
        assert output_of(local, 0).path == elsewhere / "a.png"
        with pytest.raises(HttpProblem, match=r"s3://bucket/folder/a\.png") as refused:
            output_of(stored, 0)
        assert refused.value.status == 409
        assert end_json(stored, stored.ends[0])["address"] == "s3://bucket/folder/a.png"
        await submissions.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_equal_preview_of_a_job_is_no_new_one() -> None:
    """Previews of detached jobs come from another process: readers got the same one again and again."""
    submission = HttpSubmission("s1", "ann", "native", 1, lambda: None, detached=True)
    submission.note_previews({0: ImagePreview(1, 4, b"first", index=0, job_id=JobId("a"))})
    first = submission.previews[0]
    submission.note_previews({0: ImagePreview(1, 4, b"first", index=0, job_id=JobId("a"))})
    assert submission.previews[0] is first
    submission.note_previews({0: ImagePreview(2, 4, b"second", index=0, job_id=JobId("a"))})
    assert submission.previews[0].content == b"second"


def test_images_of_ended_submissions_are_released_whichever_field_has_them(tmp_path: Path) -> None:
    """Up to 1,000 submissions are remembered; image prompts, masks and videos kept their pixels."""
    image, mask = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)
    frames, file = np.zeros((5, 64, 64, 3), np.uint8), str(tmp_path / "a.png")
    Image.fromarray(image).save(file)
    prompted = {"model": "ip", "image": image}
    for fields in (
        {"image": image, "strength": 0.5}, {"reference": [image]}, {"last_image": image, "image": file},
        {"controls": [{"model": "canny", "image": image}]},
        {"controls": [{"model": "inpaint", "image": file, "mask": mask}]},
        {"image_prompts": [prompted]}, {"image_prompts": [{**prompted, "image": file, "mask": mask}]},
        {"regions": [{"prompt": "a", "mask": mask}]}, {"video": frames}, {"video": file, "video_mask": frames[..., 0]},
        {"video": file, "face_video": frames},
    ):  # fmt: skip
        request = GenerateRequest(model="shapes", prompt="a", **fields)
        known = HttpSubmission("s", "", "native", 1, lambda: None, False, requests=[request])
        assert known.requests, "while it runs"
        known.note([JobEnd(0, "s-0", "failed")], ())
        assert known.requests == (), fields.keys()
    plain = HttpSubmission("s", "", "native", 1, lambda: None, False, requests=[REQUEST])
    plain.note([JobEnd(0, "s-0", "failed")], ())
    assert plain.requests, "they may be submitted again"
