"""The story of a job can be read, written down and read back; it does not grow for ever."""

from __future__ import annotations

from itertools import pairwise

from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.story_lines import dump, load
from tests.scheduler.world import Shell, image


def test_a_job_has_a_story_with_causes_workers_and_attempts(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.lose("a")
    shell.come_up("a")
    for _ in range(3):
        shell.finish("a")
    job = image("j")
    lines = shell.state.story(job.job_id)
    assert [line.after for line in lines if line.subject == "j"] == ["active", "ended"]
    first = [line.after for line in lines if line.subject == job.tasks[0].task_id]
    assert first == ["blocked", "ready", "running", "blocked", "ready", "running", "ended"]
    text = dump(lines)
    for part in ("submitted j", "a#1 down: power cut", "attempt 2 on a#2", "attempt 1 on a#2: done"):
        assert part in text
    assert all(earlier.at <= later.at for earlier, later in pairwise(lines))


def test_other_jobs_are_not_part_of_it(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j", seed=1))
    shell.submit(image("k", seed=2))
    assert "k" not in {line.subject for line in shell.state.story(image("j").job_id)}


def test_load_reads_what_dump_wrote(shell: Shell) -> None:
    shell.workers(a=64, b=20)
    shell.submit(image("j"))
    shell.lose("a")
    shell.cancel("j")
    lines = shell.state.log.lines()
    assert lines
    assert load(dump(lines)) == lines


def test_in_production_it_is_bounded() -> None:
    shell = Shell(SchedulerConfig(story_length=10))
    shell.workers(a=64)
    for number in range(10):
        shell.submit(image(f"j{number}", seed=number))
        shell.cancel(f"j{number}")
    assert len(shell.state.log.lines()) == 10
