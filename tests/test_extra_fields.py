"""What is said of an image beyond its name: it comes out as it went in where it is small, and never breaks or swells a row."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.extra_fields import LEFT_OUT, extra_text
from pipeline.records import DeadLetter, ImageRef, dead_letter_row, row_bytes

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
values = st.recursive(scalars, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=70), part, max_size=4))


def nested(depth):
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"tags": ["a", {"b": [1]}]}, ..., id="lists and sections"),
        pytest.param({"a": nested(5), "b": nested(4)}, {"b": nested(4), "...": 1}, id="too deep, and as deep as may be"),
        pytest.param({"a": "x" * 1990}, ..., id="as large as may be"),
        pytest.param({"a": "x" * 1993}, {"...": 1}, id="larger"),
        pytest.param({"a": "ä" * 1500, "b": "x" * 1500, "c": "y" * 1500}, {"b": "x" * 1500, "...": 2}, id="large together"),
        pytest.param({"k" * 2000: 1, "": 2}, {"": 2, "...": 1}, id="longer name, and none"),
        pytest.param({"a": math.nan, "b": [math.inf]}, {"a": None, "b": [None]}, id="what JSON cannot say"),
        pytest.param({"a": 2**63 - 1, "b": -(2**63), "c": 2**63}, {"a": 2**63 - 1, "b": -(2**63), "c": str(2**63)}, id="64 bits"),
        pytest.param({"a": 10**4000}, {"...": 1}, id="endless number"),
        pytest.param({"a": b"x", "b": {1: 2}, 3: 4}, {"...": 3}, id="no JSON at all"),
        pytest.param({"\ud800": "\udc80"}, ..., id="no Unicode"),
        pytest.param({"a": 1, "...": 5}, ..., id="left out before"),
        pytest.param({"...": "dots"}, {}, id="a field of that name"),
    ],
)
def test_fields_come_out_as_they_went_in_or_are_counted(fields, extra):
    assert json.loads(extra_text(fields) or "{}") == (fields if extra is ... else extra)


@pytest.mark.slow
@hypothesis_settings(deadline=None)
@given(st.dictionaries(st.text(max_size=70), values, max_size=50))
@example({"...": True})
def test_whatever_is_said_the_row_stays_one_small_line_of_json(fields):
    ref = ImageRef("a.jpg", extra=extra_text(fields))
    line = row_bytes(dead_letter_row(DeadLetter(ref, "read", "not_found", "x")))
    assert len(line) < 2500
    assert b"\n" not in line
    row = json.loads(line, parse_constant=pytest.fail)
    again = json.loads(ref.extra or "{}")
    assert row.get("extra", {}) == again
    assert extra_text(again) == ref.extra
    assert len([name for name in again if name != LEFT_OUT]) + again.get(LEFT_OUT, 0) >= len(fields.keys() - {LEFT_OUT})
