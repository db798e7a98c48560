"""What is acknowledged when, on a runner that finalizes whatever has ended when a checkpoint completes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pipeline.stream.delayed_acks import DelayedAcks, Poll
from tests.clock import Clock

SECONDS = st.floats(0.001, 3.0)
DELAYS = st.floats(0.0, 0.9)


class Flink:
    """A poller's bundles under Flink: one checkpoint at a time, with a pause; finalizations come late and in any order."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.polls = DelayedAcks(self, self.clock)
        self.next = 1
        self.outstanding: list[Poll] = []
        self.coming: list[tuple[float, Poll]] = []
        self.barrier = 0  # the first poll that the checkpoint under way does not hold
        self.held = 1  # the first that the completed one does not hold
        self.acknowledged: list[str] = []
        self.lost: list[str] = []
        self.taken: list[str] = []
        self._ids = itertools.count()

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.coming.sort(key=lambda each: each[0])
        while self.coming and self.coming[0][0] <= end:
            self.clock.now, poll = self.coming.pop(0)
            self.polls.finalize(poll)
        self.clock.now = end

    def end_hold(self, ids) -> None:
        for each in ids:
            assert int(each.split(":")[0]) < self.held, "no completed checkpoint holds it"
        self.acknowledged += ids

    def release(self, ids) -> None:
        self.lost += ids

    def bundle(self, seconds: float) -> None:
        message = f"{self.next}:{next(self._ids)}"
        self.taken.append(message)
        poll = self.polls.begin(self.next, [message])
        self.next += 1
        self.pass_time(seconds)
        self.polls.end(poll)
        self.outstanding.append(poll)

    def checkpoint(self, bundles, delays) -> None:
        self.barrier = self.next
        for seconds in bundles:
            self.bundle(seconds)
        self.held = self.barrier
        for poll, delay in zip(self.outstanding, itertools.cycle(delays), strict=False):
            self.coming.append((self.clock.now + delay, poll))
        self.outstanding = []

    def fall_back(self) -> None:
        self.next, self.outstanding = self.held, []


BUNDLES = st.lists(SECONDS, max_size=5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("bundles"), BUNDLES),
        st.tuples(st.just("checkpoint"), BUNDLES, st.lists(DELAYS, min_size=1, max_size=5), BUNDLES),
        st.tuples(st.just("fall back")),
    ),
    max_size=30,
)


@given(STEPS)
def test_nothing_is_acknowledged_that_no_completed_checkpoint_holds(steps):
    """Whatever comes between a checkpoint's begin and its end, and however late a worker hears of the latter.

    What a process takes that outlives a fall-back is acknowledged, lost with it, or still in hand: each exactly once.
    """
    flink = Flink()
    for kind, *parts in steps:
        if kind == "bundles":
            for seconds in parts[0]:
                flink.bundle(seconds)
        elif kind == "checkpoint":
            flink.checkpoint(parts[0], parts[1])
            for seconds in parts[2]:  # these may end before the worker hears of the checkpoint's end
                flink.bundle(seconds)
            flink.pass_time(1.0)
        else:
            flink.fall_back()
    assert len(set(flink.acknowledged)) == len(flink.acknowledged)
    assert not set(flink.acknowledged) & set(flink.lost)

    for _ in range(2):  # idle polls and checkpoints settle all that was taken before
        flink.bundle(0.1)
        flink.checkpoint([], [0.0])
        flink.pass_time(2.0)
    assert {*flink.acknowledged, *flink.lost} == set(flink.taken[:-1])


def test_finalizations_of_one_checkpoint_are_one_group_also_seconds_apart():
    flink = Flink()
    flink.bundle(0.1)
    flink.checkpoint([0.1, 0.1], [0.0, 3.0])
    flink.pass_time(5.0)
    assert flink.acknowledged == []


def test_after_a_fall_back_the_poller_that_comes_again_settles_what_was_in_hand():
    flink = Flink()
    flink.bundle(0.1)
    flink.checkpoint([0.1], [0.0])
    flink.pass_time(5.0)
    flink.bundle(0.1)
    flink.fall_back()
    flink.bundle(0.1)
    assert (flink.acknowledged, flink.lost) == (["1:0"], ["2:1", "3:2"])
