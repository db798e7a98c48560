"""Names are cut apart by how they begin, with few requests, and none is lost between two cuts."""

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.storage.beginnings import beginnings


class Listed:
    """Names in order, of which the first after a start is told, as storage does; counts how often it is asked."""

    def __init__(self, names):
        self._names = sorted(names)
        self.asked = 0

    def __call__(self, prefix, start):
        self.asked += 1
        place = bisect.bisect_left(self._names, max(prefix, start))
        return next((name for name in self._names[place : place + 1] if name.startswith(prefix)), None)


def names_by(cuts, names):
    """How many names lie between each two cuts; what is before the first one belongs to it."""
    return [
        sum(low <= name < high for name in names)
        for low, high in zip(["", *cuts[1:]], [*cuts[1:], chr(0x10FFFF) * 9], strict=True)
    ]


characters = st.characters(codec="utf-8")


@given(st.sets(st.text(characters, min_size=1, max_size=5), max_size=40), st.integers(1, 20))
def test_cuts_are_in_order_and_each_name_begins_with_one_or_is_the_beginning_of_some(names, wanted):
    cuts = beginnings(Listed(names), "", wanted)
    assert cuts == sorted(set(cuts))
    assert [name for name in names if not any(name.startswith(cut) or cut.startswith(name) for cut in cuts)] == []


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([f"{number:09d}.jpg" for number in range(10_000)], id="numbers of one length"),
        pytest.param([f"{number}.jpg" for number in range(10_000)], id="numbers as they come"),
        pytest.param([f"{number * 2654435761 % 2**32:08x}" for number in range(10_000)], id="hashes"),
        pytest.param([f"{'long/' * 30}{number:05d}" for number in range(10_000)], id="a long beginning in common"),
    ],
)
def test_parts_are_small_and_take_a_few_requests_each(names):
    listed = Listed(names)
    cuts = beginnings(listed, "", 100)
    assert 100 <= len(cuts) <= 200
    assert max(names_by(cuts, names)) <= len(names) / 15  # one of 16 digits
    assert listed.asked <= 4 * len(cuts) + 2 * len(names[0])


def test_who_asks_does_not_ask_without_end():
    """Two names of the longest that there are, alike but for their ends."""
    listed = Listed(["n" * 1023 + "a", "n" * 1023 + "b"])
    beginnings(listed, "", 10**6)
    assert listed.asked < 3_000


def test_what_cannot_be_told_apart_stays_whole():
    names = ["x/1", "x/2", "x1", "y"]
    assert beginnings(Listed(names), "", 10, lambda beginning: "/" not in beginning) == ["x/", "x1", "y"]
