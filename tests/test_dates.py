"""Days: whatever is said of them, they are the right ones, and each image of theirs is found under the patterns made for them."""

import datetime

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.config.dates import check_places, check_use, dated, days_of, resolve_dates

TODAY = datetime.date(2026, 11, 21)
FORMATS = ["%Y/%m/%d", "%Y-%m-%d", "%Y/%j", "%y%m%d", "%G-W%V-%u", "%d", "%%%Y", "%-d.%-m.%Y"]

days = st.dates(datetime.date(1970, 1, 2), datetime.date(2200, 1, 1))


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("2026-11-01..2026-11-20", "2026-11-01..2026-11-20"),
        ("today", "2026-11-21"),
        (" Yesterday ", "2026-11-20"),
        ("2026-11-01..today", "2026-11-01..2026-11-21"),
        ("yesterday..today", "2026-11-20..2026-11-21"),
        ("last 3660 days", "2016-11-13..2026-11-20"),
    ],
)
def test_days_are_what_a_user_means(text, resolved):
    assert resolve_dates(text, TODAY) == resolved


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["", "tomorrow", "2026-11", "2026-11-31", "2026-11-01..", "2026-11-01..last 7 days"], "days such as"),
        (["２０２６-11-20", "2026-11-20\n2026-11-21"], "days such as"),  # noqa: RUF001  digits, but not ASCII's
        (["today..yesterday", "last 0 days", "last 3661 days", "1969-12-31", "9999-12-31"], "1 to 3660 days between"),
    ],
    ids=["no days", "no text of days", "too many, too early or too late"],
)
def test_what_names_no_days_is_refused(texts, expected):
    for text in texts:
        with pytest.raises(ValueError, match=f"^{expected}"):
            resolve_dates(text, TODAY)


@hypothesis_settings(deadline=None)
@given(first=days, length=st.integers(1, 400), today=days)
def test_a_range_has_each_of_its_days_once_in_order_whatever_day_it_is(first, length, today):
    expected = [first + datetime.timedelta(days=number) for number in range(length)]
    resolved = resolve_dates(f"{expected[0]}..{expected[-1]}", today)
    assert list(days_of(resolved)) == expected
    assert resolve_dates(resolved, today) == resolved


@hypothesis_settings(deadline=None)
@given(first=days, length=st.integers(1, 9), formats=st.lists(st.sampled_from(FORMATS), min_size=1))
def test_each_of_the_days_has_the_pattern_that_its_name_has(first, length, formats):
    wanted = [first + datetime.timedelta(days=number) for number in range(length)]
    pattern = "raw/" + "/".join(f"{{date:{text}}}" for text in formats) + "/**"
    expected = ["raw/" + "/".join(map(day.strftime, formats)) + "/**" for day in wanted]
    assert list(dated(pattern, wanted)) == list(dict.fromkeys(expected))


def test_what_only_looks_like_a_place_for_days_stays_as_it_is():
    pattern = "{dates}/{Date}/{date:%Y/{x}/}{/[{]date}"
    check_use([pattern], "")
    assert dated(pattern, days_of("2026-11-20")) == (pattern,)


@hypothesis_settings(deadline=None)
@given(st.text(st.characters(), max_size=12) | st.text(st.sampled_from("%YmdHMSfzZjcxXpIeEOQ-_#019 :"), max_size=8))
def test_any_format_is_filled_in_or_refused_in_one_line(text):
    pattern = f"{{date:{text}}}"
    try:
        check_places(pattern)
    except ValueError as err:
        assert len(str(err).splitlines()) == 1
    else:
        assert len(dated(pattern, days_of("2026-11-20"))) == 1


@pytest.mark.parametrize("text", ["%H", "%Y/%m/%d/%I%p", "%Y%m%d-%M", "%X", "%s"])
def test_a_day_has_no_hours(text):
    with pytest.raises(ValueError, match=r"^no directive finer than days in {date:…}"):
        check_places(f"raw/{{date:{text}}}/**")
