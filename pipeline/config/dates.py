"""Parses the days of a job, and fills them into the patterns of its inputs.

Callers pass today's date. The text of a `ValueError` is what was expected.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

from pipeline.errors import ConfigError

_EXPECTED = "days such as 2026-11-20, 2026-11-01..2026-11-20, today, yesterday or 'last 7 days'"
_EXPECTED_PLACE = "{date}, or strftime's directives in it such as {date:%Y/%m/%d}"
_DAY = r"\d{4}-\d\d-\d\d|today|yesterday"
_DAYS = re.compile(rf"({_DAY})(?:\.\.({_DAY}))?|last[ _-](\d{{1,4}})[ _-]days?", re.ASCII | re.IGNORECASE)
_PLACE = re.compile(r"\{date(?::([^{}]*))?\}")
_ISO = "%Y-%m-%d"
_FIRST, _LAST = datetime.date(1970, 1, 1), datetime.date(2999, 12, 31)
_MOST_DAYS = 3660  # ten years; each day is listed separately


def resolve_dates(text: str, today: datetime.date) -> str:
    """The days of a text as `first..last`, or as one day.

    "last 7 days" ends yesterday, since today is not over.

    Raises:
      ValueError: The text names no days.

    >>> today = datetime.date(2026, 11, 21)
    >>> resolve_dates("last 7 days", today)
    '2026-11-14..2026-11-20'
    >>> resolve_dates("2026-11-01..yesterday", today), resolve_dates("yesterday", today)
    ('2026-11-01..2026-11-20', '2026-11-20')
    """
    found = _DAYS.fullmatch(text.strip())
    if not found:
        raise ValueError(_EXPECTED)
    first, last, count = found.groups()
    yesterday = today - datetime.timedelta(days=1)
    if count:
        start, end = today - datetime.timedelta(days=int(count)), yesterday
    else:
        start = _day(first, today)
        end = _day(last, today) if last else start
    if not _FIRST <= start <= end <= _LAST or (end - start).days >= _MOST_DAYS:
        raise ValueError(f"1 to {_MOST_DAYS} days between {_FIRST} and {_LAST}, the first one first")
    return str(start) if start == end else f"{start}..{end}"


def days_of(resolved: str) -> tuple[datetime.date, ...]:
    """Each day of a result of `resolve_dates`.

    >>> [str(day) for day in days_of("2026-02-27..2026-03-01")]
    ['2026-02-27', '2026-02-28', '2026-03-01']
    """
    first, _, last = resolved.partition("..")
    start, end = datetime.date.fromisoformat(first), datetime.date.fromisoformat(last or first)
    return tuple(start + datetime.timedelta(days=number) for number in range((end - start).days + 1))


def days_flag(flag: str, text: str) -> tuple[float, float]:
    """When the days that a flag names begin and end (UTC), in seconds since the epoch.

    Raises:
      ConfigError: It names no days.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    try:
        days = days_of(resolve_dates(text, now.date()))
    except ValueError as err:
        raise ConfigError(f"{flag}: expected {err}, got {text}") from err
    midnights = (days[0], days[-1] + datetime.timedelta(days=1))
    first, end = (datetime.datetime.combine(day, datetime.time(), now.tzinfo).timestamp() for day in midnights)
    return first, end


def check_places(pattern: str) -> str:
    """Returns a pattern whose places for a day are valid.

    Raises:
      ValueError: A place has a wrong format, or one finer than days.
    """
    start = datetime.datetime(2026, 11, 20, 0, tzinfo=datetime.timezone.utc)
    end = start + datetime.timedelta(days=1) - datetime.timedelta.resolution
    for text in filter(None, _PLACE.findall(pattern)):
        try:
            first, last = (moment.strftime(text.replace("%%", "")) for moment in (start, end))
        except ValueError as err:
            raise ValueError(_EXPECTED_PLACE) from err
        if "%" in first:  # strftime keeps unknown directives
            raise ValueError(_EXPECTED_PLACE)
        if first != last:
            raise ValueError("no directive finer than days in {date:…} (%m is the month, %M the minute; * matches any)")
    return pattern


def check_use(patterns: Sequence[str], days: str) -> None:
    """Checks that each pattern has a place for days if there are days, and none has one otherwise.

    Raises:
      ValueError: A pattern lacks a place, or has one without days.
    """
    for pattern in patterns:
        has_place = _PLACE.search(pattern) is not None
        if days and not has_place:
            raise ValueError(f"none, or {{date:%Y/%m/%d}} in input {pattern}")
        if not days and has_place:
            raise ValueError(f"{_EXPECTED}, since input {pattern} has a place for them")


def dated(pattern: str, days: Sequence[datetime.date]) -> tuple[str, ...]:
    """The patterns of all days, in order, each once; a pattern may have any number of places.

    >>> dated("raw/{date:%Y/%m}/{date:%d}-*.jpg", days_of("2026-11-30..2026-12-01"))
    ('raw/2026/11/30-*.jpg', 'raw/2026/12/01-*.jpg')
    """
    return tuple(dict.fromkeys(_PLACE.sub(lambda found: day.strftime(found[1] or _ISO), pattern) for day in days))  # noqa: B023


def _day(text: str, today: datetime.date) -> datetime.date:
    if text.lower() in ("today", "yesterday"):
        return today - datetime.timedelta(days=text.lower() == "yesterday")
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as err:
        raise ValueError(f"{_EXPECTED}; {err}") from err
