"""Days: whatever is said of them, they are the right ones, and each image of theirs is found under the patterns made for them."""

import datetime
import zoneinfo

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.config.dates import DatesError, check_places, check_use, dated, days_of, resolve_dates, zone_named

TODAY = datetime.date(2026, 11, 21)
ZONES = sorted(zoneinfo.available_timezones())
FORMATS = ["%Y/%m/%d", "%Y-%m-%d", "%Y/%j", "%y%m%d", "%Y/%m/%d/%H", "%Y%m%d-%I%p", "%G-W%V-%u", "%d", "%H", "%%%Y", "%-d.%-m.%Y"]

days = st.dates(datetime.date(1970, 1, 2), datetime.date(2200, 1, 1))
zones = st.sampled_from(ZONES).map(zone_named)
hours = st.timedeltas(datetime.timedelta(0), datetime.timedelta(days=5)).filter(lambda span: span < datetime.timedelta(days=5))


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("2026-11-20", "2026-11-20"),
        ("2026-11-20..2026-11-20", "2026-11-20"),
        ("2026-11-01..2026-11-20", "2026-11-01..2026-11-20"),
        ("today", "2026-11-21"),
        ("yesterday", "2026-11-20"),
        (" Yesterday ", "2026-11-20"),
        ("2026-11-01..today", "2026-11-01..2026-11-21"),
        ("yesterday..today", "2026-11-20..2026-11-21"),
        ("last 1 day", "2026-11-20"),
        ("last 7 days", "2026-11-14..2026-11-20"),
        ("last-7-days", "2026-11-14..2026-11-20"),
        ("last 3660 days", "2016-11-13..2026-11-20"),
        ("2027-01-01", "2027-01-01"),
    ],
)
def test_days_are_what_a_user_means(text, resolved):
    assert resolve_dates(text, TODAY) == resolved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tomorrow",
        "2026-11",
        "20261120",
        "2026-1-1",
        "2026-11-31",
        "2026-11-01...2026-11-02",
        "2026-11-01..",
        "..2026-11-01",
        "2026-11-01,2026-11-02",
        "2026-11-01..last 7 days",
        "today..yesterday",
        "last 0 days",
        "last 3661 days",
        "last days",
        "last week",
        "1969-12-31",
        "0001-01-01",
        "9999-12-31",
        "２０２６-11-20",  # noqa: RUF001  digits, but not ASCII's
        "2026-11-20\n2026-11-21",
    ],
)
def test_what_names_no_days_is_refused(text):
    with pytest.raises(DatesError, match=r"^(days such as|1 to 3660 days between)"):
        resolve_dates(text, TODAY)


@hypothesis_settings(deadline=None)
@given(today=days, count=st.integers(1, 3660))
def test_the_last_days_are_as_many_as_said_and_end_yesterday(today, count):
    if today - datetime.timedelta(days=count) < datetime.date(1970, 1, 1):
        return
    found = days_of(resolve_dates(f"last {count} days", today))
    assert len(found) == count
    assert found[-1:] == days_of(resolve_dates("yesterday", today))


@hypothesis_settings(deadline=None)
@given(first=days, length=st.integers(1, 400), today=days)
def test_a_range_has_each_of_its_days_once_in_order_whatever_day_it_is(first, length, today):
    expected = [first + datetime.timedelta(days=number) for number in range(length)]
    resolved = resolve_dates(f"{expected[0]}..{expected[-1]}", today)
    assert list(days_of(resolved)) == expected
    assert resolve_dates(resolved, today) == resolved


