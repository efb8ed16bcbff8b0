"""Errors of a call, and their form in each interface."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from modelpool.actors.http.service.shown_messages import bounded_message
from modelpool.actors.request.expected_words import expected_words
from modelpool.pool.values.core.errors import UserError

#: beginning of the paths of an interface with a form of errors of its own
OPENAI_PATH, NATIVE_PATH = "/v1/", "/api/"
A1111_PATHS = ("/sdapi/", "/controlnet/")
#: calls of ComfyUI, by the first part of their path, which also exist below NATIVE_PATH
COMFY_CALLS = frozenset(
    (
        *("prompt", "queue", "interrupt", "history", "view", "upload", "object_info", "models", "embeddings"),
        *("system_stats", "free", "features", "extensions", "experiment", "users", "settings"),
    )
)
#: names of statuses in errors of the OpenAI API
_OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
#: after which a server with a full disk may be called again
_DISK_RETRY_SECONDS = 10
_OF_DISKS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE, errno.EMFILE, errno.ENFILE)
)
#: the field at the beginning of a message
_FIELD = re.compile(r"([a-z_][\w.]*): ")
#: the field of a name that does not exist
_UNKNOWN = re.compile(r"unknown (model|sampler|schedule) '")


class HttpProblem(UserError):
    """A call that is refused with `status`, and with `headers` in the answer; by a `limit`, if it has a name here."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit
        self.status = status
        self.headers = dict(headers or {})


def too_many(message: str, retry_after_seconds: float, limit: str) -> HttpProblem:
    """Return the refusal of a call that would succeed after some time, by a `limit`."""
    return HttpProblem(429, message, {"Retry-After": str(max(1, round(retry_after_seconds + 0.5)))}, limit)


def not_stored(message: str) -> HttpProblem:
    """Return the refusal of a call because this server cannot write to its disk, which is no fault of the caller."""
    return HttpProblem(503, message, {"Retry-After": str(_DISK_RETRY_SECONDS)})


def of_a_disk(error: OSError) -> bool:
    """Whether an error says that a disk is full or broken, or that this process may open no more files."""
    return error.errno in _OF_DISKS


def problem_body(path: str, status: int, message: str) -> dict[str, Any]:
    """Return the body of the answer to a refused call of `path`, as the clients of that interface expect it."""
    message = bounded_message(message)
    if path.startswith(OPENAI_PATH):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        named = _FIELD.match(message) or _UNKNOWN.match(message)
        return {"error": {"message": message, "type": kind, "param": named and named[1], "code": None}}
    if path.startswith(A1111_PATHS):
        return {"error": "Error", "detail": message, "body": "", "errors": message}
    if path.startswith(NATIVE_PATH) and path.removeprefix(NATIVE_PATH).partition("/")[0] not in COMFY_CALLS:
        return {"error": {"status": status, "message": message}}
    return {"error": {"type": "error", "message": message, "details": "", "extra_info": {}}, "node_errors": {}}


def no_route(method: str, path: str, status: int) -> str:
    """Return the message for a call of an address that there is not (404), or not with this method (405)."""
    return f"{path} does not exist" if status == 404 else f"{path} cannot be called with {method}"


def wrong_parameter(problem: Mapping[str, Any]) -> str:
    """Return the message for the first of pydantic's errors about a parameter of an address."""
    name = str(problem["loc"][-1])
    if problem["type"] == "missing":
        return f"{name}: missing; this parameter is required"
    expected = expected_words(str(problem["type"]), str(problem["msg"]))
    return f"{name}: found {str(problem.get('input'))[:100]!r}, expected {expected}"
