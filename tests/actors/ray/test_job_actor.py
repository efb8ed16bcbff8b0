"""The job service as an actor, without a Ray: what its constructor does where the journal cannot be opened."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from modelpool.actors.control.detached.submission_journal import Journal, JournalFailed
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray import job_actor
from modelpool.actors.ray.job_actor import JobServiceActor


def nobody(namespace: str, name: str) -> None:
    raise PoolLost("no controller")


@pytest.mark.parametrize("is_again", [False, True])
def test_a_service_that_ray_starts_again_on_a_full_disk_waits_for_room(monkeypatch, tmp_path: Path, is_again) -> None:
    """Ray starts no third one if a constructor raises. The first one reports why the pool cannot start."""
    full = ["database or disk is full"] * 2

    def opened(path: Path) -> Journal:
        if full:
            raise JournalFailed(full.pop())
        return Journal(path)

    context = SimpleNamespace(was_current_actor_reconstructed=is_again)
    monkeypatch.setattr(job_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(job_actor, "Journal", opened)
    monkeypatch.setattr(job_actor, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(job_actor, "_controller", nobody)
    service = JobServiceActor(tmp_path / "journal.sqlite", "modelpool", "mine", by_nodes=False)
    if is_again:
        service.ready()
        assert service.submissions() == ()
        service.close()
    else:
        with pytest.raises(JournalFailed, match="disk is full"):
            service.ready()
