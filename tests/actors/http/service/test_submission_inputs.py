"""Images of detached submissions are on disk as long as a job may read them, and no longer."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.detached.records import SubmissionRecord, SubmissionState
from modelpool.actors.http.application import application
from modelpool.actors.http.service.submission_inputs import sweep, unneeded, with_own_inputs
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.control.detached.test_job_service import WAIT_SECONDS, Service, opened
from tests.actors.fakes import ENDLESS, FAIL
from tests.actors.http.asgi import RefusingPool, call


def png(colour: str = "blue") -> str:
    content = BytesIO()
    Image.new("RGB", (64, 64), colour).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


async def answered(service: Service, method: str, path: str, value: Any = None) -> Any:
    """The answer of a server that ends again: what it remembers is gone at the next call."""
    app = application(service.pool, ServeSection(), service.out)
    answer = await call(app, method, path, b"" if value is None else json.dumps(value).encode())
    assert answer.status < 300, answer.body
    return answer.json


def submitted(service: Service, *prompts: str) -> str:
    requests = [
        {"model": "shapes", "prompt": prompt, "steps": 2, "image": png(), "strength": 0.5, "seed": number}
        for number, prompt in enumerate(prompts)
    ]
    body = {"requests": requests, "detached": True}
    return str(asyncio.run(answered(service, "POST", "/api/jobs", body))["id"])


def made_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 7 * 86400,) * 2)


def test_a_server_removes_images_of_submissions_that_ended_without_it(tmp_path: Path) -> None:
    with opened(tmp_path) as service:
        inputs = service.out / "inputs"
        done, failed = submitted(service, "a thing"), submitted(service, f"{FAIL} a thing", "another thing")
        for each in (done, failed):
            service.pool.attach(each).wait(WAIT_SECONDS)
        running = submitted(service, ENDLESS)
        (inputs / "being-sent").mkdir()
        for folder in inputs.iterdir():
            made_old(folder)
        assert sweep(service.pool, service.out) == [done]
        assert {folder.name for folder in inputs.iterdir()} == {failed, running, "being-sent"}
        service.pool.attach(running).cancel()


def test_a_server_leaves_images_of_another_pool_in_the_same_folder(tmp_path: Path) -> None:
    """Their submissions are in its journal, and not in this one; after an hour they were removed."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    with opened(tmp_path / "one") as service, opened(tmp_path / "other") as other:
        other.out = service.out
        waiting = submitted(other, ENDLESS)
        made_old(service.out / "inputs" / waiting)
        assert sweep(service.pool, service.out) == []
        assert (service.out / "inputs" / waiting).is_dir()
        other.pool.attach(waiting).cancel()


def test_a_pool_without_a_journal_loses_no_images(tmp_path: Path) -> None:
    folder = tmp_path / "inputs" / "night"
    folder.mkdir(parents=True)
    made_old(folder)
    assert sweep(RefusingPool(), tmp_path) == []  # type: ignore[arg-type]
    assert folder.is_dir()


def test_a_retry_has_its_images_though_the_first_submission_is_forgotten(tmp_path: Path) -> None:
    """Its images were in the folder of the first one, which was removed with it. A retry of a retry likewise."""
    with opened(tmp_path) as service:
        inputs = service.out / "inputs"

        async def retried() -> None:
            app = application(service.pool, ServeSection(kept_submissions=1), service.out)

            async def answer(method: str, path: str, value: Any = None) -> Any:
                found = await call(app, method, path, b"" if value is None else json.dumps(value).encode())
                assert found.status < 300, found.body
                return found.json if found.body else None

            async def ended(each: str) -> None:
                while (await answer("GET", f"/api/jobs/{each}"))["state"] != "ended":
                    await asyncio.sleep(0.02)

            request = {"model": "shapes", "prompt": FAIL, "steps": 2, "image": png(), "strength": 0.5}
            made = [(await answer("POST", "/api/jobs", {"requests": [request], "detached": True}))["id"]]
            await ended(made[0])
            for _ in range(2):
                made.append((await answer("POST", f"/api/jobs/{made[-1]}/retry"))["id"])
                await ended(made[-1])
            while len(list(inputs.iterdir())) > 1:  # one submission is remembered, the others are removed
                await asyncio.sleep(0.02)
            assert [folder.name for folder in inputs.iterdir()] == [made[-1]]
            assert len(list((inputs / made[-1]).iterdir())) == 1

        asyncio.run(asyncio.wait_for(retried(), WAIT_SECONDS))


