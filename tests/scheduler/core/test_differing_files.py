"""Files with hashes that are known only after runs have used them: what was made with a file that is not the expected
one never leaves the pool."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import LossCause, Outcome, RunTask, ScheduleTick
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.model.nodes import RETRY_SECONDS, UNAVAILABLE_SECONDS
from tests.scheduler.world import PAINT, TEXT, Shell, alone, encode, image, sample


def on_nodes(config: SchedulerConfig | None = None, **nodes: str) -> Shell:
    """A shell with one worker on each of these machines, which know no hash of a file yet."""
    shell = Shell(config or SchedulerConfig(story_length=None), verifies=True)
    shell.want(*nodes)
    for name, node in nodes.items():
        shell.come_up(name, node=node)
    return shell


def finish_all(shell: Shell) -> None:
    while shell.running:
        shell.finish(next(iter(shell.running)))


def test_a_result_leaves_the_pool_when_the_hashes_of_its_files_are_known() -> None:
    shell = on_nodes(a="node-1")
    shell.submit(image("j"))
    finish_all(shell)
    assert shell.outcome("j") is None
    shell.judge("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED
    shell.submit(image("next", seed=1))
    finish_all(shell)
    assert shell.outcome("next") is Outcome.SUCCEEDED, "all hashes are known"


def test_what_a_wrong_file_made_is_made_again_on_another_machine() -> None:
    """Results that exist, that others have read, and runs that are under way, on each worker of the machine."""
    shell = on_nodes(a="odd", b="odd", c="even")
    shell.replace_file("odd", PAINT, is_bad=True)
    for number in range(6):
        shell.submit(image(f"j{number}", prompt=f"cat {number}", seed=number))
    for _ in range(8):
        shell.finish(next(name for name in shell.running if name != "c"))
    assert shell.wrong, "nothing wrong was made"
    commands = shell.judge("a")
    assert {key for (key, _), _ in shell.state.costs.nodes.nodes["odd"].differing.items()} == {PAINT}
    for name in ("a", "b"):
        run = shell.running.get(WorkerId(name))
        is_wrong = run is not None and PAINT in {use.component for use in shell.tasks[run.command.task_id].uses}
        assert run is None or run.stop_requested or not is_wrong
    for command in commands:
        if isinstance(command, RunTask) and command.worker_id in ("a", "b"):
            assert shell.tasks[command.task_id].uses[0].component != PAINT
    shell.judge("b")
    assert shell.held.isdisjoint(shell.wrong)
    while shell.running:
        name = next(iter(shell.running))
        shell.finish(name, RunErrorKind.CANCELLED if shell.running[name].stop_requested else None)
        for worker in list(shell.up):
            shell.judge(worker)
    assert all(shell.outcome(f"j{number}") is Outcome.SUCCEEDED for number in range(6))
    assert all(task.failures == 0 for task in shell.state.demand.tasks.values())


def test_a_wrong_file_counts_against_no_attempt() -> None:
    shell = on_nodes(SchedulerConfig(max_attempts=1, story_length=None), a="odd", b="even")
    shell.replace_file("odd", TEXT, is_bad=True)
    shell.submit(alone("j", encode("cat")))
    (name,) = shell.running
    if name == "b":
        shell.submit(alone("other", encode("dog")))
    shell.finish("a")
    shell.judge("a")
    finish_all(shell)
    for worker in ("a", "b"):
        shell.judge(worker)
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_weights_on_the_gpu_do_not_help_where_the_file_differs() -> None:
    """Unlike a file that is gone, one that differs was what the weights were read from."""
    shell = on_nodes(a="odd")
    shell.replace_file("odd", TEXT, is_bad=True)
    shell.submit(alone("first", encode("cat")))
    shell.want("a", "b")
    shell.finish("a")
    shell.judge("a")
    assert shell.on("a") is None
    shell.submit(alone("second", encode("dog")))
    assert shell.on("a") is None
    shell.come_up("b", node="even")
    assert shell.on("b") is not None


def test_a_job_fails_when_no_machine_has_the_right_file_and_names_the_hashes() -> None:
    shell = on_nodes(a="odd")
    shell.replace_file("odd", TEXT, is_bad=True)
    shell.submit(alone("j", encode("cat")))
    shell.finish("a")
    shell.judge("a")
    error = shell.error("j")
    assert error.kind is RunErrorKind.FILE_UNAVAILABLE
    for part in ("odd", "/models/text", "found SHA-256 b2", "expected a1"):
        assert part in error.message


def test_a_machine_with_the_right_file_again_gets_work() -> None:
    shell = on_nodes(a="odd", b="even")
    shell.replace_file("odd", TEXT, is_bad=True)
    for number in range(4):
        shell.submit(alone(f"j{number}", encode(f"cat {number}")))
    shell.finish("a")
    shell.judge("a")
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.on("a") is None
    shell.replace_file("odd", TEXT, is_bad=False)
    shell.files[WorkerId("a"), TEXT] = (1000, False)  # its worker looks at what it watches
    shell.judge("a")
    assert shell.on("a") is not None
    assert not shell.state.costs.nodes.lacking


def test_a_new_worker_of_the_machine_tries_the_file_again() -> None:
    """It does not know of it, and nobody else on the machine would say that the right file is there."""
    shell = on_nodes(a="odd", b="even")
    shell.replace_file("odd", TEXT, is_bad=True)
    shell.submit(alone("j", encode("cat")))
    shell.submit(alone("k", encode("dog")))
    shell.finish("a")
    shell.judge("a")
    shell.lose("a", LossCause.KILLED)
    shell.replace_file("odd", TEXT, is_bad=False)
    shell.come_up("a", node="odd")
    finish_all(shell)
    shell.tick(UNAVAILABLE_SECONDS + RETRY_SECONDS)
    for number in range(2):
        shell.submit(alone(f"later {number}", encode(f"later {number}")))
    assert shell.on("a") is not None


def test_what_a_lost_worker_made_with_unknown_files_is_made_again() -> None:
    shell = on_nodes(a="node-1", b="node-2")
    shell.submit(alone("j", encode("cat")))
    (name,) = shell.running
    shell.finish(name)
    assert shell.outcome("j") is None
    shell.lose(name, LossCause.NODE_LOST)
    (other,) = shell.running
    assert other != name
    shell.finish(other)
    shell.judge(other)
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_file_that_was_changed_before_its_hash_was_known_counts_as_wrong() -> None:
    shell = on_nodes(a="node-1")
    shell.submit(alone("j", encode("cat")))
    shell.finish("a")
    shell.replace_file("node-1", TEXT, is_bad=False)
    shell.judge("a")
    assert shell.on("a") == encode("cat").task_id
    shell.finish("a")
    shell.judge("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_runs_that_read_what_may_be_wrong_save_no_state() -> None:
    shell = on_nodes(a="node-1")
    first = encode("cat")
    shell.submit(image("j"))
    commands = shell.finish("a")
    started = [command for command in commands if isinstance(command, RunTask)]
    assert [command.provisional for command in started] == [True]
    shell.judge("a")
    finish_all(shell)
    commands = shell.submit(alone("k", sample(first.task_id, seed=5), given=(first.task_id,)))
    assert [command.provisional for command in commands if isinstance(command, RunTask)] == [False]


def test_a_cancelled_job_does_not_wait_for_hashes() -> None:
    shell = on_nodes(a="node-1")
    shell.submit(alone("j", encode("cat")))
    shell.finish("a")
    shell.cancel("j")
    assert shell.outcome("j") is Outcome.CANCELLED


def test_a_node_is_not_given_up_while_results_wait_for_the_hashes_of_its_files() -> None:
    """Else its work would be done again on a node that is given up as early."""
    group = NodeGroup("g", max_nodes=1, price_per_hour=1.0, start_seconds=10.0)
    shell = Shell(SchedulerConfig(story_length=None, groups=(group,)), verifies=True)
    shell.submit(alone("j", encode("cat")))
    ((name, _),) = shell.starting
    shell.come_up(name, node="n1")
    shell.finish(name)
    for _ in range(20):
        shell.tick(600.0)
        shell.feed_nothing()
        assert name in shell.up
    shell.judge(name)
    assert shell.outcome("j") is Outcome.SUCCEEDED
    for _ in range(20):
        shell.tick(600.0)
        shell.feed_nothing()
    assert not shell.up


def test_a_run_that_replaces_what_a_lost_worker_made_has_a_timeout_too() -> None:
    """It begins after everything else of the event, and nothing looked at its time before the next one."""
    shell = on_nodes(SchedulerConfig(run_timeout_seconds=20.0, story_length=None), a="n1", b="n1")
    shell.submit(alone("j", encode("cat")))
    (made_on,) = shell.running
    shell.finish(made_on)
    assert shell.outcome("j") is None, "the hashes are not known"
    while shell.tick_due is not None:
        shell.tick_comes()
    commands = shell.restart(made_on, 0.0)
    assert [type(command).__name__ for command in commands if isinstance(command, (RunTask, ScheduleTick))] == [
        "RunTask",
        "ScheduleTick",
    ]
