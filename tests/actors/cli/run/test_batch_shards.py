"""`modelpool batch --shards` on a whole pool in this process."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from modelpool.actors.cli.main import run
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.outputs.sharded import ShardedOutputs
from tests.actors.loop_connection import open_pool

ROWS = 10


def rows_in_shards(folder: Path) -> list[int]:
    rows = []
    for path in folder.glob("shard-*.tar"):
        with tarfile.open(path) as tar:
            entries = [tar.extractfile(name) for name in tar.getnames() if name.endswith(".json")]
            rows += [json.loads(entry.read())["recipe"]["seed"] for entry in entries if entry is not None]
    return sorted(rows)


def test_a_run_that_ended_before_its_last_shard_is_completed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all outputs were written before it ended, so that nothing is left to generate."""
    rows = (json.dumps({"model": "shapes", "prompt": f"a {seed}", "seed": seed, "steps": 2}) for seed in range(ROWS))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    out = tmp_path / "out"
    arguments = ("batch", str(tmp_path / "rows.jsonl"), "--out", str(out), "--shards", "4")
    session = Session(arguments, lambda options: open_pool())
    with monkeypatch.context() as patch:
        patch.setattr(ShardedOutputs, "finish", lambda self: None)
        assert run(list(arguments), session) == 0
    assert len(rows_in_shards(out)) < ROWS
    assert run(list(arguments), session) == 0
    assert rows_in_shards(out) == list(range(ROWS))
    assert not list(out.glob("a-*.png"))
