"""Reads the bodies of calls: JSON objects, and forms with files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any

from modelpool.actors.http.service.access import caller_of
from modelpool.actors.http.service.form_names import with_plain_names
from modelpool.actors.http.service.held_shares import HeldShare, HeldShares
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.turns import Turns
from modelpool.actors.request.json_text import JsonOverBound, NotJson, parse_json

if TYPE_CHECKING:
    from starlette.requests import Request

#: bodies up to this size are parsed on the loop, which takes less than handing them to a thread
SMALL_BYTES = 1 << 16
#: bodies up to this size are kept in memory. An owner's must not wait for larger ones of the same owner, without keys
#: of everybody: each kind has turns of its own
MEMORY_BYTES = 1 << 20
#: bodies of this kind that are parsed at a time, in all and of each owner: the parser keeps the interpreter from the
#: event loop for tens of milliseconds, as often as there are threads that wait for it
MOST_PARSED_IN_MEMORY, MOST_PARSED_IN_MEMORY_OF_OWNER = 3, 2
#: larger ones: each takes several times its size
MOST_PARSED, MOST_PARSED_OF_OWNER = 2, 1
#: bodies of the largest size of one owner that arrive or are read at a time, and owners who may have as many
MOST_BODIES_OF_OWNER, MOST_OWNERS_OF_BODIES = 8, 4
#: values in the body of a call: 10,000 requests have up to 50 each
MAX_BODY_VALUES = 500_000
#: parts of a form
MAX_PARTS = 100


@dataclass(frozen=True, slots=True)
class FormBody:
    """A form: texts, and files as (name of the file, content), by field. A field may have several files."""

    texts: Mapping[str, str]
    files: Mapping[str, tuple[tuple[str, bytes], ...]]


async def json_body(request: Request, max_bytes: int) -> Any:
    """Return the body as a JSON value. Raises HttpProblem (400)."""
    # a body that is announced to be small, as most are, comes in one part or two
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= SMALL_BYTES:
        try:
            return parse_json(await request.body(), max_bytes, max_values=MAX_BODY_VALUES)
        except NotJson as problem:
            raise _unusable(problem) from None
    arriving = share_of_bodies(request)
    # slow bodies must not fill the memory, nor bodies of one owner the disk
    with SpooledTemporaryFile(max_size=MEMORY_BYTES) as content, contextlib.closing(arriving):
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise HttpProblem(
                    400, f"body: found more than {max_bytes} bytes", {"Connection": "close"}, "body_bytes"
                )
            if size > MEMORY_BYTES:
                arriving.take(size - arriving.amount)
            content.write(part)

        def parsed() -> Any:
            content.seek(0)
            return parse_json(content.read(), max_bytes, max_values=MAX_BODY_VALUES)

        try:
            if size <= SMALL_BYTES:
                return parsed()
            state = request.scope["app"].state
            turns: Turns = state.parsing_in_memory if size <= MEMORY_BYTES else state.parsing
            async with turns.turn(caller_of(request).owner):
                return await asyncio.to_thread(parsed)
        except NotJson as problem:
            raise _unusable(problem) from None


def _unusable(problem: NotJson) -> HttpProblem:
    return HttpProblem(400, f"body: {problem}", limit="body_values" if isinstance(problem, JsonOverBound) else "")


def shares_of_bodies(max_bytes: int) -> HeldShares:
    """Return the bytes of large bodies that arrive or are read, of a server with bodies of up to `max_bytes`."""
    of_owner = MOST_BODIES_OF_OWNER * max_bytes
    return HeldShares("bytes of bodies that arrive", "arriving_bytes", MOST_OWNERS_OF_BODIES * of_owner, of_owner)


def share_of_bodies(request: Request) -> HeldShare:
    """Return the bytes of the body of a call, so far none."""
    return HeldShare(request.scope["app"].state.arriving, caller_of(request).owner)


async def json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the body as a JSON object. Raises HttpProblem (400)."""
    return as_object(await json_body(request, max_bytes))


def as_object(value: Any, name: str = "body") -> dict[str, Any]:
    """Return a JSON object. Raises HttpProblem (400)."""
    if not isinstance(value, dict):
        raise HttpProblem(400, f"{name}: found {type(value).__name__}, expected a JSON object")
    return value


async def _with_plain_names(request: Request, arriving: HeldShare) -> Request:
    """Return the same call with the names of its files as the parser reads them. Reads the body, which stays in memory
    no longer than the returned call."""
    from starlette.requests import Request as NewRequest

    parts: list[bytes] = []
    async for part in request.stream():
        arriving.take(len(part))
        parts.append(part)
    content = with_plain_names(b"".join(parts), request.headers.get("content-type", ""))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return NewRequest(request.scope, receive)


async def form_body(request: Request, max_bytes: int) -> FormBody:
    """Return the body as a form. Raises HttpProblem (400)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
        raise HttpProblem(400, f"content-type: found {kind or 'none'}, expected multipart/form-data")
    with contextlib.closing(share_of_bodies(request)) as arriving:
        return await _read_form(await _with_plain_names(request, arriving), max_bytes)


async def _read_form(request: Request, max_bytes: int) -> FormBody:
    from starlette.datastructures import UploadFile
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartException

    try:
        async with request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=max_bytes) as form:
            texts = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            files: dict[str, tuple[tuple[str, bytes], ...]] = {}
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    files[name] = (*files.get(name, ()), (value.filename or "", await value.read()))
            return FormBody(texts, files)
    except (MultiPartException, HTTPException, UnicodeDecodeError, ValueError, KeyError) as problem:
        if isinstance(problem, HttpProblem):
            raise
        raise HttpProblem(400, f"body: not a form ({problem})") from None
