"""[serve]: the settings of `modelpool serve`: address, folder, users' keys and limits. Torch-free, ray-free."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from modelpool.actors.config.output_address import local_folder
from modelpool.actors.request.bounds import (
    CALLER_CALL_PIXELS,
    CALLER_HELD_PIXELS,
    CALLER_PROMPT_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
)
from modelpool.actors.request.number_fields import Whole
from modelpool.actors.request.qos import MAX_PRIORITY, check_user
from modelpool.actors.request.strict import Strict, no_truth_value
from modelpool.pool.values.core.errors import UserError, counted, parse_bytes, unusable_field

#: shortest key and secret: 16 characters of base 64 have 96 bits
MIN_KEY_LENGTH = 16
MAX_PORT = 65535
#: prefix of a key of which only the hash is in the file
HASHED = "sha256:"
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d{1,5})?")
_PRIORITY = Whole(-MAX_PRIORITY, MAX_PRIORITY)
_NUMBERS = (
    *("port", "requests_per_minute", "queued_jobs", "kept_submissions", "connections", "connections_per_address"),
    *(
        "prompt_characters",
        "call_pixels",
        "held_pixels",
        "head_seconds",
        "body_seconds",
        "idle_seconds",
        "unread_seconds",
    ),
)


class ServeSection(Strict):
    """The HTTP interfaces.

    host, port      address to listen on; other addresses than loopback require keys
    folder          local folder for outputs and uploaded images; by default `[output] folder` if that is a folder, else
                    ./outputs
    keys            [serve.keys]: API keys by user, at least 16 characters, or "sha256:" and the hash of one. Without
                    keys, everybody who reaches the address is one user
    priorities      [serve.priorities]: the priority of the jobs of users with keys. Their requests may ask for a lower
                    one, and not for a higher one; and for a deadline at a lower one only, since jobs near their
                    deadline go before others of their priority. If there are some, users without one have 0; otherwise
                    requests may have any priority and deadline
    requests_per_minute  of each user; 0: unlimited
    queued_jobs     jobs of each user that may wait or run at a time
    upload_bytes    largest body of a request, such as "64MiB"
    batch           size of passes of requests without one: 1, "auto", or "adaptive", with which the last bits of two
                    equal requests may differ; jobs in the pool's journal have 1 instead of that
    prompt_characters  of a prompt, a negative prompt, or a text for a part of the image; all of a request
                    may have twice as many
    url_hosts       hosts ("example.org", "example.org:8443") from which images are fetched for callers, and to which
                    webhooks are sent; by default none
    webhook_secret  with which webhooks are signed, at least 16 characters; required for webhooks
    call_pixels     of all decoded images of a call: 100 million are 95 images of 1024 x 1024
    held_pixels     of each user: decoded images of calls, and of jobs that wait or run; four times as many of all users
    kept_submissions  ended submissions that the server remembers; files of outputs stay
    openai_response_format  what images of the OpenAI interface have if a call names no `response_format`: "both" (`url`
                    and `b64_json`), "url" (as DALL-E 2 and 3) or "b64_json" (as gpt-image). Clients read either of
                    them, and few ask for it
    connections     open connections in all, below the number of files that the process may open. Those that only wait
                    are closed for new ones, the oldest first
    connections_per_address  open connections of one address other than this machine's; 0: as many as in all
    trusted_proxies  addresses of proxies, which have as many connections as there may be
    head_seconds    time for the head of a call to arrive, from its first byte
    body_seconds    interval in which a body that arrives must have 1 KiB for each second
    idle_seconds    how long a connection without a call is kept
    unread_seconds  how long a peer may read nothing of what it is sent
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    folder: Path | None = None
    keys: dict[str, str] = Field(default_factory=dict, repr=False)
    priorities: dict[str, int] = Field(default_factory=dict)
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    queued_jobs: Annotated[int, Field(ge=1)] = 10000
    upload_bytes: str | int = "64MiB"
    batch: Literal[1, "auto", "adaptive"] = 1
    prompt_characters: Annotated[int, Field(ge=1, le=MAX_PROMPT_CHARACTERS)] = CALLER_PROMPT_CHARACTERS
    url_hosts: tuple[str, ...] = ()
    webhook_secret: str = Field(default="", repr=False)
    call_pixels: Annotated[int, Field(ge=1, le=1 << 32)] = CALLER_CALL_PIXELS
    held_pixels: Annotated[int, Field(ge=1, le=1 << 34)] = CALLER_HELD_PIXELS
    kept_submissions: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    openai_response_format: Literal["both", "url", "b64_json"] = "both"
    connections: Annotated[int, Field(ge=16, le=1_000_000)] = 4096
    connections_per_address: Annotated[int, Field(ge=0, le=1_000_000)] = 512
    trusted_proxies: tuple[str, ...] = ()
    head_seconds: Annotated[float, Field(ge=1, le=3600)] = 20.0
    body_seconds: Annotated[float, Field(ge=1, le=3600)] = 10.0
    # clients and proxies that keep connections for a minute, as most do, then never send a call to a closing one
    idle_seconds: Annotated[float, Field(ge=1, le=3600)] = 75.0
    unread_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0

    _no_truth_value = field_validator(*_NUMBERS, "upload_bytes", mode="before")(no_truth_value)

    @field_validator("folder", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        return local_folder(value, "folder") if isinstance(value, str | Path) else value

    @field_validator("upload_bytes")
    @classmethod
    def _upload_bytes(cls, value: str | int) -> str | int:
        try:
            parse_bytes(str(value))
        except UserError:
            raise unusable_field("upload_bytes", value, "a size such as 64MiB") from None
        return value

    @field_validator("keys")
    @classmethod
    def _keys(cls, value: dict[str, str]) -> dict[str, str]:
        for user, key in value.items():
            check_user(user)
            hashed = key.removeprefix(HASHED)
            usable = re.fullmatch("[0-9a-f]{64}", hashed) if hashed != key else len(key) >= MIN_KEY_LENGTH
            if not usable or not key.isascii() or not key.isprintable():
                expected = f"{MIN_KEY_LENGTH} or more ASCII characters, or {HASHED} and 64 hexadecimal digits"
                raise unusable_field(f"keys.{user}", f"a key of {counted(len(key), 'character')}", expected)
        return value

    @field_validator("priorities", mode="before")
    @classmethod
    def _priorities(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise unusable_field("priorities", value, "a table of users and their priorities")
        return {user: _PRIORITY.parse(f"priorities.{user}", priority) for user, priority in value.items()}

    @model_validator(mode="after")
    def _users_with_priorities(self) -> ServeSection:
        for user in self.priorities:
            if user not in self.keys:
                raise unusable_field(f"priorities.{user}", user, "a user with a key in [serve.keys]")
        return self

    def priority_of(self, user: str | None) -> int | None:
        """Return the priority of a user's jobs, above which their requests may not go; None if any is permitted."""
        return self.priorities.get(user, 0) if self.priorities and user is not None else None

    @field_validator("url_hosts")
    @classmethod
    def _url_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            port = host.partition(":")[2]
            if not _HOST_NAME.fullmatch(host) or not 0 < int(port or 80) <= MAX_PORT:
                raise unusable_field("url_hosts", host, "names of hosts such as example.org or example.org:8443")
        return tuple(host.lower() for host in value)

    @field_validator("trusted_proxies")
    @classmethod
    def _trusted_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise unusable_field("trusted_proxies", address, "addresses such as 10.0.0.7") from None
        return tuple(str(ipaddress.ip_address(address)) for address in value)

    @field_validator("webhook_secret")
    @classmethod
    def _webhook_secret(cls, value: str) -> str:
        if 0 < len(value) < MIN_KEY_LENGTH:
            raise unusable_field(
                "webhook_secret", counted(len(value), "character"), f"{MIN_KEY_LENGTH} or more characters"
            )
        return value

    @property
    def upload_bound_bytes(self) -> int:
        """`upload_bytes` in bytes."""
        return parse_bytes(str(self.upload_bytes))

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check_exposure(self) -> None:
        """Raise UnusableField for an address that other machines reach, without keys."""
        if not self.is_loopback and not self.keys:
            raise unusable_field("host", self.host, "a loopback address such as 127.0.0.1, or keys in [serve.keys]")
