"""A job service that hangs is started again; one that is slow, restarted by itself, or watched late is not."""

from __future__ import annotations

from concurrent.futures import Future

from modelpool.actors.control.detached.service_watch import ServiceWatch


class Service:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.questions: list[Future[None]] = []
        self.restarts = 0

    def ask(self) -> Future[None]:
        self.questions.append(Future())
        return self.questions[-1]

    def restart(self) -> None:
        self.restarts += 1

    def answer(self) -> None:
        self.questions[-1].set_result(None)


def test_a_service_that_does_not_answer_is_started_again_once_per_limit() -> None:
    service = Service()
    watch = ServiceWatch(service, 2.0, 60.0, 0.0)
    silences = [watch.beat(2.0 * n) for n in range(1, 70)]
    given_up = [(2.0 * n, seconds) for n, seconds in enumerate(silences, start=1) if seconds is not None]
    assert given_up == [(62.0, 60.0), (126.0, 60.0)]
    assert (service.restarts, len(service.questions)) == (2, 3)


def test_a_service_that_answers_late_or_has_ended_is_left_alone() -> None:
    service = Service()
    watch = ServiceWatch(service, 2.0, 60.0, 0.0)
    now = 0.0
    for late in range(5):
        for _ in range(29):
            now += 2.0
            assert watch.beat(now) is None
        if late % 2:
            service.questions[-1].set_exception(RuntimeError("it has ended, and Ray starts it again"))
        else:
            service.answer()
    assert service.restarts == 0


def test_a_daemon_that_was_stopped_itself_blames_nobody() -> None:
    service = Service()
    watch = ServiceWatch(service, 2.0, 60.0, 0.0)
    watch.beat(2.0)
    assert watch.beat(3600.0) is None
    service.answer()
    assert watch.beat(3602.0) is None
    assert service.restarts == 0