@hypothesis_settings(deadline=None)
@given(day=days, length=st.integers(1, 3), span=hours, zone=zones, formats=st.lists(st.sampled_from(FORMATS), min_size=1))
@example(datetime.date(2026, 3, 29), 1, datetime.timedelta(hours=2), zone_named("Europe/Zurich"), ["%H"])  # 23 hours
@example(datetime.date(2026, 10, 25), 1, datetime.timedelta(hours=24), zone_named("Europe/Zurich"), ["%H"])  # 25 hours
@example(datetime.date(2026, 4, 5), 1, datetime.timedelta(hours=24), zone_named("Australia/Lord_Howe"), ["%H"])  # 24.5 hours
@example(datetime.date(2018, 11, 4), 1, datetime.timedelta(0), zone_named("America/Sao_Paulo"), ["%H"])  # no midnight
@example(datetime.date(2011, 12, 29), 3, datetime.timedelta(hours=24), zone_named("Pacific/Apia"), ["%Y/%m/%d"])  # no 30th
def test_each_moment_of_the_days_is_under_one_of_their_patterns_and_no_other_is(day, length, span, zone, formats):
    """In any zone, in any year, also while clocks change."""
    wanted = tuple(day + datetime.timedelta(days=number) for number in range(length))
    pattern = "raw/" + "/".join(f"{{date:{text}}}" for text in formats) + "/**"
    moments = [datetime.datetime.combine(day, datetime.time(), zone).astimezone(datetime.timezone.utc) + span]
    moments += [moments[0] + datetime.timedelta(minutes=20) * number for number in range(24 * 3)]
    local = [moment.astimezone(zone) for moment in moments]
    under = {"raw/" + "/".join(map(moment.strftime, formats)) + "/**" for moment in local if moment.date() in wanted}
    if not under:
        return
    patterns = dated(pattern, wanted, zone)
    assert under <= set(patterns)
    assert len(set(patterns)) == len(patterns)
    each_day = [patterns_of_day(pattern, one, zone) for one in wanted]
    assert list(patterns) == list(dict.fromkeys(one for some in each_day for one in some))


def patterns_of_day(pattern, day, zone):
    try:
        return dated(pattern, (day,), zone)
    except DatesError:
        return ()


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("UTC", "2026-03-29", 24),
        ("Europe/Zurich", "2026-03-29", 23),
        ("Europe/Zurich", "2026-10-25", 24),  # 25 hours, of which two have the same name
        ("America/Sao_Paulo", "2018-11-04", 23),
        ("Australia/Lord_Howe", "2026-04-05", 24),
        ("Asia/Kathmandu", "2026-04-05", 24),
    ],
)
def test_a_day_has_the_hours_that_its_zones_clocks_show(zone, day, hours):
    found = dated("{date:%Y-%m-%d/%H}", days_of(day), zone_named(zone))
    assert len(found) == hours
    assert {name.partition("/")[0] for name in found} == {day}
    assert dated("{date}", days_of(day), zone_named(zone)) == (day,)


def test_days_that_a_format_does_not_tell_apart_are_listed_once():
    assert dated("{date:%Y/%m}/**", days_of("2026-10-30..2026-11-20"), zone_named("UTC")) == ("2026/10/**", "2026/11/**")


def test_what_only_looks_like_a_place_for_days_stays_as_it_is():
    pattern = "{dates}/{Date}/{date:%Y/{x}/}{/[{]date}"
    check_use([pattern], "")
    assert dated(pattern, days_of("2026-11-20"), zone_named("UTC")) == (pattern,)


@hypothesis_settings(deadline=None)
@given(st.text(st.characters(), max_size=12) | st.text(st.sampled_from("%YmdHMSfzZjcxXpIeEOQ-_#019 :"), max_size=8))
def test_any_format_is_filled_in_or_refused_in_one_line(text):
    pattern = f"{{date:{text}}}"
    try:
        check_places(pattern)
    except DatesError as err:
        assert len(str(err).splitlines()) == 1
    else:
        assert len(dated(pattern, days_of("2026-11-20"), zone_named("UTC"))) <= 24


@pytest.mark.slow
@hypothesis_settings(deadline=None)
@given(st.text(max_size=40) | st.sampled_from(ZONES).map(lambda name: name[:-1]))
@example("")
@example("/etc/localtime")
@example("../zoneinfo/UTC")
@example("Europe")
@example("x" * 5000)
@example("a\0b")
@example("\ud800")
def test_any_text_is_a_zone_or_refused_in_one_line(name):
    try:
        assert zone_named(name).utcoffset(datetime.datetime(2026, 11, 20)) is not None
    except DatesError as err:
        assert str(err).startswith("a time zone such as ")
        assert len(str(err).splitlines()) == 1
