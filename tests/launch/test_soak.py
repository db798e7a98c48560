"""The soak in short: two simulated hours, which last as long as their events do."""

import json

from tests.soak import Soak, faults

SCALE, RATE = 1200.0, 10.0  # an hour in three seconds, but for what waits for progress


def test_outages_swaps_kills_and_compactions_lose_and_double_nothing(_pubsub_process, _strict_gcs_process, tmp_path):
    """The metrics of the last process show what it uses."""
    soak = Soak(_pubsub_process, _strict_gcs_process, tmp_path, SCALE, RATE, forked=True)
    figures = soak.run(2)
    assert not faults(figures), f"{faults(figures)}\n{json.dumps(figures, indent=2)}"
    assert figures["images"] > 20 and figures["requests"] > 5
    events = ("swaps", "outages of storage", "outages of pubsub", "compactions that ended with 0")
    assert [soak.counts[event] for event in events] == [2, 2, 2, 2]
    restarts = [count for event, count in soak.counts.items() if event.startswith("restarts")]
    assert restarts == [1, 1]
    used = figures["last_process"]
    assert used["samples"] > 3 and all(min(used[name]) > 0 for name in ("rss_mb", "threads", "fds"))
