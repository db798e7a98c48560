"""Masks secrets in all output: rows, messages, logs, reports, state files and command lines.

An option is secret if its name contains one of the words below. So is a pair in a text, such as `AccountKey=…` in a connection
string or `"AWS_SECRET_ACCESS_KEY": "…"` in the settings of an environment. Of a web address, user, password, signature and tokens
are secret, and what is signed only for a while: it names the same image without them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET = r"(?:secret|key|token|passw|(?<![a-z])pass(?![a-z])|pwd|credential|connection[-_]?string)"  # noqa: S105  words
_NAME = re.compile(_SECRET, re.IGNORECASE)
_VALUE = r"""(\\+".*?\\+"|"[^"]*"|'[^']*'|[^\s,;&"'}]+)"""
_PLAIN = r"(?<![a-z])(?:password|passwd|pwd|(?:api|access|account|secret|private)[-_]?key|secret|token)"  # before ": " and " = "
_NAMED = rf"(?:(?:{_SECRET}|signature|x-(?:amz|goog)-)[\w.-]{{0,99}}|(?<![a-z_])sig|hdn(?:ts|ea|tl))"
_PAIR = re.compile(rf"""((?:{_NAMED}(?:=|\\*["']\s*[:=]\s*)|{_PLAIN}\s*[:=]\s+)){_VALUE}""", re.IGNORECASE)
_COOKIE = re.compile(r"""(\bcookie\s*:\s*)[^'"\r\n]+""", re.IGNORECASE)
_HEADER = re.compile(
    r"(\bauthorization\s*:\s*(?:\w+\s+)?|\bbearer\s+|\bx-[\w-]{0,40}(?:key|token)\s*:\s*)[^\s'\",;]+", re.IGNORECASE
)
_ADDRESS = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s"'<>\\]+""")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*\Z")
_USER = re.compile(r"""(?<=://)[^\s/?#@"':]*:[^\s/?#@"']*@""")
_OF_CLOUD = re.compile(r"x-(?:amz|goog)-signature", re.IGNORECASE)
_SIGNATURE = re.compile(r"x-(?:amz|goog)-.*|sig|signature", re.IGNORECASE)
_SECRET_PAIR = re.compile(r"(?:.*[-_])?token|.*api[-_]?key|.*secret.*|passw.*", re.IGNORECASE)
_TOKEN = re.compile(r"(?!.*(?:access|auth|session|security|refresh|bearer|\bid)[-_]?token)(?:.*[-_])?token", re.IGNORECASE)
_HASHED = re.compile(re.escape(MASK) + r"[0-9a-f]{12}")
_SIGNED = re.compile(  # beside a signature: Azure's SAS, version 2 of Amazon's and Google's, CloudFront's
    r"s[vserpt]|s[rp]s?|spr|sip|sk(?:oid|tid|t|e|s|v)|expires|awsaccesskeyid|googleaccessid|policy|key-pair-id", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether an option's name says that its value must not be shown.

    >>> is_secret("azure_connection_string"), is_secret("--s3-secret-access-key"), is_secret("region")
    (True, True, False)
    """
    return _NAME.search(name) is not None


def public_address(uri: str) -> str:
    """An address without what is secret in it; any other URI as it is, and a public address, too.

    A token that no signature or date goes with may be all that tells two images apart: a hash of it stays. After `gs://` and
    `s3://` a question mark is part of an object's name, unless a signature of these clouds follows.

    >>> (
    ...     public_address("https://me:pw@h/a.jpg?v=2&se=2026&sig=abc"),
    ...     public_address("HTTPS://h/a?X-Amz-Date=1"),
    ...     public_address("https://h/a?image_token=b"),
    ...     public_address("a?sig=b"),
    ... )
    ('https://h/a.jpg?v=2', 'HTTPS://h/a', 'https://h/a?image_token=***a120d0ad50f1', 'a?sig=b')
    """
    before, mark, rest = uri.partition("://")
    if not mark or not ("?" in rest or "@" in rest):
        return uri
    scheme = _SCHEME.search(before)
    if not scheme:
        return uri
    place, has_query, query = rest.partition("?")
    host, slash, path = place.partition("/")
    user, _, only_host = host.rpartition("@")
    is_secret_user = ":" in user or scheme[0].lower() in ("http", "https")  # a container of Azure has an account behind it
    host = only_host if is_secret_user else host
    pairs = [(pair, *pair.partition("=")[::2]) for pair in query.split("&")]
    is_name = scheme[0].lower() in ("gs", "s3") and not any(_OF_CLOUD.fullmatch(name) for _, name, _ in pairs)
    if not has_query or is_name:
        return f"{before}://{host}{slash}{path}{has_query}{query}"
    kept = list(_kept(pairs))
    mark = "?" if kept or not query else ""
    return f"{before}://{host}{slash}{path}{mark}{'&'.join(kept)}"


def _kept(pairs: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """What stays of the pairs of a query, each given whole, by name and by value."""
    is_signed = any(_SIGNATURE.fullmatch(name) for _, name, _ in pairs)
    has_secret = is_signed or any(_SECRET_PAIR.fullmatch(name) and not _HASHED.fullmatch(value) for _, name, value in pairs)
    ends = is_signed or any(_SIGNED.fullmatch(name) for _, name, _ in pairs)
    for pair, name, value in pairs:
        if _HASHED.fullmatch(value):
            yield pair
        elif _SIGNATURE.fullmatch(name) or (has_secret and _SIGNED.fullmatch(name)):
            continue
        elif not _SECRET_PAIR.fullmatch(name):
            yield pair
        elif value and not ends and _TOKEN.fullmatch(name):
            yield f"{name}={MASK}{hashlib.blake2b(value.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}"


def with_public_addresses(text: str) -> str:
    """A text whose web addresses are public, and whose other URIs show no password; for texts that are read again."""
    if "://" not in text:
        return text
    return _USER.sub(f"{MASK}@", _ADDRESS.sub(lambda found: public_address(found[0]), text))


def without_secrets(value: Any, clean: Callable[[str], str] = with_public_addresses) -> Any:
    """Cleans all texts in a setting, at any depth."""
    if isinstance(value, Mapping):
        return {name: without_secrets(each, clean) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_secrets(each, clean) for each in value)
    return clean(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """A text without the secrets of addresses, and whose secret pairs and headers have their values masked.

    >>> masked_text('cannot connect: AccountName=a;AccountKey=bQ==;{"TOKEN": "x y"}')
    'cannot connect: AccountName=a;AccountKey=***;{"TOKEN": ***}'
    """
    text = with_public_addresses(text)
    for found in (_PAIR, _HEADER, _COOKIE):
        text = found.sub(rf"\g<1>{MASK}", text)
    return text


def masked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, with secrets masked."""
    return {name: MASK if is_secret(name) else without_secrets(value, masked_text) for name, value in options.items()}


def masked_arguments(arguments: Iterable[str], secret_flags: Collection[str] = ()) -> Iterator[str]:
    """The arguments of a command line, with secrets masked: those of these flags, and those that a name says to be secret.

    >>> list(masked_arguments(["--s3_session_token", "abc", "--azure_connection_string=a=b", "--output", "o"]))
    ['--s3_session_token', '***', '--azure_connection_string=***', '--output', 'o']
    """
    hides = False
    for argument in arguments:
        if argument.startswith("--"):
            name, given, _ = argument.partition("=")
            secret = name in secret_flags or is_secret(name)
            hides = secret and not given
            yield f"{name}={MASK}" if secret and given else masked_text(argument)
        else:
            yield MASK if hides else masked_text(argument)
