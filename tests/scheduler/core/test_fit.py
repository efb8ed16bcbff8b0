"""What fits nowhere fails with both numbers; "nowhere" is judged against every worker that is wanted."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.scheduler.world import Shell, alone, encode, image


def test_a_task_that_fits_nowhere_fails_its_job_at_once(shell: Shell) -> None:
    """The sample needs 100 B of activations and 2 B of scratch; nothing is run for it before it fails."""
    shell.workers(a=40, b=64)
    shell.submit(image("j", activation_bytes=100))
    error = shell.error("j")
    assert error.kind is RunErrorKind.BAD_INPUT
    assert "102 B" in error.message
    assert "64 B" in error.message
    assert "b has most" in error.message
    assert not shell.running


def test_it_may_fit_on_a_worker_that_was_never_up(shell: Shell) -> None:
    """1. Only the small worker is up. 2. A large task waits for the other. 3. That turns out to be small as well."""
    shell.want("a", "b")
    shell.come_up("a", 20)
    shell.submit(alone("j", encode("cat", activation_bytes=30)))
    assert shell.outcome("j") is None
    shell.come_up("b", 24)
    assert "24 B" in shell.error("j").message


def test_it_waits_for_the_only_large_worker_while_that_restarts(shell: Shell) -> None:
    """1. The large worker is lost. 2. A task for it is submitted. 3. It does not fail, and the small worker is not
    blocked by it. 4. The large worker comes back."""
    shell.workers(small=20, large=64)
    shell.lose("large")
    shell.submit(alone("big", encode("cat", activation_bytes=30)))
    shell.submit(alone("little", encode("dog")))
    assert shell.on("small") == encode("dog").task_id
    assert shell.outcome("big") is None
    shell.come_up("large", 64)
    assert shell.on("large") == encode("cat", activation_bytes=30).task_id


def test_it_fails_when_the_large_worker_is_no_longer_wanted(shell: Shell) -> None:
    shell.want("small", "large")
    shell.come_up("small", 20)
    shell.submit(alone("big", encode("cat", activation_bytes=30)))
    shell.want("small")
    assert "20 B" in shell.error("big").message


def test_it_fails_when_the_large_worker_is_given_up() -> None:
    shell = Shell(SchedulerConfig(start_retry_limit=1))
    shell.workers(small=20, large=64)
    shell.submit(alone("big", encode("cat", activation_bytes=30)))
    shell.submit(alone("little", encode("dog")))
    shell.lose("large")
    assert shell.outcome("big") is Outcome.FAILED
    assert "small has most" in shell.error("big").message
    assert shell.outcome("little") is None


def test_a_queue_for_the_large_worker_does_not_hide_what_a_small_one_can_run() -> None:
    """More large tasks than the window is long stand in front of the little one."""
    shell = Shell(SchedulerConfig(window=2))
    shell.workers(small=20, large=64)
    for number in range(5):
        shell.submit(alone(f"big-{number}", encode(f"big-{number}", activation_bytes=30)))
    shell.submit(alone("little", encode("dog")))
    assert shell.on("small") == encode("dog").task_id


def test_a_task_whose_worker_shrank_while_it_ran_is_judged_anew(shell: Shell) -> None:
    """1. It runs on the large worker, which is no longer wanted. 2. The worker is lost. 3. It fits on no other."""
    shell.workers(small=20, large=64)
    shell.submit(alone("big", encode("cat", activation_bytes=30)))
    assert shell.on("large") is not None
    shell.want("small")
    shell.lose("large")
    assert shell.error("big").kind is RunErrorKind.BAD_INPUT
    assert WorkerId("small") in shell.up
