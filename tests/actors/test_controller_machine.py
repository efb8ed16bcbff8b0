"""The controller under any order of events: every job ends once, with the image that it must have or a reason."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelpool.actors.control.parked_jobs import WINDOW, ParkedJobs
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import SubmissionId
from modelpool.pool.values.specs.spec import JobId, RunErrorKind
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fake_fleet import ME, Desk, Sent, settle
from tests.actors.fakes import FAIL, FakeCatalog, image_of
from tests.tiers import examples

PROMPTS = st.sampled_from(["a red circle", "a blue square", FAIL])
LORAS = st.sampled_from([(), ("light",), ("thick", "words")])
ENDS = st.sampled_from([kind for kind in RunErrorKind if kind is not RunErrorKind.CANCELLED])
WORKERS = 3


class ControllerMachine(RuleBasedStateMachine):
    """Three workers, one driver, and everything that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        config = SchedulerConfig(kept_results=3, start_retry_limit=1000)
        self.desk = Desk(WORKERS, config)
        self.do(self.desk.open())
        self.wanted: dict[JobId, GenerateRequest] = {}
        self.cancelled: set[SubmissionId] = set()
        self.submissions = 0

    def do(self, what):
        return self.loop.run_until_complete(what)

    def pick(self, number: int) -> Sent:
        running = self.desk.fleet.running
        return running[number % len(running)]

    @initialize(window=st.sampled_from([3, WINDOW]))
    def choose_window(self, window) -> None:
        """Most jobs are parked with a small one."""
        self.desk.controller._queue.parked = ParkedJobs(window)

    @rule(prompt=PROMPTS, loras=LORAS, count=st.integers(1, 3), cfg=st.sampled_from([1.0, 5.0]))
    def submit(self, prompt, loras, count, cfg) -> None:
        name = f"s{self.submissions}"
        self.submissions += 1
        requests = [
            GenerateRequest(model="shapes", prompt=prompt, loras=loras, seed=seed, cfg=cfg, steps=2)
            for seed in range(count)
        ]
        self.wanted |= {JobId(f"{name}-{i}"): request for i, request in enumerate(requests)}
        self.do(self.desk.submit(*requests, submission=name))

    @precondition(lambda self: self.submissions)
    @rule(number=st.integers(0, 99))
    def cancel(self, number) -> None:
        submission = SubmissionId(f"s{number % self.submissions}")
        self.cancelled.add(submission)
        self.do(self.desk.controller.cancel(ME, submission))

    @precondition(lambda self: self.desk.fleet.running)
    @rule(number=st.integers(0, 99))
    def finish(self, number) -> None:
        self.do(self.desk.finish(self.pick(number)))

    @precondition(lambda self: self.desk.fleet.running)
    @rule(number=st.integers(0, 99), kind=ENDS)
    def fail(self, number, kind) -> None:
        self.desk.fleet.fail(self.pick(number), kind)
        self.do(settle())

    @precondition(lambda self: self.desk.fleet.running)
    @rule(number=st.integers(0, 99))
    def lose_an_input(self, number) -> None:
        for ref in self.pick(number).inputs:
            ref.lost = True

    @precondition(lambda self: self.desk.fleet.workers)
    @rule(number=st.integers(0, 99), watch_first=st.booleans())
    def kill(self, number, watch_first) -> None:
        names = sorted(self.desk.fleet.workers)
        self.desk.fleet.kill(names[number % len(names)][0], watch_first)
        self.do(settle())

    @precondition(lambda self: self.desk.fleet.running)
    @rule(number=st.integers(0, 99))
    def finish_and_die(self, number) -> None:
        self.desk.fleet.finish_and_die(self.pick(number))
        self.do(settle())

    @rule(by_itself=st.booleans())
    def change_starting(self, by_itself) -> None:
        self.desk.fleet.starts_by_itself = by_itself

    @precondition(lambda self: self.desk.fleet.starting)
    @rule(number=st.integers(0, 99), works=st.booleans())
    def end_a_start(self, number, works) -> None:
        starting = list(self.desk.fleet.starting.values())
        start = starting[number % len(starting)]
        start.set_result(None) if works else start.set_exception(RuntimeError("it does not start"))
        self.do(settle())

    @precondition(lambda self: self.desk.fleet.running)
    @rule(number=st.integers(0, 99), step=st.integers(1, 2))
    def tell_step(self, number, step) -> None:
        self.do(self.desk.tell_step(self.pick(number), step, 2))

    @rule(seconds=st.sampled_from([0.5, 8.0]))
    def advance(self, seconds) -> None:
        self.do(self.desk.hear())
        self.do(self.desk.clock.advance(seconds))

    @invariant()
    def running_tasks_are_told(self) -> None:
        validate(self.desk.state)
        running = self.desk.controller._queue.running_for(ME)
        assert len(running) <= len(self.desk.fleet.running)
        assert not self.desk.controller._queue.broken, self.desk.controller._queue.broken
        in_core = {
            flow: state.in_core for flow, state in self.desk.controller._queue.parked._flows.items() if state.in_core
        }
        assert in_core == Counter(job.flow for job in self.desk.controller._queue.jobs.values())

    def teardown(self) -> None:
        try:
            self.do(self.end_all())
        finally:
            self.do(self.desk.controller.close())
            self.do(settle())
            self.loop.close()

    async def end_all(self) -> None:
        """Let everything end well from here on, and look at how each job ended."""
        desk = self.desk
        desk.fleet.starts_by_itself = True
        for start in list(desk.fleet.starting.values()):
            start.set_result(None)
        await settle()
        for _ in range(10):
            await desk.run_dry()
            await desk.clock.advance(8.0)
        ended = await desk.run_dry()
        assert Counter(job.job_id for job in ended) == Counter(self.wanted.keys())
        for job in ended:
            wanted = self.wanted[job.job_id]
            if job.outcome is Outcome.SUCCEEDED:
                _, cut = build_graph(wanted, JobId("x"), FakeCatalog())
                expected = image_of(cut.works, cut.job.tasks)
                assert (job.result.value.pixels_HWC == expected.pixels_HWC).all()
                assert wanted.prompt != FAIL
            elif job.outcome is Outcome.CANCELLED:
                assert job.submission_id in self.cancelled
            else:
                assert job.error is not None
                assert job.error.message
        held = desk.state.snapshot().results_held
        assert len(desk.controller._tasks) == held
        assert desk.controller._queue.jobs == {}
        assert desk.controller._queue.parked._flows == {}
        assert desk.controller._drivers.known[ME].submissions == {}


ControllerMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestController = ControllerMachine.TestCase
