"""The files of the page and the calls that it needs: headers, live events for many viewers, search, thumbnails, retry,
history, and what callers with keys see.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from modelpool import ModelPool
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.detached.records import SubmissionRecord, SubmissionState
from modelpool.actors.control.status import PoolStatus
from modelpool.actors.http.application import application
from modelpool.actors.http.page import live_view
from modelpool.actors.http.page.live_view import LiveView
from modelpool.actors.http.page.page_api import EndFilter, found_ends
from modelpool.actors.http.page.thumbnails import SIDE, Thumbnails
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import Services
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, owner_folder
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.conftest import served
from tests.actors.http.fake_page_pool import SLOW, open_page_pool

KEYS = {"ann": "a" * 20, "bob": "b" * 20}
WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def page_pool() -> Iterator[ModelPool]:
    with open_page_pool() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_server(page_pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(page_pool, tmp_path_factory.mktemp("outputs"), keys=KEYS) as address:
        yield address


def auth(user: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[user]}"}


def submit(server: str, user: str, *prompts: str) -> str:
    body = [{"model": "shapes", "prompt": prompt, "seed": 5} for prompt in prompts]
    answer = requests.post(f"{server}/api/jobs", json=body, headers=auth(user), timeout=WAIT_SECONDS)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def get(server: str, user: str, path: str) -> requests.Response:
    return requests.get(server + path, headers=auth(user), timeout=WAIT_SECONDS)


def wait_for_end(server: str, user: str, submission: str) -> dict[str, Any]:
    get(server, user, f"/api/jobs/{submission}/events")  # returns at the end
    found: dict[str, Any] = get(server, user, f"/api/jobs/{submission}").json()
    return found


def answers(*paths: str, settings: ServeSection, folder: Path, **named: Any) -> list[Answer]:
    async def all_calls() -> list[Answer]:
        app = application(RefusingPool(), settings, folder)
        return [await call(app, "GET", path, **named) for path in paths]

    return asyncio.run(all_calls())


def test_the_files_need_no_key_and_permit_nothing_from_elsewhere(tmp_path: Path) -> None:
    paths = ("/", "/page/main.js", "/page/page.css", "/page/icon.svg")
    found = answers(*paths, settings=ServeSection(keys=KEYS), folder=tmp_path)
    assert [answer.status for answer in found] == [200] * len(paths)
    for answer in found:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = re.sub('xmlns="[^"]*"', "", answer.body.decode())
        assert "http://" not in text
        assert "https://" not in text
    assert found[0].headers["content-type"].startswith("text/html")
    assert "<style" not in found[0].body.decode()
    assert " style=" not in found[0].body.decode()
    assert " onclick=" not in found[0].body.decode()


def test_unchanged_files_are_not_sent_again_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    (first,) = answers("/page/main.js", settings=ServeSection(), folder=tmp_path)
    headers = {"if-none-match": first.headers["etag"]}
    (again,) = answers("/page/main.js", settings=ServeSection(), folder=tmp_path, headers=headers)
    assert (again.status, again.body) == (304, b"")
    others = answers("/page/none.js", "/page/../page_api.py", settings=ServeSection(), folder=tmp_path)
    assert {each.status for each in others} == {404}


def test_calls_of_the_page_need_a_key(tmp_path: Path) -> None:
    paths = ("/api/live", "/api/choices", "/api/ends", "/api/job-history/x-0", "/api/jobs/x/outputs/0/thumbnail")
    found = answers(*paths, settings=ServeSection(keys=KEYS), folder=tmp_path)
    assert [answer.status for answer in found] == [401] * len(paths)


class CountedPool(RefusingPool):
    """Counts how often its state is read; its uptime differs each time."""

    def __init__(self, lost: bool = False) -> None:
        self.asked = 0
        self.lost = lost

    def status(self) -> PoolStatus:
        self.asked += 1
        if self.lost:
            raise PoolLost("the controller of the pool is gone")
        return PoolStatus((), {"sample": self.asked}, {"live": 0}, 0, 0, 0, 0, 0, 0)


def live_of(pool: RefusingPool, folder: Path, interval_seconds: float = 0.01) -> LiveView:
    return LiveView(Services(pool, ServeSection(), folder, b"s" * 32), interval_seconds)


def test_viewers_share_one_question_for_each_interval(tmp_path: Path) -> None:
    """50 viewers that receive five versions each; the pool stops being asked when they have gone."""
    pool = CountedPool()

    async def view(live: LiveView) -> int:
        versions = []
        async with aclosing(live.changes("")) as texts:
            async for text in texts:
                versions.append(json.loads(text)["version"])
                if len(versions) == 5:
                    break
        return versions[-1]

    async def scenario() -> tuple[int, int]:
        live = live_of(pool, tmp_path)
        last = max(await asyncio.gather(*(view(live) for _ in range(50))))
        before = pool.asked
        await asyncio.sleep(0.1)
        return last, before

    last, before = asyncio.run(scenario())
    assert last <= before <= last + 2
    assert pool.asked == before


def test_a_viewer_that_does_not_read_delays_nobody_and_continues_with_the_latest(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, dict[str, Any]]:
        live = live_of(CountedPool(), tmp_path)
        async with aclosing(live.changes("")) as slow, aclosing(live.changes("")) as fast:
            await anext(slow)
            for _ in range(10):
                version = json.loads(await anext(fast))["version"]
            return version, json.loads(await anext(slow))

    version, caught_up = asyncio.run(scenario())
    assert caught_up["version"] >= version
    assert caught_up["all"] is False


def test_a_pool_that_does_not_answer_is_reported_and_asked_again(tmp_path: Path) -> None:
    async def scenario() -> tuple[str, str]:
        pool = CountedPool(lost=True)
        live = live_of(pool, tmp_path)
        async with aclosing(live.changes("")) as texts:
            first = json.loads(await anext(texts))
            pool.lost = False
            second = json.loads(await anext(texts))
        return first["set"]["pool"]["pool"]["trouble"], second["set"]["pool"]["pool"]["trouble"]

    assert asyncio.run(scenario()) == ("the controller of the pool is gone", "")


def test_submissions_in_the_journal_from_elsewhere_are_among_the_batches(tmp_path: Path) -> None:
    """As `modelpool submit` leaves them: of every user without keys, else of the user of the key."""

    class JournalPool(CountedPool):
        def detached(self) -> tuple[SubmissionRecord, ...]:
            return tuple(
                SubmissionRecord(f"by-{user}", SubmissionState.ACTIVE, "out", user, 10, 5.0, succeeded=4, failed=1)
                for user in ("ann", "bob")
            )

    async def first(owner: str) -> dict[str, Any]:
        async with aclosing(live_of(JournalPool(), tmp_path).changes(owner)) as texts:
            found: dict[str, Any] = json.loads(await anext(texts))["set"]["submissions"]
            return found

    everybody = asyncio.run(first(""))
    assert set(everybody) == {"by-ann", "by-bob"}
    assert {everybody["by-ann"][name] for name in ("jobs", "succeeded", "failed", "state")} == {10, 4, 1, "active"}
    assert set(asyncio.run(first("ann"))) == {"by-ann"}


def test_submissions_of_other_programs_are_seen_by_their_user_and_without_keys(
    page_pool: ModelPool, page_server: str, tmp_path: Path
) -> None:
    """A Python script of ann on the same pool: with its tasks and counts, and nothing of it for bob."""
    own = submit(page_server, "ann", "by the server")
    wait_for_end(page_server, "ann", own)
    script = page_pool.submit(
        [GenerateRequest(model="forms", prompt=f"by a script {SLOW} {place}", seed=place) for place in range(3)],
        output=tmp_path,
        user="ann",
    )

    def seen(user: str) -> dict[str, Any]:
        with requests.get(f"{page_server}/api/live", headers=auth(user), stream=True, timeout=WAIT_SECONDS) as stream:
            for line in stream.iter_lines():
                if line.startswith(b"data: "):
                    found: dict[str, Any] = json.loads(line[6:])["set"]
                    return found
        raise AssertionError("no event")

    try:
        while not any(run.state == "busy" for run in page_pool.status().workers):
            time.sleep(0.01)
        of_ann, of_bob = seen("ann"), seen("bob")
        entry = of_ann["submissions"][script.id]
        assert (entry["source"], entry["jobs"], entry["state"], entry["model"]) == ("elsewhere", 3, "active", "forms")
        assert (entry["can_retry"], entry["user"]) == (False, "ann")
        assert of_ann["submissions"][own]["source"] == "here"
        tasks = [task for task in of_ann["tasks"].values() if task["submission"] == script.id]
        assert {task["source"] for task in tasks} == {"elsewhere"}
        assert all(task["prompt"].startswith("by a script") for task in tasks)
        assert script.id not in json.dumps(of_bob)
        assert "by a script" not in json.dumps(of_bob)
        job = tasks[0]["job"]
        assert get(page_server, "ann", f"/api/job-history/{job}").json()["job_id"] == job
        assert get(page_server, "bob", f"/api/job-history/{job}").status_code == 404
        assert "by a script" not in get(page_server, "bob", "/api/status").text
        assert get(page_server, "ann", f"/api/jobs/{script.id}").status_code == 404, "its results are the script's"
    finally:
        script.cancel()


def test_a_job_has_its_parameters_and_its_recipe(page_server: str) -> None:
    body = {"model": "shapes", "prompt": "all of them", "seed": 9, "loras": ["light:0.7"], "steps": 3, "size": "64x128"}
    answer = requests.post(f"{page_server}/api/jobs", json=body, headers=auth("ann"), timeout=WAIT_SECONDS)
    submission = answer.json()["id"]
    wait_for_end(page_server, "ann", submission)
    path = f"/api/jobs/{submission}/requests/0"
    found = get(page_server, "ann", path).json()
    assert get(page_server, "bob", path).status_code == 404
    parameters = found["parameters"]
    assert parameters["loras"] == [{"name": "light", "strength": 0.7}]
    assert [parameters[name] for name in ("model", "seed", "steps", "width", "height")] == ["shapes", 9, 3, 64, 128]
    assert {"cfg", "sampler", "schedule"} <= set(parameters), "also those that the request left to the model"
    assert found["recipe"]["loras"][0]["name"] == "light"
    assert (found["width"], found["height"], found["others"]) == (64, 128, [])


def test_the_form_can_choose_options_and_controlnets(page_server: str) -> None:
    choices = get(page_server, "ann", "/api/choices").json()
    assert choices["controlnets"] == ["edges"]
    pag = next(each for each in choices["options"] if each["name"] == "pag")
    assert (pag["main"], pag["settings"][0]["name"], pag["settings"][0]["default"]) == ("scale", "scale", 3.0)
    assert "Perturbed attention" in pag["meaning"]


def test_more_viewers_than_the_bound_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MOST_VIEWERS", 1)

    async def scenario() -> None:
        live = live_of(CountedPool(), tmp_path)
        live.check_capacity("")
        async with aclosing(live.changes("")) as texts:
            await anext(texts)
            with pytest.raises(HttpProblem, match="follow this server"):
                live.check_capacity("")
        live.check_capacity("")

    asyncio.run(scenario())


def test_one_user_cannot_hold_the_viewers_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MOST_OF_USER", 1)

    async def scenario() -> None:
        live = live_of(CountedPool(), tmp_path)
        async with aclosing(live.changes("ann")) as of_ann, aclosing(live.changes("")) as of_all:
            await anext(of_ann)
            await anext(of_all)
            with pytest.raises(HttpProblem, match="pages of ann") as refused:
                live.check_capacity("ann")
            assert refused.value.status == 429
            # as of calls that were checked at the same moment as the first one
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(live.changes("ann")), 5)
            live.check_capacity("bob")
            live.check_capacity("")

    asyncio.run(scenario())


def test_ends_are_found_newest_first_by_text_state_and_submission_in_pages() -> None:
    numbers = iter(range(1000))
    first, second = (
        HttpSubmission(
            name, "", "native", 10, lambda: None, False,
            requests=[GenerateRequest(model="shapes", prompt=f"{name} {n}") for n in range(10)], numbers=numbers,
        )
        for name in ("apple", "pear")
    )  # fmt: skip
    for index in range(10):
        state = "failed" if index == 3 else "succeeded"
        first.note([JobEnd(index, f"a-{index}", state, message="Too Large" if index == 3 else "")], ())
        second.note([JobEnd(index, f"p-{index}", "succeeded")], ())

    def search(text: str = "", state: str = "", submission: str = "", limit: int = 99, before: Any = None) -> Any:
        found = asyncio.run(found_ends([first, second], EndFilter(text, state, submission), before, limit))
        return [each["job"] for each in found["ends"]], found["next"]

    page, after = search(limit=3)
    assert page == ["p-9", "a-9", "p-8"]
    page, after = search(limit=3, before=after)
    assert page == ["a-8", "p-7", "a-7"]
    assert search(text="pear 4") == (["p-4"], None)
    assert search(text="too large") == (["a-3"], None)
    assert search(state="failed") == (["a-3"], None)
    assert search(submission="apple", limit=2)[0] == ["a-9", "a-8"]
    assert search(text="nothing") == ([], None)


def test_an_output_that_only_another_replica_follows_is_found_by_its_file_in_the_folder_of_its_owner(
    tmp_path: Path,
) -> None:
    """The page of one replica showed no image of a job over OpenAI's interface if another replica was asked for it."""
    settings = ServeSection(keys=KEYS)
    folder = owner_folder(tmp_path, "ann")
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "one.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "other.png")

    async def statuses(has_siblings: bool) -> list[int]:
        app = application(RefusingPool(), settings, tmp_path, has_siblings=has_siblings)
        paths = ("/api/jobs/unknown/outputs/0/thumbnail", "/api/jobs/unknown/outputs/0")
        named = (("ann", "one.png"), ("bob", "one.png"), ("ann", ""), ("ann", "../../other.png"), ("ann", "a" * 300))
        return [
            (await call(app, "GET", path, headers=auth(user), query=f"file={file}")).status
            for user, file in named
            for path in paths
        ]

    assert asyncio.run(statuses(has_siblings=True)) == [200, 200, *[404] * 8]
    assert asyncio.run(statuses(has_siblings=False)) == [404] * 10


