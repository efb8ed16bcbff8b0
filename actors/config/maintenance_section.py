"""[maintenance]: when and how far a pool may be disrupted on purpose: by scaling down, drains and restarts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator

from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import unusable_field

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_EXPECTED = '"DAYS HH:MM-HH:MM", such as "sat,sun 22:00-04:00", "mon-fri 08:00-18:00" or "daily 01:00-05:00"'
_EXPECTED_DATES = f'{_EXPECTED}, or dates such as "2026-12-20..2027-01-02"'
_TIMES = re.compile(r"(?P<days>[a-z,-]+) (?P<begin>\d\d:\d\d)-(?P<end>\d\d:\d\d)")
_DATES = re.compile(r"(\d{4}-\d\d-\d\d)\.\.(\d{4}-\d\d-\d\d)")


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Times of a week, or days of a calendar, in local time. One that begins at the time of its end lasts a day.

    days          of the week on which it begins, 0 is Monday
    begin, end    minutes of the day; an end before the beginning is on the next day
    first, last   the days of the calendar; None: every week
    """

    text: str
    days: frozenset[int] = frozenset()
    begin: int = 0
    end: int = 0
    first: date | None = None
    last: date | None = None

    def covers(self, now: datetime) -> bool:
        """Return whether a local time is in it."""
        if self.first is not None and self.last is not None:
            return self.first <= now.date() <= self.last
        minute, day = 60 * now.hour + now.minute, now.weekday()
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        yesterday = (now - timedelta(days=1)).weekday()
        return (day in self.days and minute >= self.begin) or (yesterday in self.days and minute < self.end)


class MaintenanceSection(Strict):
    """Limits of voluntary disruptions: nodes that are given up, drained, and workers that are restarted. Operators
    override them with --force; losses, notices of a provider and the end of `max_cost` do not ask.

    max_unavailable  nodes that may be drained, given up or about to end at a time; by default any number
    windows          times in which the pool may be disrupted; by default always
    exclusions       times in which it may not, also in windows
    timezone         of these times, such as "Europe/Berlin"
    """

    max_unavailable: Annotated[int, Field(ge=1)] | None = None
    windows: tuple[str, ...] = ()
    exclusions: tuple[str, ...] = ()
    timezone: str = "UTC"

    @field_validator("windows")
    @classmethod
    def _windows(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if time_span(text, "windows", _EXPECTED).first is not None:
                raise unusable_field("windows", text, _EXPECTED)
        return texts

    @field_validator("exclusions")
    @classmethod
    def _exclusions(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            time_span(text, "exclusions", _EXPECTED_DATES)
        return texts

    @field_validator("timezone")
    @classmethod
    def _timezone(cls, name: str) -> str:
        try:
            _zone(name)
        except (KeyError, OSError, ValueError):  # unknown names, and values that are no names
            raise unusable_field(
                "timezone", name, 'the name of a time zone, such as "Europe/Berlin" or "UTC"'
            ) from None
        return name

    def obstacle(self, unix_seconds: float) -> str:
        """Return why the pool may not be disrupted at this time; "" if it may."""
        if not self.windows and not self.exclusions:
            return ""
        now = datetime.fromtimestamp(unix_seconds, _zone(self.timezone))
        for text in self.exclusions:
            if time_span(text, "exclusions", _EXPECTED_DATES).covers(now):
                return f"the pool is not disrupted now: {text} ({self.timezone}) is excluded"
        if self.windows and not any(time_span(text, "windows", _EXPECTED).covers(now) for text in self.windows):
            return f"it is outside of the maintenance windows: {'; '.join(self.windows)} ({self.timezone})"
        return ""


def _zone(name: str) -> tzinfo:
    """Return a time zone. UTC needs no database of zones, which small containers lack."""
    return UTC if name == "UTC" else ZoneInfo(name)


def time_span(text: str, field: str, expected: str) -> TimeSpan:
    """Parse a window. Raises UnusableField."""
    if (dates := _DATES.fullmatch(text.strip())) is not None:
        try:
            first, last = (date.fromisoformat(part) for part in dates.groups())
        except ValueError:
            raise unusable_field(field, text, expected) from None
        if first > last:
            raise unusable_field(field, text, "dates in their order")
        return TimeSpan(text, first=first, last=last)
    found = _TIMES.fullmatch(" ".join(text.lower().split()))
    days = None if found is None else _days(found["days"])
    if found is None or days is None:
        raise unusable_field(field, text, expected)
    minutes = []
    for part in (found["begin"], found["end"]):
        hours, rest = int(part[:2]), int(part[3:])
        if rest > 59 or 60 * hours + rest > 24 * 60:
            raise unusable_field(field, text, "times from 00:00 to 24:00")
        minutes.append(60 * hours + rest)
    return TimeSpan(text, days, minutes[0], minutes[1])


def _days(text: str) -> frozenset[int] | None:
    """Return the days of the week that a text names; None if it names others."""
    if text == "daily":
        return frozenset(range(7))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            return None
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % 7 + 1 if dash else 1
        found |= {(begin + offset) % 7 for offset in range(count)}
    return frozenset(found)
