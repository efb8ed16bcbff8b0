"""Who calls, and what it may do: API keys as users of the fair share, rates of calls, limits of waiting jobs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelpool.actors.config.serve_section import HASHED, ServeSection
from modelpool.actors.http.service.held_shares import HeldShare
from modelpool.actors.http.service.problems import HttpProblem, too_many

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

#: how long a caller with too many jobs is asked to wait: jobs end within seconds to minutes
QUEUE_RETRY_SECONDS = 5.0
_MINUTE_SECONDS = 60.0
#: key of the caller in the scope of a call
CALLER = "modelpool.caller"


@dataclass(slots=True)
class CallState:
    """What becomes known of a call while it is answered: whether its client has gone, and what it holds."""

    is_gone: bool = False
    #: decoded pixels that the call holds
    pixels: HeldShare | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `user` is None if the server has no keys: jobs then have the user that they set, or the server's.
    `call` is the state of this call."""

    user: str | None = None
    call: CallState = field(default_factory=CallState, compare=False, repr=False)

    @property
    def owner(self) -> str:
        """The owner of submissions: callers see their own only."""
        return self.user or ""


@dataclass(slots=True)
class _Bucket:
    """Calls that a user may make at once, as of `at`."""

    calls: float
    at: float


def caller_of(connection: HTTPConnection) -> Caller:
    """Return who makes a call."""
    caller = connection.scope[CALLER]
    assert isinstance(caller, Caller), "the gate has identified the caller"
    return caller


class AccessControl:
    """Identifies callers and limits their calls. Used from one thread."""

    def __init__(self, settings: ServeSection, now: Callable[[], float]) -> None:
        """`now` returns seconds of a monotonic clock."""
        self._users = {_hash_of(key): user for user, key in settings.keys.items()}
        self._per_minute = settings.requests_per_minute
        self._queued_jobs = settings.queued_jobs
        self._now = now
        #: by owner: only owners with keys, so that their number is bounded
        self._buckets: dict[str, _Bucket] = {}

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return who calls, by `Authorization: Bearer KEY`, `Authorization: Basic` with the key as the password, or
        `X-API-Key`. Raises HttpProblem (401).
        """
        if not self._users:
            return Caller()
        key = _key_in(headers)
        found = hashlib.sha256(key.encode()).hexdigest() if key else ""
        # every key is compared, in constant time
        users = [user for known, user in self._users.items() if hmac.compare_digest(known, found)]
        if not users:
            message = "the API key is unknown" if key else "an API key is required: Authorization: Bearer KEY"
            raise HttpProblem(401, message, {"WWW-Authenticate": 'Basic realm="modelpool"'})
        return Caller(users[0])

    def admit_call(self, caller: Caller) -> None:
        """Count a call. Raises HttpProblem (429) if the caller made too many within the last minute."""
        if not self._per_minute:
            return
        now, rate = self._now(), self._per_minute / _MINUTE_SECONDS
        bucket = self._buckets.setdefault(caller.owner, _Bucket(self._per_minute, now))
        bucket.calls = min(self._per_minute, bucket.calls + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.calls < 1:
            raise too_many(
                f"more than {self._per_minute} calls in a minute", (1 - bucket.calls) / rate, "requests_per_minute"
            )
        bucket.calls -= 1

    def admit_jobs(self, unfinished: int, new: int) -> None:
        """Check that a caller with `unfinished` jobs may submit `new` ones. Raises HttpProblem: 429 if it may later."""
        check_number(new, self._queued_jobs)
        if unfinished + new > self._queued_jobs:
            message = f"{unfinished} jobs wait or run, and {new} more exceed the limit of {self._queued_jobs}"
            raise too_many(message, QUEUE_RETRY_SECONDS, "queued_jobs")


def check_number(new: int, most: int) -> None:
    """Raise HttpProblem for more new jobs than a caller may have at a time."""
    if new > most:
        raise HttpProblem(400, f"requests: found {new}, expected up to {most} at a time", limit="queued_jobs")


def _hash_of(key: str) -> str:
    return key.removeprefix(HASHED) if key.startswith(HASHED) else hashlib.sha256(key.encode()).hexdigest()


def _key_in(headers: Mapping[str, str]) -> str:
    """Return the key in the headers (names in lower case); "" if there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return headers.get("x-api-key", "")
