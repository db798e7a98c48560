"""Checks before a stream starts that its subscription and topics exist; an error is one line."""

from __future__ import annotations

import re

from pipeline.errors import InputError, OutputError, UserError
from pipeline.storage.waiting import waiting_for
from pipeline.stream.clients import connect_subscriber, one_line, shared_publisher

_CHECK_SECONDS = 20.0
_LEAST_PROJECT, _MOST_NAME = 6, 255


def check_subscription(name: str) -> str:
    """Makes sure that a subscription exists and may be read; returns the topic that feeds it.

    Raises:
      InputError: It does not, or may not, or Pub/Sub cannot be reached.
    """
    wrong = wrong_name(name, "subscription")
    if wrong:
        raise InputError(f"input {name!r}: {wrong}")
    try:
        client = connect_subscriber()
        with waiting_for(f"input {name}"):
            found = client.get_subscription(subscription=name, timeout=_CHECK_SECONDS, retry=None)
        if found.topic == "_deleted-topic_":
            raise InputError(f"input {name}: its topic was deleted; create the subscription anew")
        return str(found.topic)
    except Exception as err:
        raise _explain(err, f"input {name}", "subscription", InputError) from err


def check_topic(name: str, what: str = "output", source: str = "") -> None:
    """Makes sure that a topic exists, and does not feed the job that publishes to it.

    Args:
      name: `projects/P/topics/T`.
      what: What the topic is for, as the user calls it.
      source: The topic that feeds the job's input.

    Raises:
      OutputError: It does not exist, or feeds the job, or Pub/Sub cannot be reached.
    """
    wrong = wrong_name(name, "topic")
    if wrong:
        raise OutputError(f"{what} {name!r}: {wrong}")
    if name == source:
        raise OutputError(f"{what} {name}: it feeds the input, so the job would read what it publishes; give another topic")
    try:
        with waiting_for(f"{what} {name}"):
            shared_publisher().get_topic(topic=name, timeout=_CHECK_SECONDS, retry=None)
    except Exception as err:
        raise _explain(err, f"{what} {name}", "topic", OutputError) from err


def wrong_name(name: str, kind: str) -> str:
    """What is wrong with the full name of a `subscription` or `topic`; empty if nothing is.

    The rules are Pub/Sub's: https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names

    >>> wrong_name("projects/my-project/topics/images", "topic")
    ''
    """
    form = f"projects/<project>/{kind}s/<name>"
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "projects" or parts[2] != f"{kind}s" or not all(parts):
        return f"expected {form}"
    project, short = parts[1], parts[3]
    if len(project) < _LEAST_PROJECT:
        return f"expected {form}, with a project id of {_LEAST_PROJECT} characters or more, got {project!r}"
    strange = "".join(sorted(set(re.sub(r"[A-Za-z0-9.:-]", "", project) + re.sub(r"[A-Za-z0-9._~+%-]", "", short))))
    if strange:
        return f"expected {form}, with letters, digits and a few signs, got {strange!r}"
    if not short[0].isalpha():
        return f"expected {form}, with a name that begins with a letter, got {short!r}"
    if not 3 <= len(short) <= _MOST_NAME:
        return f"expected {form}, with a name of 3 to {_MOST_NAME} characters, got {len(short)}: {short[:20]!r}"
    return ""


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
