"""`Webhooks`: tells the address of a caller, signed and with retries, that its submission has ended.

The header `X-Modelpool-Signature: t=SECONDS,v1=HEX` has the time of the attempt and the HMAC-SHA256 of
"SECONDS.BODY". A receiver computes it again, compares in constant time, and refuses old times.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from modelpool.actors.http.service.problems import too_many

logger = logging.getLogger(__name__)

SIGNATURE_HEADER = "X-Modelpool-Signature"
#: attempts, the seconds before the second one (doubled before each other one), and of each one
MOST_ATTEMPTS, FIRST_WAIT_SECONDS, ATTEMPT_SECONDS = 6, 1.0, 10.0
#: webhooks that wait for the end of their submission or for their next attempt
MOST_PENDING = 10_000


def signature_of(secret: str, at: int, body: bytes) -> str:
    """Return the value of the header for `body` at a time in Unix seconds."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class Webhooks:
    """Belongs to one event loop."""

    def __init__(self, secret: str, first_wait_seconds: float = FIRST_WAIT_SECONDS) -> None:
        self._secret = secret
        self._first_wait_seconds = first_wait_seconds
        self._pending = 0

    def reserve(self) -> None:
        """Reserve the place of one webhook. Raises HttpProblem (429)."""
        if self._pending >= MOST_PENDING:
            raise too_many(f"{self._pending} webhooks are pending", FIRST_WAIT_SECONDS, "webhooks")
        self._pending += 1

    def release(self) -> None:
        """Give up a reserved place."""
        self._pending -= 1

    async def deliver(self, url: str, content: Mapping[str, Any]) -> bool:
        """Send `content` until the receiver answers with a status of 2xx; return whether it did. Redirects are not
        followed: the address was permitted, not what it refers to.
        """
        import httpx2

        body = json.dumps(content).encode()
        async with httpx2.AsyncClient(timeout=ATTEMPT_SECONDS, follow_redirects=False, trust_env=False) as client:
            for attempt in range(MOST_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(self._first_wait_seconds * 2 ** (attempt - 1))
                headers = {
                    "Content-Type": "application/json",
                    SIGNATURE_HEADER: signature_of(self._secret, int(time.time()), body),
                }
                try:
                    answer = await client.post(url, content=body, headers=headers)
                except (httpx2.HTTPError, httpx2.InvalidURL) as problem:
                    reason = str(problem) or type(problem).__name__
                else:
                    if answer.is_success:
                        return True
                    reason = f"status {answer.status_code}"
                logger.warning("webhook %s, attempt %d of %d: %s", url, attempt + 1, MOST_ATTEMPTS, reason)
        return False
