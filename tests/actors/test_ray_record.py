"""A pool on a real Ray that records: what its controller decided is decided again, and its jobs become a trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.scheduler.model.messages import RunTask, TaskRevoked
from modelpool.scheduler.simulator.record.event_log import read_entries, read_header
from modelpool.scheduler.simulator.record.log_trace import live_trace
from modelpool.scheduler.simulator.record.replay import replay
from tests.actors.fakes import start_fake_pool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def test_a_live_pool_s_log_is_decided_again_to_the_same_commands(tmp_path: Path) -> None:
    log = tmp_path / "pool.jsonl"
    with start_fake_pool("recorded", workers=2, record=log) as pool:
        pool.wait_ready(120)
        assert pool.status().record == str(log)
        wanted = [
            GenerateRequest(model="shapes", prompt=f"a circle {seed % 3}", seed=seed, steps=2) for seed in range(12)
        ]
        jobs = pool.submit(wanted, output=False)
        images = list(jobs.images())
        assert len(images) == 12
        image = images[0]
        history = pool.history(image.job_id)
        assert [task.why for task in image.tasks] == [task.attempts[-1].why for task in history.tasks]
    with log.open(encoding="ascii") as file:
        header = read_header(file.readline())
        entries = list(read_entries(file))
    assert replay(header, entries, check=True).same
    starts = Counter(c.task_id for entry in entries for c in entry.commands if isinstance(c, RunTask))
    # an idle worker takes over what waits on a busy one
    moved = Counter(entry.event.task_id for entry in entries if isinstance(entry.event, TaskRevoked))
    assert starts == Counter(starts.keys()) + moved
    assert len(starts) >= 12 * 2
    live = live_trace(entries, "pool")
    assert {s.job.job_id for s in live.workload.jobs} == {image.job_id for image in images}
    assert live.measured > 0


def test_a_record_that_cannot_be_made_is_told_when_the_pool_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed, match="file/log: cannot be written"):
        start_fake_pool("unwritable", workers=1, record=tmp_path / "file" / "log")
