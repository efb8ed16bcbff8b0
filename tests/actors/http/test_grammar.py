"""Random calls of all interfaces, from their schemas: none is answered with a failure of the server."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.http_grammar import Answers, Call, Grammar, answer_of, body_models, make_calls, schemas_of
from tests.actors.http.conftest import served
from tests.actors.http.fake_page_pool import open_page_pool

ROUTES_OF_ALL = {"/api/jobs", "/prompt", "/v1/images/generations", "/sdapi/v1/txt2img", "/upload/image", "/object_info"}


def answers(folder: Path, seed: int, count: int) -> Answers:
    """The answers of a server with fake engines to `count` calls; at the end, it accepts a valid job."""
    with open_page_pool(output=folder / "pool") as pool, served(pool, folder / "outputs") as address:
        port = urlsplit(address).port
        assert port is not None

        async def run() -> Answers:
            grammar = Grammar(await schemas_of(port), body_models(), seed)
            assert {path for _, path, _ in grammar.routes} >= ROUTES_OF_ALL
            found = await make_calls(port, grammar, range(count))
            body = json.dumps({"model": "shapes", "prompt": "x", "width": 64, "height": 64, "steps": 1}).encode()
            status, text = await answer_of(
                port, Call("POST", "/api/jobs", (("Content-Type", "application/json"),), body)
            )
            assert status == "201", text
            return found

        return asyncio.run(run())


@pytest.mark.filterwarnings("ignore")  # of the pool, which tests turn into errors
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_no_random_call_fails(count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        found = answers(tmp_path, count, count)
    assert found.failures == []
    assert sum(found.statuses.values()) == count
    assert {"200", "201", "400", "404"} <= set(found.statuses), "calls succeed, too"
    assert [record.getMessage() for record in caplog.records] == []


def test_a_call_is_repeated_by_its_seed_and_number() -> None:
    from benchmarks.http_grammar import Schemas

    description = {
        "paths": {"/a/{id}": {"get": {"parameters": [{"name": "id", "in": "path"}, {"name": "q", "in": "query"}]}}},
        "components": {"schemas": {"GenerateRequest": {"properties": {"steps": {"type": "integer", "minimum": 1}}}}},
    }
    schemas = Schemas(description, {"Node": {"input": {"required": {"a": ["INT", {"min": 0, "max": 3}]}}}})
    calls = [[Grammar(schemas, {}, seed).call(number) for number in range(300)] for seed in (1, 1, 2)]
    assert calls[0] == calls[1] != calls[2]
    assert any(b'"steps": 0' in call.body for call in calls[0]), "bounds are passed"
