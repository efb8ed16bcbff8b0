"""Calls an ASGI application without a network, and a pool that refuses everything: for many cheap calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from modelpool.actors.control.status import PoolStatus
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing
from modelpool.pool.values.core.errors import UserError, unknown_name


@dataclass(frozen=True)
class Answer:
    """The answer to a call; `headers` have names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, query: str = ""
) -> Answer:
    """Call `app` once, with the complete body in one message."""
    named = {"host": "127.0.0.1", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing more comes")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return Answer(
        sent[0]["status"],
        {name.decode(): value.decode() for name, value in sent[0]["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )


class RefusingPool:
    """A pool with one model that refuses every request, as for an unknown model. See
    `actors.http.service.ports.HttpPool`."""

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        assert all(isinstance(request, GenerateRequest) for request in requests)
        raise unknown_name("model", "any", ("shapes",))

    def submit_detached(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        return self.submit(requests)

    def attach(self, jobs_id: str) -> Any:
        raise UserError("this pool has no detached jobs")

    def detached(self) -> Any:
        raise UserError("this pool has no detached jobs")

    def recipes(self, requests: Iterable[GenerateRequest]) -> Any:
        return tuple(unknown_name("model", "any", ("shapes",)) for _ in requests)

    def models(self) -> tuple[ModelListing, ...]:
        return (ModelListing("shapes", "shapes.safetensors", "SD 1.5", 1, 64, 64),)

    def loras(self) -> tuple[LoraListing, ...]:
        return (LoraListing("light", "light.safetensors", 1),)

    def file_names(self) -> FileNames:
        return FileNames(controlnets=("canny", "sub/depth"), upscalers=("4x",))

    def upscale(self, image: Any, upscale: Any, **_: Any) -> Any:
        raise unknown_name("upscaler", "any", ("4x",))

    def status(self) -> PoolStatus:
        return PoolStatus((), {}, {}, 0, 0, 0, 0, 0, 0)

    def metrics(self) -> Any:
        return ()

    def history(self, job: str) -> Any:
        raise unknown_name("job", job, ())
