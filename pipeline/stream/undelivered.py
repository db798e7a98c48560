"""How many messages of a subscription nobody has received yet: Cloud Monitoring counts them, and metrics show them.

https://cloud.google.com/pubsub/docs/monitoring. The number is some minutes old, as Cloud Monitoring has it.
"""

from __future__ import annotations

import datetime
import logging
import threading
from typing import Any

from pipeline.failures import one_line
from pipeline.stats.counted import COUNTED

_URL = "https://monitoring.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/monitoring.read"
_METRIC = "pubsub.googleapis.com/subscription/num_undelivered_messages"
_EVERY_SECONDS = 60.0
_WINDOW = datetime.timedelta(minutes=10)  # the metric is sampled every minute, and is up to four minutes late
_ASK_SECONDS = 5.0  # the end of a stream waits for it
_log = logging.getLogger(__name__)


def keep_looking(subscription: str, end: threading.Event) -> None:
    """Asks every minute, until the event is set; one warning where that fails, and the number is unknown then."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    warned = False
    while not end.is_set():
        try:
            credentials, _ = google.auth.default(scopes=[_SCOPE])
            COUNTED.undelivered = undelivered(subscription, AuthorizedSession(credentials))
        except Exception as err:  # noqa: BLE001  a metric less is no reason to end a stream
            COUNTED.undelivered = None
            if not warned:
                _log.warning("undelivered messages are unknown: %s; expected roles/monitoring.viewer", one_line(err))
                warned = True
        end.wait(_EVERY_SECONDS)


def undelivered(subscription: str, session: Any, url: str = _URL) -> int | None:
    """The newest number of undelivered messages; None where Cloud Monitoring has none.

    Args:
      subscription: `projects/P/subscriptions/S`.
      session: A session of `requests` with credentials.
      url: Where Cloud Monitoring is.

    Raises:
      Exception: It cannot be asked, or refuses.
    """
    _, project, _, name = subscription.split("/")
    now = datetime.datetime.now(datetime.timezone.utc)
    wanted = {
        "filter": f'metric.type = "{_METRIC}" AND resource.labels.subscription_id = "{name}"',
        "interval.startTime": (now - _WINDOW).isoformat(timespec="seconds"),
        "interval.endTime": now.isoformat(timespec="seconds"),
    }
    answer = session.get(f"{url}/v3/projects/{project}/timeSeries", params=wanted, timeout=_ASK_SECONDS)
    answer.raise_for_status()
    points = [point for series in answer.json().get("timeSeries", ()) for point in series.get("points", ())]
    newest = max(points, key=lambda point: str(point["interval"]["endTime"]), default=None)
    return int(newest["value"]["int64Value"]) if newest else None
