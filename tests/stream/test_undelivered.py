"""The number of undelivered messages, from a server that answers as Cloud Monitoring does."""

import urllib.parse

import pytest
import requests

from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.stream.undelivered import undelivered
from tests.emulators import answering
from tests.monitoring.test_prometheus import samples

SUBSCRIPTION = "projects/p12345/subscriptions/images"


def point(minute: int, number: int) -> dict:
    return {"interval": {"endTime": f"2026-11-27T10:{minute:02d}:00Z"}, "value": {"int64Value": str(number)}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param({}, None, id="nothing is known"),
        pytest.param({"timeSeries": [{"points": [point(7, 42), point(6, 7)]}]}, 42, id="the newest one"),
        pytest.param({"timeSeries": [{"points": [point(6, 7)]}, {"points": [point(8, 0)]}]}, 0, id="of several series"),
    ],
)
def test_the_newest_number_of_the_subscription_counts(answer, expected):
    asked = []

    def answered(method, path, *_more):
        asked.append((method, urllib.parse.unquote_plus(path)))
        return 200, answer

    with answering(answered) as port, requests.Session() as session:
        assert undelivered(SUBSCRIPTION, session, f"http://127.0.0.1:{port}") == expected
    ((method, path),) = asked
    assert (method, path.partition("?")[0]) == ("GET", "/v3/projects/p12345/timeSeries")
    assert 'num_undelivered_messages" AND resource.labels.subscription_id = "images"' in path


def test_one_who_may_not_ask_is_told():
    with answering(lambda *_: (403, {})) as port, requests.Session() as session, pytest.raises(requests.HTTPError, match="403"):
        undelivered(SUBSCRIPTION, session, f"http://127.0.0.1:{port}")


def test_metrics_have_the_number_once_it_is_known(monkeypatch):
    monkeypatch.setattr(COUNTED, "undelivered", None)
    assert ("detection_undelivered_messages",) not in samples(JobStats())
    monkeypatch.setattr(COUNTED, "undelivered", 42)
    assert samples(JobStats())["detection_undelivered_messages",] == 42
