"""What users hold is what their live submissions hold, after any sequence of calls, ends, leaving callers and restarts;
and nothing that one of them does makes the server forget what another one has."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.service import services
from modelpool.actors.http.service.held_shares import HeldShares
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.service.test_submissions import OrderedJobs
from tests.actors.http.test_owner_shares import KEYS, PIXELS, png
from tests.tiers import examples

#: images that a user may hold, and ended submissions that are remembered
MOST_HELD, MOST_KEPT = 3, 4
REFUSED = "REFUSED"
OWNERS = st.sampled_from(sorted(KEYS))
WAIT_SECONDS = 30.0


class EndedJobs(OrderedJobs):
    """Jobs that end when a test says so, or are cancelled."""

    def __init__(self, number: int, total: int) -> None:
        super().__init__(number, total)
        self.left = set(range(total))

    def end(self, index: int) -> None:
        self.left.discard(index)
        super().end(index)

    def cancel(self) -> None:
        for index in tuple(self.left):
            self.end(index)


class MachinePool(RefusingPool):
    """Accepts requests that are not REFUSED."""

    def __init__(self) -> None:
        self.jobs: dict[str, EndedJobs] = {}

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> EndedJobs:
        requests = list(requests)
        if any(REFUSED in request.prompt for request in requests):
            raise UserError("prompt: refused")
        jobs = EndedJobs(len(self.jobs), len(requests))
        self.jobs[jobs.id] = jobs
        return jobs


@dataclass
class Live:
    """A submission that has not ended: its user, its images, and the call that waits for it."""

    owner: str
    images: int
    waiting: asyncio.Task[None] | None = None
    leave: asyncio.Event = field(default_factory=asyncio.Event)


class OwnerMachine(RuleBasedStateMachine):
    """The real application, in front of a pool with jobs that end when a rule says so."""

    @initialize()
    def open(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.pool = MachinePool()
        self.live: dict[str, Live] = {}
        self.start()

    def start(self) -> None:
        """Start a server, which knows nothing of an earlier one."""
        made: list[HeldShares] = []

        def noted(*terms: Any) -> HeldShares:
            made.append(HeldShares(*terms))
            return made[-1]

        section = ServeSection(keys=KEYS, held_pixels=MOST_HELD * PIXELS, kept_submissions=MOST_KEPT)
        with patch.object(services, "HeldShares", noted):
            self.app = application(self.pool, section, Path(self.folder.name))  # type: ignore[arg-type]
        (self.shares,) = made
        #: ended submissions that are remembered, oldest first
        self.kept: dict[str, list[str]] = {owner: [] for owner in KEYS}

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.stop()
            self.loop.close()
            self.folder.cleanup()

    def stop(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))

    def ask(self, owner: str, method: str, path: str, value: Any = None) -> Any:
        body = b"" if value is None else json.dumps(value).encode()
        headers = {"authorization": f"Bearer {KEYS[owner]}"}
        return self.loop.run_until_complete(call(self.app, method, path, body, headers))

    def until(self, is_true: Callable[[], object]) -> None:
        for _ in range(int(WAIT_SECONDS * 1000)):
            if is_true():
                return
            self.loop.run_until_complete(asyncio.sleep(0.001))
        raise AssertionError("it did not happen")

    def held(self, owner: str) -> int:
        return sum(each.images for each in self.live.values() if each.owner == owner)

    def note_ended(self, name: str) -> None:
        """Wait until the server has noted an end, and expect that it forgets the oldest of the user who has most."""
        owner = self.live.pop(name).owner
        self.until(lambda: self.ask(owner, "GET", f"/api/jobs/{name}").json.get("state") in (None, "ended"))
        self.kept[owner].append(name)
        while sum(map(len, self.kept.values())) > MOST_KEPT:
            most = max(self.kept, key=lambda each: (len(self.kept[each]), each))
            assert len(self.kept[most]) > MOST_KEPT // len(KEYS), "who has no more than a share loses nothing"
            self.kept[most].pop(0)

    @rule(
        owner=OWNERS, images=st.integers(0, 2), kind=st.sampled_from(("good", "good", "refused", "wrong", "no image"))
    )
    def submit(self, owner: str, images: int, kind: str) -> None:
        request = {"model": "shapes", "prompt": REFUSED if kind == "refused" else "a thing", "steps": 2}
        values = [{**request, "image": png(), "strength": 0.5} for _ in range(images)] or [request]
        if kind == "wrong":
            values[-1] = {**values[-1], "steps": -1}
        if kind == "no image":  # after others were decoded
            values.append({**request, "image": "AAAA"})
        before = set(self.pool.jobs)
        answer = self.ask(owner, "POST", "/api/jobs", {"requests": values})
        if self.held(owner) + images > MOST_HELD:
            assert answer.status == 429, answer.body
        elif kind != "good":
            assert answer.status == 400, answer.body
        else:
            assert answer.status == 201, answer.body
            self.live[answer.json["id"]] = Live(owner, images)
        assert len(set(self.pool.jobs) - before) == (answer.status == 201)

    @rule(owner=OWNERS)
    def wait_for_an_image(self, owner: str) -> None:
        """A call that is answered when its job has ended."""
        if self.held(owner) + 1 > MOST_HELD:
            return
        before = set(self.pool.jobs)
        new = Live(owner, 1)
        body = json.dumps({"init_images": [png()], "prompt": "a thing", "steps": 2}).encode()
        new.waiting = self.loop.create_task(self._called(owner, "/sdapi/v1/img2img", body, new.leave))
        self.until(lambda: set(self.pool.jobs) - before)
        (name,) = set(self.pool.jobs) - before
        self.live[name] = new
        self.until(lambda: self.ask(owner, "GET", f"/api/jobs/{name}").status == 200)

    async def _called(self, owner: str, path: str, body: bytes, leave: asyncio.Event) -> None:
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            """Nobody reads it."""

        names = {"host": "127.0.0.1", "content-type": "application/json", "authorization": f"Bearer {KEYS[owner]}"}
        headers = [(name.encode(), value.encode()) for name, value in names.items()]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}  # type: ignore[dict-item]
        await self.app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, receive, send)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), kind=st.sampled_from(("end", "end", "cancel", "leave")))
    def end(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[name]
        match kind:
            case "cancel":
                assert self.ask(live.owner, "DELETE", f"/api/jobs/{name}").status < 300
            case "leave" if live.waiting is not None:
                live.leave.set()
            case _:
                self.pool.jobs[name].cancel()
        self.note_ended(name)
        if live.waiting is not None:
            self.loop.run_until_complete(asyncio.wait_for(live.waiting, WAIT_SECONDS))

    @precondition(lambda self: self.live)
    @rule(owner=OWNERS, data=st.data())
    def cancel_of_another_user(self, owner: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if self.live[name].owner != owner:
            assert self.ask(owner, "DELETE", f"/api/jobs/{name}").status == 404

    @precondition(lambda self: len(self.live) + sum(map(len, self.kept.values())) > MOST_KEPT)
    @rule()
    def restart(self) -> None:
        self.stop()
        self.live.clear()
        self.start()

    @invariant()
    def holds_are_of_live_submissions(self) -> None:
        if not hasattr(self, "shares"):
            return
        expected = Counter({owner: self.held(owner) * PIXELS for owner in KEYS})
        self.until(lambda: all(self.shares.held(owner) <= expected[owner] for owner in KEYS))
        assert {owner: self.shares.held(owner) for owner in KEYS} == expected

    @invariant()
    def each_user_has_the_own_submissions(self) -> None:
        if not hasattr(self, "shares"):
            return
        for owner in KEYS:
            listed = {each["id"] for each in self.ask(owner, "GET", "/api/jobs").json["submissions"]}
            live = {name for name, each in self.live.items() if each.owner == owner}
            assert listed == live | set(self.kept[owner])


TestOwners = OwnerMachine.TestCase
TestOwners.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