def test_images_of_every_field_move_with_a_request(tmp_path: Path) -> None:
    root, target = tmp_path / "inputs", tmp_path / "inputs" / "new"
    old = root / "old"
    old.mkdir(parents=True)
    for name in ("image", "mask", "control", "reference"):
        (old / f"{name}.png").write_bytes(base64.b64decode(png()))
    request = GenerateRequest(
        model="shapes",
        prompt=f"{old}/image.png",
        image=str(old / "image.png"),
        mask=str(old / "mask.png"),
        controls=[{"model": "canny", "image": str(old / "control.png")}],
        reference=[str(old / "reference.png")],
    )
    moved = with_own_inputs(request, root, target)
    for path in old.iterdir():
        path.unlink()
    assert {path.name for path in target.iterdir()} == {f"{n}.png" for n in ("image", "mask", "control", "reference")}
    text = repr(moved).replace(request.prompt, "")
    assert text.count(str(target)) == 4
    assert str(old) not in text
    assert moved.prompt == request.prompt, "a text is no path"
    with pytest.raises(UserError, match=r"image\.png: this image of the submission was removed"):
        with_own_inputs(request, root, tmp_path / "inputs" / "other")


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3))))
def test_only_what_no_job_reads_is_unneeded(kinds: list[tuple[bool, bool, int, int]]) -> None:
    folders, records, expected = set(), [], set()
    for number, (is_known, has_folder, succeeded, others) in enumerate(kinds):
        name = str(number)
        if has_folder:
            folders.add(name)
        if is_known:
            count = succeeded + others
            records.append(SubmissionRecord(name, SubmissionState.ACTIVE, "out", "", count, 0.0, succeeded=succeeded))
        if is_known and has_folder and succeeded and not others:
            expected.add(name)
    assert set(unneeded(folders, records)) == expected


class LosesAnswers:
    """A pool with a journal. Its answers about new submissions are lost: `fault` says where."""

    def __init__(self, pool: Any, fault: str) -> None:
        self._pool = pool
        self._fault = fault
        self.has_journaled = threading.Event()
        self.may_answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit_detached(self, *args: Any, **terms: Any) -> Any:
        jobs = self._pool.submit_detached(*args, **terms)
        self.has_journaled.set()
        match self._fault:
            case "the server ends":
                self.may_answer.wait(WAIT_SECONDS)
            case "no answer":
                raise PoolLost("the job service is gone")
        return LosesProgress(jobs) if self._fault == "no progress" else jobs


class LosesProgress:
    def __init__(self, jobs: Any) -> None:
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    def progress(self) -> Any:
        raise PoolLost("the job service is gone")


@pytest.mark.parametrize("fault", ["no answer", "no progress", "the server ends"])
def test_images_stay_when_the_journal_has_a_submission_for_which_there_is_no_answer(tmp_path: Path, fault: str) -> None:
    """They were removed with the failed call, and the jobs of the journal found none."""
    with opened(tmp_path) as service:
        pool = LosesAnswers(service.pool, fault)
        request = {"model": "shapes", "prompt": "a thing", "steps": 2, "image": png(), "strength": 0.5}
        body = json.dumps({"requests": [request], "detached": True}).encode()

        async def run() -> None:
            app = application(pool, ServeSection(), service.out)  # type: ignore[arg-type]
            calling = asyncio.create_task(call(app, "POST", "/api/jobs", body))
            assert await asyncio.to_thread(pool.has_journaled.wait, WAIT_SECONDS)
            if fault == "the server ends":
                calling.cancel()
            answer = await calling
            pool.may_answer.set()
            assert answer.status == 503, answer.body

        asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
        record = service.pool.detached()[0]
        # what a job that starts later will read
        assert [len(list(folder.iterdir())) for folder in (service.out / "inputs").iterdir()] == [1]
        assert service.pool.attach(record.submission_id).wait(WAIT_SECONDS).succeeded == 1


