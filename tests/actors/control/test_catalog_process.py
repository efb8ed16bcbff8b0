"""The catalog's process: the answers of a catalog in this process, turns for every caller, and its ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple

import psutil
import pytest
import uvloop

from modelpool.actors.control import catalog_process, catalog_questions, opened_catalog
from modelpool.actors.control.build_requests import MOST_ASKED, build_requests
from modelpool.actors.control.catalog_process import CatalogProcess, answer_of
from modelpool.actors.control.catalog_questions import (
    BUILD_SOME,
    BUILD_STAGE,
    FILE_NAMES,
    LORAS,
    MODELS,
    QUESTIONS,
    TINY_DECODERS,
    WEIGHTS,
    CatalogQuestion,
)
from modelpool.actors.control.catalog_service import CatalogQueries, CatalogService
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS
from modelpool.actors.ray.fork_server import ForkServer, fork_command, python_command
from modelpool.actors.ray.ray_session import short_folder
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.prompt_tokens import TokenizedPrompt
from modelpool.pool.values.core.stage_params import EncodeParams
from modelpool.pool.values.specs.spec import JobId, RunCost, Stage, TaskSpec
from tests.actors.control.test_controller import request
from tests.actors.fake_fleet import Desk, InlineExecutor
from tests.actors.fakes import MODELS as MODEL_NAMES
from tests.actors.fakes import FakeCatalog

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: a prompt that takes a while to tokenize, and one that ends the process
SLOW, DEADLY = "slow", "deadly"
SLOW_SECONDS = 0.1


class Panic(BaseException):
    """As libraries in Rust raise it."""


class TestedCatalog(FakeCatalog):
    """A catalog that is slow, ends its process, and notes what it learns, as its folder says."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        (folder / f"pid-{os.getpid()}").touch()

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        if work.text.startswith(SLOW):
            time.sleep(SLOW_SECONDS)
        if work.text == DEADLY and (lives := self._folder / "lives").exists():
            left = int(lives.read_text())
            lives.write_text(str(left - 1))
            if left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().tokenize(work)

    def loras(self) -> tuple[object, ...]:
        if (problem := self._folder / "problem").exists():
            raise Panic(problem.read_text())
        return super().loras()

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        with (self._folder / "learnt").open("a") as file:
            file.write(f"{task.stage}\n")


#: settings of the pool that recipes name
COMPUTED_BY = {"products": "auto"}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = ForkServer.start([__name__], short_folder())
    assert started is not None
    yield started
    started.close()


@pytest.fixture
def python(server: ForkServer) -> tuple[str, ...]:
    return fork_command(server.socket)


def opened(folder: Path, python: tuple[str, ...]) -> CatalogProcess:
    return CatalogProcess(pickle.dumps(partial(TestedCatalog, folder)), python, COMPUTED_BY)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


