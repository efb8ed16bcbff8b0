"""`Gate`: what every call passes first: origin, API key, rate, size of the body; and the form of unexpected errors.

An ASGI middleware without FastAPI, so that it covers calls, web sockets and documentation pages alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.service.access import CALLER, AccessControl, Caller
from modelpool.actors.http.service.event_stream import EVENT_STREAM
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.http.service.problems import HttpProblem, problem_body
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.unread_bodies import UnreadBody

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

#: beginning of signed addresses, which need no key
SIGNED_PATH = "/files/"
#: the files of the web page, which ask for a key themselves and hold no data
PAGE_PATH, PAGE_FILES_PATH = "/", "/page/"
#: calls of probes, which tell nothing but counts
PROBE_PATHS = LIVE_PATH, READY_PATH = "/livez", "/readyz"
#: names of this machine, under which a server without keys may be called
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
#: close code of a web socket that is refused by policy. Source: RFC 6455, section 7.4.1
_POLICY_VIOLATION = 1008


class Gate:
    """Refuses calls before they reach the application."""

    def __init__(
        self, app: ASGIApp, access: AccessControl, settings: ServeSection, any_host: bool, limits: LimitLog
    ) -> None:
        """`any_host`: without keys, permit calls under every name of the server. `limits` counts refused calls."""
        self._limits = limits
        self._app = app
        self._access = access
        self._settings = settings
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or answer it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        body = UnreadBody(scope, receive, send) if scope["type"] == "http" else None
        try:
            scope[CALLER] = self._checked(scope, headers)
        except HttpProblem as problem:
            self._note(problem)
            await _refuse(scope, send if body is None else body.send, problem)
            return
        if body is None:
            await self._app(scope, receive, send)
            return
        await self._answer(scope, body)

    def _checked(self, scope: Scope, headers: Mapping[str, str]) -> Caller:
        _check_origin(headers, self._settings, self._any_host)
        if scope["path"].startswith((SIGNED_PATH, PAGE_FILES_PATH)) or scope["path"] in (PAGE_PATH, *PROBE_PATHS):
            return Caller()
        caller = self._access.caller(headers)
        self._access.admit_call(caller)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.upload_bound_bytes:
            raise _too_large(self._settings.upload_bound_bytes)
        return caller

    async def _answer(self, scope: Scope, body: UnreadBody) -> None:
        receive, send = body.receive, body.send
        started = is_open_stream = False
        left_bytes = self._settings.upload_bound_bytes

        async def bounded_receive() -> Message:
            nonlocal left_bytes
            message = await receive()
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                raise _too_large(self._settings.upload_bound_bytes)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started, is_open_stream
            if message["type"] == "http.response.start":
                started = True
                is_open_stream = any(
                    name.lower() == b"content-type" and value.startswith(EVENT_STREAM.encode())
                    for name, value in message["headers"]
                )
            elif not message.get("more_body", False):
                is_open_stream = False
            await send(message)

        try:
            await self._app(scope, bounded_receive, watched_send)
        except HttpProblem as problem:
            if started:
                raise
            self._note(problem)
            await _refuse(scope, send, problem)
        except ClientDisconnect:  # before its body had arrived
            return
        except asyncio.CancelledError:  # the server ends, and has waited for this call
            body.leave()
            if not started:
                await _refuse(scope, send, HttpProblem(503, "the server ends", {"Connection": "close"}))
            elif is_open_stream:  # clients of events connect again; any other answer must not look complete
                await send({"type": "http.response.body", "body": b""})
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await _refuse(scope, send, HttpProblem(500, "internal error; the server's log has the reason"))

    def _note(self, problem: HttpProblem) -> None:
        """Count a call that a limit refuses."""
        if problem.limit:
            self._limits.acted(problem.limit, f"refused a call with {problem.status}")


def _check_origin(headers: Mapping[str, str], settings: ServeSection, any_host: bool) -> None:
    """Refuse calls that a web page of another site makes through a browser of this machine: without keys, reaching the
    address is all the permission that is needed. Raises HttpProblem.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise HttpProblem(403, f"origin: found {origin}, expected pages of this server, {host}")
    if settings.keys or any_host:
        return
    name = _host_name(host)
    if name and name not in _LOOPBACK_NAMES and name != settings.host.lower():
        raise HttpProblem(403, f"host: found {host}, expected {settings.host} or a name of this machine")


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host


def _too_large(limit_bytes: int) -> HttpProblem:
    return HttpProblem(
        413, f"the body has more than {limit_bytes} bytes", {"Connection": "close"}, limit="upload_bytes"
    )


async def _refuse(scope: Scope, send: Send, problem: HttpProblem) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(problem)[:100]})
        return
    body: dict[str, Any] = problem_body(scope["path"], problem.status, shown_message(str(problem)))
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **problem.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
