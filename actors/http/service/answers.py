"""JSON answers that may be large: built without holding up other calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from starlette.requests import Request

JSON_TYPE = "application/json"
#: as FastAPI writes JSON
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def json_answer(value: Any) -> Response:
    """Return a JSON value with long texts, such as images, as an answer. It is written in a thread, text by text: one
    call of the encoder would keep the interpreter from the loop all the while."""
    return Response(await asyncio.to_thread(_encoded, value), media_type=JSON_TYPE)


def json_parts(request: Request, pieces: Iterable[str]) -> StreamingResponse:
    """Return an answer of many parts, each of which is small, as a client reads it: neither the time nor the memory for
    all of them is taken at once. Between two steps of the loop, one part is made for all answers of the server."""
    making: asyncio.Lock = request.scope["app"].state.making_parts
    left = iter(pieces)

    async def encoded() -> AsyncIterator[bytes]:
        while True:
            async with making:
                piece = next(left, None)
                await asyncio.sleep(0)
            if piece is None:
                return
            yield piece.encode()

    return StreamingResponse(encoded(), media_type=JSON_TYPE)


def json_text(value: Any) -> str:
    """Return a JSON value as the server writes it."""
    return _ENCODER.encode(value)


def object_parts(fields: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a JSON object field by field; the values are JSON texts."""
    begin = "{"
    for name, text in fields:
        yield f"{begin}{json_text(name)}:{text}"
        begin = ","
    yield "{}" if begin == "{" else "}"


def list_parts(texts: Iterable[str]) -> Iterator[str]:
    """Yield a JSON list value by value; the values are JSON texts."""
    begin = "["
    for text in texts:
        yield f"{begin}{text}"
        begin = ","
    yield "[]" if begin == "[" else "]"


def _encoded(value: Any) -> bytes:
    return "".join(_ENCODER.iterencode(value)).encode()