async def until_gone(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


def wanted_of(*requests: GenerateRequest) -> list[tuple[JobId, GenerateRequest]]:
    return [(JobId(f"job {number}"), one) for number, one in enumerate(requests)]


def test_its_answers_are_those_of_a_catalog_in_this_process(python, tmp_path) -> None:
    wanted = wanted_of(*(request(f"p {n // 3}", seed=n) for n in range(12)), request(model="none"), request(cfg=1.0))

    async def answers(catalog: CatalogQueries) -> list[object]:
        return [
            repr(await build_requests(catalog, wanted, None)),
            repr(await catalog.ask(BUILD_STAGE, StageRequest(Stage.SAMPLE, request()), JobId("j"), frozenset(), None)),
            await catalog.ask(MODELS),
            await catalog.ask(LORAS),
            await catalog.ask(FILE_NAMES),
            await catalog.ask(TINY_DECODERS),
            catalog.files_address,
            repr(await catalog.ask(WEIGHTS, MODEL_NAMES[0])),
        ]

    async def compare() -> None:
        process = opened(tmp_path, python)
        try:
            assert await answers(process) == await answers(
                CatalogService(partial(TestedCatalog, tmp_path), computed_by=COMPUTED_BY)
            )
            with pytest.raises(UserError, match="none"):
                await process.ask(WEIGHTS, "none")
        finally:
            process.close()
        with pytest.raises(UserError, match="closed"):
            await process.ask(MODELS)

    asyncio.run(compare())
    assert len(pids(tmp_path)) == 2, "one of them is this process"
    assert python[0] == sys.executable
    assert python_command(os.environ) == (sys.executable,)


def test_every_question_is_one_of_the_table_and_travels_as_its_name() -> None:
    for name, question in QUESTIONS.items():
        assert question.name == name
        assert pickle.loads(pickle.dumps(question)) is question
    constants = {value.name for value in vars(catalog_questions).values() if isinstance(value, CatalogQuestion)}
    assert constants == set(QUESTIONS), "a question that is missing in the table fails where it arrives"


def test_other_callers_get_their_turn_while_many_new_requests_are_converted(python, tmp_path) -> None:
    """One call of 24 slow requests kept everybody waiting for all of them."""
    count = 24

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            long = asyncio.ensure_future(
                build_requests(process, wanted_of(*(request(f"{SLOW} {n}", cfg=1.0) for n in range(count))), None)
            )
            desk, answered = Desk(), 0
            desk.controller._catalog = process
            while not long.done():
                await desk.controller.ask_catalog(MODELS)
                answered += 1
            assert len(await long) == count
            # about one for each slow request; fewer where the machine gives this loop no turn during one
            assert answered >= count // 2
        finally:
            process.close()

    asyncio.run(talk())


def test_questions_are_on_their_way_while_another_is_answered(python, tmp_path) -> None:
    """Each one took several turns of the event loop between its predecessor's answer and its own. While the loop has
    much to do in each turn, submissions waited for seconds."""
    count = 20

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            expected = await process.ask(MODELS)
            (pid,) = pids(tmp_path)
            os.kill(pid, signal.SIGSTOP)  # no answer comes before all are on their way, however slow the machine is
            asked = asyncio.gather(*(process.ask(MODELS) for _ in range(count)))
            assert process._process is not None
            for _ in range(3000):  # a thread takes part: turns of the loop alone say little on a busy machine
                if len(process._process._waiting) == count:
                    break
                await asyncio.sleep(0.01)
            assert len(process._process._waiting) == count
            os.kill(pid, signal.SIGCONT)
            assert await asked == [expected] * count
        finally:
            process.close()

    asyncio.run(talk())


def test_requests_that_cost_nothing_share_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_catalog, "TURN_SECONDS", float("inf"))
    asked: list[int] = []

    class Counting(CatalogService):
        async def ask(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
            if question.name == BUILD_SOME.name:
                wanted: Any = arguments[0]
                asked.append(len(wanted))
            return await super().ask(question, *arguments)

    async def build(*requests: GenerateRequest, until_error: bool = False) -> list[BuiltRequest | UserError]:
        asked.clear()
        catalog = Counting(FakeCatalog, InlineExecutor())
        return await build_requests(catalog, wanted_of(*requests), None, until_error)

    assert len(asyncio.run(build(*(request(seed=n + 1) for n in range(100))))) == 100
    assert asked == [1]
    assert len(asyncio.run(build(*(request(f"p {n}") for n in range(2 * MOST_ASKED))))) == 2 * MOST_ASKED
    assert asked == [MOST_ASKED] * 2
    mixed = [request(), request(model="none"), request(seed=2), request(model="none", seed=2), request("other")]
    kinds = [isinstance(one, UserError) for one in asyncio.run(build(*mixed))]
    assert kinds == [False, True, False, True, False]
    kinds = [isinstance(one, UserError) for one in asyncio.run(build(*mixed, until_error=True))]
    assert kinds == [False, True]


def test_a_process_that_ends_is_replaced_and_nothing_that_waits_is_lost(python, tmp_path) -> None:
    """It ends idle, with a question, and with a question that ends every process."""
    lives = tmp_path / "lives"
    lives.write_text("1")

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            models = await process.ask(MODELS)
            (first,) = pids(tmp_path)
            os.kill(first, signal.SIGKILL)
            await until_gone(first)
            assert await process.ask(MODELS) == models
            (good,) = await build_requests(process, wanted_of(request(DEADLY)), None)
            assert not isinstance(good, UserError)
            assert len(pids(tmp_path)) == 3
            lives.write_text("1000")
            results = await asyncio.gather(
                build_requests(process, wanted_of(request(DEADLY, seed=2)), None),
                build_requests(process, wanted_of(request("good"), request(DEADLY, seed=3)), None),
                build_requests(process, wanted_of(request("good")), None),
                process.ask(MODELS),
                return_exceptions=True,
            )
            assert isinstance(results[0], UserError)
            assert "ended 3 times in a row" in str(results[0])
            assert isinstance(results[1], UserError), "it is asked in one question with the deadly one"
            assert len(results[2]) == 1
            assert results[3] == models
        finally:
            process.close()

    asyncio.run(talk())


def test_a_process_whose_end_is_noticed_by_a_question_is_replaced_at_once(python, tmp_path) -> None:
    """The question failed as if three processes had ended: all its tries were for the one that had."""

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            models = await process.ask(MODELS)
            (first,) = pids(tmp_path)
            assert process._process is not None
            process._process._process.kill()  # the client, and thus its fork
            process._process._process.wait()
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(first).wait()  # without a turn of the event loop
            assert await process.ask(MODELS) == models
            assert len(pids(tmp_path)) == 2
        finally:
            process.close()

    asyncio.run(talk())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_question_in_the_turn_in_which_the_line_is_reset_is_asked_again(
    run: Callable[..., Any], python, tmp_path
) -> None:
    """On uvloop, it failed, and with it the submission: that loop raises RuntimeError where others say nothing."""

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            models = await process.ask(MODELS)
            assert process._process is not None
            assert process._process._writer is not None
            process._process._writer.transport.abort()
            assert await asyncio.gather(process.ask(MODELS), process.ask(MODELS)) == [models, models]
            assert len(pids(tmp_path)) == 2
        finally:
            process.close()

    run(talk())


def test_a_question_that_is_cancelled_at_any_point_affects_no_other(python, tmp_path) -> None:
    """The first one opens the connection, and a cancellation closes its socket."""

    async def talk() -> None:
        for turns in range(5):
            process = opened(tmp_path, python)
            try:
                cancelled = asyncio.ensure_future(process.ask(MODELS))
                for _ in range(turns):
                    await asyncio.sleep(0)
                cancelled.cancel()
                assert await process.ask(MODELS)
            finally:
                process.close()

    asyncio.run(talk())


def test_a_process_that_is_ended_while_it_is_sent_much_leaves_the_next_one_alone(python, tmp_path) -> None:
    """The event loop went on writing to its file descriptor, which is that of the next one: it had no answers."""

    async def talk() -> None:
        deaf = opened(tmp_path, (sys.executable, "-c", "import time; time.sleep(60)"))
        asking = asyncio.ensure_future(deaf.ask(WEIGHTS, "x" * 10_000_000))
        while deaf._process is not None and deaf._process._writer is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        deaf.close()
        process = opened(tmp_path, python)
        try:
            assert await asyncio.wait_for(process.ask(MODELS), 30)
        finally:
            process.close()
        with pytest.raises(UserError, match="closed"):
            await asking

    asyncio.run(talk())


def test_a_panic_of_a_library_fails_its_question_and_no_other(python, tmp_path) -> None:
    """It ended the thread that answers, but not the process: every question waited for ever."""

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            (tmp_path / "problem").write_text("a byte that is none")
            with pytest.raises(RuntimeError, match="a byte that is none") as raised:
                await asyncio.wait_for(process.ask(LORAS), 60)
            assert any("in loras" in note for note in raised.value.__notes__)
            assert await process.ask(MODELS)
            assert len(pids(tmp_path)) == 1
        finally:
            process.close()

    asyncio.run(talk())


def test_a_submission_survives_the_end_of_the_process_and_a_python_that_does_not_start_is_named(
    python, tmp_path
) -> None:
    (tmp_path / "lives").write_text("1")

    async def talk() -> None:
        desk = Desk()
        desk.controller._catalog = process = opened(tmp_path, python)
        await desk.open()
        await desk.submit(request(DEADLY), request(DEADLY, seed=2))
        assert len(await desk.run_dry()) == 2
        process.close()
        with pytest.raises(UserError, match="3 times"):
            await opened(tmp_path, (str(tmp_path / "missing"),)).ask(MODELS)

    asyncio.run(talk())


def test_it_ends_with_its_controller_in_the_middle_of_an_answer(python, tmp_path) -> None:
    async def talk() -> None:
        process = opened(tmp_path, python)
        await process.ask(MODELS)
        (pid,) = pids(tmp_path)
        asking = asyncio.ensure_future(
            process.ask(BUILD_SOME, wanted_of(request(f"{SLOW} {SLOW}")), None, False, USUAL_TERMS)
        )
        await asyncio.sleep(0)
        assert process._process is not None
        process._process._socket.shutdown(2)  # as the kernel does when the controller is killed
        await until_gone(pid)
        asking.cancel()
        waiting = [asyncio.ensure_future(process.ask(MODELS)) for _ in range(2)]
        await asyncio.sleep(0)
        process.close()
        for question in waiting:
            with pytest.raises(UserError, match="closed"):
                await question

    asyncio.run(talk())


def test_measurements_reach_it_before_the_next_question_and_without_one(
    python, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_process, "LEARN_BATCH", 3)

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            (built,) = await process.ask(BUILD_SOME, wanted_of(request(cfg=1.0)), None, False, USUAL_TERMS)
            assert not isinstance(built, UserError)
            tasks = built.graph.job.tasks
            process.learn(tasks[0], RunCost())
            await process.ask(MODELS)
            assert (tmp_path / "learnt").read_text().split() == [str(tasks[0].stage)]
            for task in tasks:
                process.learn(task, RunCost())
            while len((tmp_path / "learnt").read_text().split()) < 1 + len(tasks):
                await asyncio.sleep(0.01)
        finally:
            process.close()

    asyncio.run(talk())


def test_measurements_are_not_collected_for_a_process_that_has_ended(
    python, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller kept the values of all tasks until somebody submitted again."""
    monkeypatch.setattr(catalog_process, "LEARN_BATCH", 3)

    async def talk() -> None:
        process = opened(tmp_path, python)
        try:
            (built,) = await process.ask(BUILD_SOME, wanted_of(request(cfg=1.0)), None, False, USUAL_TERMS)
            assert not isinstance(built, UserError)
            assert process._process is not None
            os.kill(pids(tmp_path)[0], signal.SIGKILL)
            while not process._process.is_over:
                await asyncio.sleep(0.01)
            for _ in range(30):
                process.learn(built.graph.job.tasks[0], RunCost())
                await asyncio.sleep(0)
            assert len(process._measured) <= 6
            assert await process.ask(MODELS)
        finally:
            process.close()

    asyncio.run(talk())


def test_an_error_that_cannot_be_sent_is_replaced_by_its_text() -> None:
    class Local(Exception):
        pass

    for error in (Local("no module has this class"), None):
        value = MappingProxyType({"a": 1}) if error is None else None
        answer = pickle.loads(answer_of(1, value, error, "")[8:])
        assert answer.value == value
        assert error is None or "no module has this class" in str(answer.error)
