"""Makes sure, before anything takes time, that a stream's subscription and topics are there; says in one line what is wrong."""

from __future__ import annotations

import re

from pipeline.errors import InputError, OutputError, UserError
from pipeline.stream.clients import connect_subscriber, one_line, shared_publisher

_NAME = re.compile(r"projects/([^/]+)/(subscriptions|topics)/([A-Za-z][A-Za-z0-9._~+%-]{2,254})")
_CHECK_SECONDS = 20.0


def check_subscription(name: str) -> None:
    """Makes sure that a subscription exists and may be read.

    Raises:
      InputError: It does not, or may not, or Pub/Sub cannot be reached.
    """
    if not _names(name, "subscriptions"):
        raise InputError(f"input {name!r}: expected projects/<project>/subscriptions/<name>")
    try:
        client = connect_subscriber()
        found = client.get_subscription(subscription=name, timeout=_CHECK_SECONDS, retry=None)
        if found.topic == "_deleted-topic_":
            raise InputError(f"input {name}: its topic was deleted; create the subscription anew")
    except Exception as err:
        raise _explain(err, f"input {name}", "subscription", InputError) from err


def check_topic(name: str, what: str = "output") -> None:
    """Makes sure that a topic exists.

    Args:
      name: `projects/P/topics/T`.
      what: What the topic is for, as the user calls it.

    Raises:
      OutputError: It does not, or Pub/Sub cannot be reached.
    """
    if not _names(name, "topics"):
        raise OutputError(f"{what} {name!r}: expected projects/<project>/topics/<name>")
    try:
        shared_publisher().get_topic(topic=name, timeout=_CHECK_SECONDS, retry=None)
    except Exception as err:
        raise _explain(err, f"{what} {name}", "topic", OutputError) from err


def _names(name: str, kind: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match[2] == kind


def _explain(err: Exception, where: str, kind: str, error: type[UserError]) -> UserError:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    if isinstance(err, UserError):
        return err
    if isinstance(err, exceptions.NotFound):
        return error(f"{where}: there is no such {kind}; create it with `gcloud pubsub {kind}s create`")
    if isinstance(err, exceptions.PermissionDenied):
        return error(f"{where}: these credentials may not see it: {one_line(err)}; grant roles/pubsub.viewer")
    if isinstance(err, (GoogleAuthError, exceptions.Unauthenticated)):
        return error(f"{where}: no usable credentials: {one_line(err)}; run `gcloud auth application-default login`")
    return error(f"{where}: Pub/Sub cannot be reached: {one_line(err)}; check the network (or PUBSUB_EMULATOR_HOST)")