def test_thumbnails_are_small_and_their_cache_is_bounded(tmp_path: Path) -> None:
    paths = []
    for place in range(4):
        paths.append(tmp_path / f"{place}.png")
        Image.linear_gradient("L").resize((900, 600)).save(paths[-1])
    (tmp_path / "clip.mp4").write_bytes(b"no image")

    async def scenario() -> Thumbnails:
        one = await Thumbnails().of(paths[0])
        assert Image.open(BytesIO(one)).size == (SIDE, SIDE * 600 // 900)
        thumbnails = Thumbnails(most_bytes=len(one) * 5 // 2)
        for path in (*paths, paths[-1]):
            await thumbnails.of(path)
        with pytest.raises(HttpProblem, match=r"clip\.mp4"):
            await thumbnails.of(tmp_path / "clip.mp4")
        return thumbnails

    thumbnails = asyncio.run(scenario())
    assert 0 < thumbnails._bytes <= thumbnails._most_bytes
    assert sum(map(len, thumbnails._known.values())) == thumbnails._bytes


def test_a_thumbnail_and_the_fields_of_a_job_are_served_to_their_owner(page_server: str) -> None:
    submission = submit(page_server, "ann", "a red circle")
    assert wait_for_end(page_server, "ann", submission)["succeeded"] == 1
    path = f"/api/jobs/{submission}/outputs/0/thumbnail"
    thumbnail = get(page_server, "ann", path)
    assert Image.open(BytesIO(thumbnail.content)).format == "WEBP"
    assert get(page_server, "bob", path).status_code == 404
    fields = get(page_server, "ann", f"/api/jobs/{submission}/requests/0").json()
    assert (fields["prompt"], fields["seed"], fields["others"]) == ("a red circle", 5, [])


def test_jobs_without_an_output_are_submitted_again(page_server: str) -> None:
    submission = submit(page_server, "ann", "it must FAIL", "a blue circle")
    assert wait_for_end(page_server, "ann", submission)["failed"] == 1
    again = requests.post(
        f"{page_server}/api/jobs/{submission}/retry", headers=auth("ann"), timeout=WAIT_SECONDS
    ).json()
    assert again["jobs"] == 1
    fields = get(page_server, "ann", f"/api/jobs/{again['id']}/requests/0").json()
    assert (fields["prompt"], fields["seed"]) == ("it must FAIL", 5)
    whole = submit(page_server, "ann", "a green circle")
    wait_for_end(page_server, "ann", whole)
    refused = requests.post(f"{page_server}/api/jobs/{whole}/retry", headers=auth("ann"), timeout=WAIT_SECONDS)
    assert (refused.status_code, "no job that failed" in refused.text) == (409, True)


def test_the_history_of_a_job_is_for_its_owner(page_server: str) -> None:
    submission = submit(page_server, "ann", "a yellow circle")
    wait_for_end(page_server, "ann", submission)
    history = get(page_server, "ann", f"/api/job-history/{submission}-0").json()
    assert (history["status"], bool(history["lines"]), bool(history["tasks"])) == ("succeeded", True, True)
    assert get(page_server, "bob", f"/api/job-history/{submission}-0").status_code == 404


def test_a_viewer_sees_its_own_jobs_and_prompts_only(page_server: str) -> None:
    """While a job of ann runs: bob sees a busy GPU, without its prompt, job and user."""
    submission = submit(page_server, "ann", f"a secret {SLOW}")
    try:
        seen: dict[str, str] = {}

        def view(user: str) -> None:
            url = f"{page_server}/api/live"
            with requests.get(url, headers=auth(user), stream=True, timeout=WAIT_SECONDS) as answer:
                texts = []
                for line in answer.iter_lines(decode_unicode=True):
                    texts.append(line)
                    if '"stage":"sample"' in line:
                        break
            seen[user] = "\n".join(texts)

        viewers = [threading.Thread(target=view, args=(user,)) for user in KEYS]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join(WAIT_SECONDS)
    finally:
        requests.delete(f"{page_server}/api/jobs/{submission}", headers=auth("ann"), timeout=WAIT_SECONDS)
    assert "a secret" in seen["ann"]
    assert submission in seen["ann"]
    assert '"stage":"sample"' in seen["bob"]
    assert "a secret" not in seen["bob"]
    assert submission not in seen["bob"]
    assert '"user":"ann"' not in seen["bob"]


def test_waiting_tasks_are_counted_by_model(page_pool: ModelPool, tmp_path: Path) -> None:
    jobs = page_pool.submit(
        [GenerateRequest(model="forms", prompt=f"{SLOW} {place}") for place in range(4)], output=tmp_path
    )
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while page_pool.status().waiting_by_model.get("forms", {}).get("sample") != 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert page_pool.status().waiting_by_model["forms"]["decode"] == 4
    finally:
        jobs.cancel()
        jobs.wait(WAIT_SECONDS)
