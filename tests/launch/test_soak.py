"""The soak in short: two simulated hours, which last as long as their events do."""

import json

import pytest

from tests.emulators import PubSubEmulator
from tests.soak import Soak, faults

SCALE, RATE = 1200.0, 10.0  # an hour in three seconds, but for what waits for progress


@pytest.fixture(scope="module")
def soaked(_pubsub_process: PubSubEmulator, _strict_gcs_process: str, tmp_path_factory):
    """A soak that has ended, with its figures."""
    soak = Soak(_pubsub_process, _strict_gcs_process, tmp_path_factory.mktemp("soak"), SCALE, RATE, forked=True)
    return soak, soak.run(2)


def test_outages_swaps_kills_and_compactions_lose_and_double_nothing(soaked):
    soak, figures = soaked
    assert not faults(figures), f"{faults(figures)}\n{json.dumps(figures, indent=2)}"
    assert figures["images"] > 20 and figures["requests"] > 5
    events = ("swaps", "outages of storage", "outages of pubsub", "compactions that ended with 0")
    assert [soak.counts[event] for event in events] == [2, 2, 2, 2]
    restarts = [count for event, count in soak.counts.items() if event.startswith("restarts")]
    assert restarts == [1, 1]


def test_the_watch_sees_what_the_last_process_uses(soaked):
    """By its metrics."""
    _, figures = soaked
    used = figures["last_process"]
    assert used["samples"] > 3
    assert all(min(used[name]) > 0 for name in ("rss_mb", "threads", "fds"))
