"""Checks before a stream starts that its subscription and topics exist; an error is one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError

from pipeline.errors import InputError, OutputError, UserError
from pipeline.storage.cloud import google_error
from pipeline.storage.store import kind_of_error
from pipeline.storage.waiting import waiting_for
from pipeline.stream.clients import connect_subscriber, one_line, shared_publisher

_CHECK_SECONDS = 20.0
_NAME = r"projects/[A-Za-z0-9.:-]{6,}/%ss/[A-Za-z][A-Za-z0-9._~+%%-]{2,254}"  # cloud.google.com/pubsub/docs/pubsub-basics


def check_subscription(name: str) -> str:
    """Makes sure that a subscription exists and may be read; returns the topic that feeds it.

    Raises:
      InputError: It does not, or may not.
      AwayError: Pub/Sub cannot be reached.
    """
    found = _found(name, "input", "subscription", InputError, lambda: connect_subscriber().get_subscription)
    if found.topic == "_deleted-topic_":
        raise InputError(f"input {name}: its topic was deleted; create the subscription anew")
    return str(found.topic)


def check_topic(name: str, what: str, source: str) -> None:
    """Makes sure that a topic exists, and does not feed the job that publishes to it.

    Args:
      name: `projects/P/topics/T`.
      what: What the topic is for, as the user calls it.
      source: The topic that feeds the job's input.

    Raises:
      OutputError: It does not exist, or feeds the job.
      AwayError: Pub/Sub cannot be reached.
    """
    if name == source:
        raise OutputError(f"{what} {name}: it feeds the input, so the job would read what it publishes; give another topic")
    _found(name, what, "topic", OutputError, lambda: shared_publisher().client.get_topic)


def _found(name: str, what: str, kind: str, error: type[UserError], method: Callable[[], Callable[..., Any]]) -> Any:
    """What Pub/Sub has of this kind under a name; `method`: connects, and returns the client's method that gets it."""
    try:
        if not re.fullmatch(_NAME % kind, name):
            raise UserError(
                f"expected projects/<project>/{kind}s/<name>, with a project id of 6 characters or more, and a name of 3 to 255 "
                "that begins with a letter and has letters, digits, and -._~+% only"
            )
        with waiting_for(f"{what} {name}"):
            return method()(**{kind: name}, timeout=_CHECK_SECONDS, retry=None)
    except Exception as err:
        raise kind_of_error(google_error(err), error)(f"{what} {name}: {_explained(err, kind)}") from err


def _explained(err: Exception, kind: str) -> str:
    match err:
        case UserError():
            return str(err)
        case exceptions.NotFound():
            return f"there is no such {kind}; create it with `gcloud pubsub {kind}s create`"
        case exceptions.PermissionDenied():
            return f"these credentials may not see it: {one_line(err)}; grant roles/pubsub.viewer"
        case GoogleAuthError() | exceptions.Unauthenticated():
            return f"no usable credentials: {one_line(err)}; run `gcloud auth application-default login`"
    return f"Pub/Sub cannot be reached: {one_line(err)}; check the network (or PUBSUB_EMULATOR_HOST)"
