"""Masks secrets in all output: reports, state files, command lines and messages.

An option is secret if its name contains one of the words below. So is a pair in a text, such as `AccountKey=…` in a connection
string or `"AWS_SECRET_ACCESS_KEY": "…"` in the settings of an environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MASK = "***"
_SECRET = r"(?:secret|key|token|passw|pwd|credential|connection[-_]?string)"  # noqa: S105  words, not a secret
_NAME = re.compile(_SECRET, re.IGNORECASE)
_NAMED = rf"[\w.-]*{_SECRET}[\w.-]*"
_VALUE = r"""("[^"]*"|'[^']*'|[^\s,;&"'}]+)"""
_PAIR = re.compile(rf"""({_NAMED}=|["']{_NAMED}["']\s*[:=]\s*){_VALUE}""", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether an option's name says that its value must not be shown.

    >>> is_secret("azure_connection_string"), is_secret("--s3-secret-access-key"), is_secret("region")
    (True, True, False)
    """
    return _NAME.search(name) is not None


def masked_text(text: str) -> str:
    """A text whose secret pairs have their values masked.

    >>> masked_text('cannot connect: AccountName=a;AccountKey=bQ==;{"TOKEN": "x y"}')
    'cannot connect: AccountName=a;AccountKey=***;{"TOKEN": ***}'
    """
    return _PAIR.sub(rf"\g<1>{MASK}", text)


def masked_target(where: str) -> str:
    """A webhook's URL, or a command, without its secrets: the host, or the program.

    >>> masked_target("https://me:pw@hooks.example/T0/B1?x=y"), masked_target("mail -s s3cret me"), masked_target("")
    ('https://hooks.example/***', 'mail ***', '')
    """
    if where.lower().startswith(("http://", "https://")):
        scheme, _, rest = where.partition("://")
        return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}/{MASK}"
    program, arguments, _ = where.partition(" ")
    return f"{program} {MASK}" if arguments else program


def masked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, with secrets masked."""
    return {name: MASK if is_secret(name) else _masked_value(value) for name, value in options.items()}


def masked_arguments(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments of a command line, with secrets masked.

    >>> list(masked_arguments(["--s3_session_token", "abc", "--azure_connection_string=a=b", "--output", "o"]))
    ['--s3_session_token', '***', '--azure_connection_string=***', '--output', 'o']
    """
    hides = False
    for argument in arguments:
        if argument.startswith("--"):
            name, given, _ = argument.partition("=")
            secret = name == "--notify" or is_secret(name)
            hides = secret and not given
            yield f"{name}={MASK}" if secret and given else masked_text(argument)
        else:
            yield MASK if hides else masked_text(argument)


def _masked_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked_value(each) for each in value]
    return masked_text(value) if isinstance(value, str) else value