def test_a_refused_submission_and_a_refused_retry_leave_no_images(tmp_path: Path) -> None:
    with opened(tmp_path) as service:
        inputs = service.out / "inputs"

        async def run() -> None:
            app = application(service.pool, ServeSection(), service.out)

            async def ask(method: str, path: str, value: Any = None) -> Any:
                return await call(app, method, path, b"" if value is None else json.dumps(value).encode())

            request = {"model": "shapes", "prompt": FAIL, "steps": 2, "strength": 0.5}
            wrong = [{**request, "image": png()}, {**request, "image": png("red"), "steps": -1}]
            refused = await ask("POST", "/api/jobs", {"requests": wrong, "detached": True})
            assert refused.status == 400, refused.body
            assert not inputs.exists() or list(inputs.iterdir()) == []
            both = [{**request, "image": png()}, {**request, "image": png("red"), "seed": 2}]
            first = (await ask("POST", "/api/jobs", {"requests": both, "detached": True})).json["id"]
            while (await ask("GET", f"/api/jobs/{first}")).json["state"] != "ended":
                await asyncio.sleep(0.02)
            gone = min((inputs / first).iterdir(), key=lambda path: path.name)
            gone.unlink()
            refused = await ask("POST", f"/api/jobs/{first}/retry")
            assert refused.status == 400, refused.body
            assert f"{gone.name}: this image of the submission was removed" in refused.body.decode()
            assert [folder.name for folder in inputs.iterdir()] == [first], "the retry left a folder"

        asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))


def test_a_retry_has_its_images_after_a_restart_of_the_server(tmp_path: Path) -> None:
    """The first submission is removed, with its images, before the retry of its retry runs on another server. That
    server does not know the requests, and says so when it is asked for one more retry."""
    with opened(tmp_path) as service:
        inputs = service.out / "inputs"
        service.keep_jobs_waiting()

        async def cancelled_and_retried() -> list[str]:
            app = application(service.pool, ServeSection(), service.out)

            async def ask(method: str, path: str, value: Any = None) -> Any:
                return await call(app, method, path, b"" if value is None else json.dumps(value).encode())

            request = {"model": "shapes", "prompt": "a thing", "steps": 2, "image": png(), "strength": 0.5}
            made = [(await ask("POST", "/api/jobs", {"requests": [request], "detached": True})).json["id"]]
            for _ in range(2):
                assert (await ask("DELETE", f"/api/jobs/{made[-1]}")).status < 300
                while (await ask("GET", f"/api/jobs/{made[-1]}")).json["state"] != "ended":
                    await asyncio.sleep(0.02)
                made.append((await ask("POST", f"/api/jobs/{made[-1]}/retry")).json["id"])
            return made

        made = asyncio.run(asyncio.wait_for(cancelled_and_retried(), WAIT_SECONDS))
        assert {folder.name for folder in inputs.iterdir()} == set(made)
        for each in made[:-1]:
            shutil.rmtree(inputs / each)

        async def after_a_restart() -> None:
            app = application(service.pool, ServeSection(), service.out)
            refused = await call(app, "POST", f"/api/jobs/{made[0]}/retry")
            assert refused.status == 409
            assert f"submission {made[0]}: its requests are not known to this server" in refused.body.decode()
            assert {folder.name for folder in inputs.iterdir()} == {made[-1]}

        asyncio.run(asyncio.wait_for(after_a_restart(), WAIT_SECONDS))
        assert sweep(service.pool, service.out) == []
        service.new_controller()
        assert service.pool.attach(made[-1]).wait(WAIT_SECONDS).succeeded == 1
