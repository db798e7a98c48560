"""Leases on Cloud Storage: one object in the results folder has a record of each holder and changes by compare-and-swap.

A change reads the object with its generation, and writes it on the condition that the generation is still the same
(https://cloud.google.com/storage/docs/request-preconditions). Of several writers at the same moment one succeeds, and the others
read again. A holder renews its record each half minute. After five minutes without a renewal another run may take over; the old
holder finds that out at its next renewal, at the latest before it commits.

All times in the records are the server's, from the `Date` of its answers, so the clocks of the machines do not matter. Times
decide only when a record expires; preconditions and the fence keep two runs from committing the same images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.records import row_bytes
from pipeline.results.claims import LEASE_TIMES, Claim, LeaseTimes
from pipeline.results.renewal import renewed
from pipeline.storage.cloud import server_times, storage_client
from pipeline.storage.listing_backends import GS
from pipeline.storage.state import warn_unreadable

_OBJECT = ".lease"
_RETRY_SECONDS = 20.0
_ANSWER_SECONDS = 8.0  # Google's default of 60 would leave no time for another try

Claims = Mapping[str, Claim]


class _Read(NamedTuple):
    """The claims, the generation of their object (0: there is none), and the server's time."""

    claims: Claims
    generation: int
    now: float


class CloudClaims:
    """The claims in a results folder on Cloud Storage, of which one may be this run's.

    Args:
      output: The folder, `gs://…`.
      times: When a claim is renewed, and when it expires.
    """

    def __init__(self, output: str, times: LeaseTimes = LEASE_TIMES) -> None:
        self._times = times
        self._bucket, _, folder = output[len(GS) :].partition("/")
        self._name = f"{folder}/{_OBJECT}".lstrip("/")
        self.expired: list[Claim] = []

    def take(self, claim: Claim) -> Claim | None:
        """Makes a claim; returns the claim that conflicts with it, if there is one.

        Afterwards `expired` has the claims of jobs that may still run, but were not renewed for too long.
        """
        found: list[Claim] = []

        def add(claims: Claims, now: float) -> Claims:
            dead = {run for run, other in claims.items() if self._is_dead(other, now)}
            self.expired = [claims[run] for run in sorted(dead) if claims[run].patterns and not claims[run].is_known_dead()]
            alive = {run: other for run, other in claims.items() if run not in dead}
            found[:] = [other for run, other in alive.items() if run != claim.run and other.shares(claim)]
            return claims if found else {**alive, claim.run: dataclasses.replace(claim, renewed=now)}

        self._change(add)
        return found[0] if found else None

    def renew(self, claim: Claim) -> bool:
        """Renews a claim; False where another run took it over. A claim on no images, which cannot conflict, is made again."""
        held: list[bool] = []

        def set_time(claims: Claims, now: float) -> Claims:
            held[:] = [claim.run in claims or not claim.patterns]
            return {**claims, claim.run: dataclasses.replace(claim, renewed=now)} if held[0] else claims

        self._change(set_time)
        return held[0]

    def release(self, claim: Claim) -> None:
        """Gives a claim up; where storage fails, it expires."""
        with contextlib.suppress(Exception):
            self._change(lambda claims, _: {run: other for run, other in claims.items() if run != claim.run})

    def has(self, claim: Claim) -> bool:
        """Whether this run has a claim already, and this process made it."""
        other = self._read().claims.get(claim.run)
        return other is not None and (other.host, other.pid) == (claim.host, claim.pid) and other.life in ("", claim.life)

    def alive(self) -> tuple[set[str], float]:
        """The runs whose claims have not expired, and the server's time."""
        claims, _, now = self._read()
        return {run for run, claim in claims.items() if not self._is_dead(claim, now)}, now

    @contextlib.contextmanager
    def kept(self, claim: Claim, lost: Callable[[], None]) -> Iterator[None]:
        """Renews a claim while this lasts; calls `lost`, in a thread, once another run took it over."""

        def renew() -> bool:
            if self.renew(claim):
                return True
            lost()
            return False

        with renewed("lease", self._times.renew_s, renew):
            yield

    def _change(self, change: Callable[[Claims, float], Claims]) -> None:
        """Replaces the claims by what `change` makes of them and the server's time; tries until no other writer interferes.

        A lost answer does no harm: `change` finds its own record the next time.
        """
        while True:
            claims, generation, now = self._read()
            changed = change(claims, now)
            if changed == claims or self._write(changed, generation):
                return

    def _read(self) -> _Read:
        from google.api_core.exceptions import NotFound

        patience = _patience()
        while True:
            with storage_client() as client, server_times(client) as times:
                bucket = client.bucket(self._bucket)
                blob = bucket.get_blob(self._name, **patience)
                if blob is None:
                    return _Read({}, 0, times[-1])
                with contextlib.suppress(NotFound):  # another writer has changed it meanwhile
                    content = bucket.blob(self._name, generation=blob.generation).download_as_bytes(**patience)
                    return _Read(self._parse(content), blob.generation, times[-1])

    def _parse(self, content: bytes) -> Claims:
        """The claims in the object; a record that cannot be read counts as absent."""
        claims = {}
        try:
            for run, text in dict(json.loads(content)).items():
                claim = Claim.from_json(str(text).encode())
                claims.update({run: claim} if claim.run == run else {})
        except (ValueError, TypeError, RecursionError) as err:
            warn_unreadable(f"{GS}{self._bucket}/{self._name}", " ".join(str(err).split())[:200])
        return claims

    def _write(self, claims: Claims, generation: int) -> bool:
        """Writes the claims if the object still has this generation; whether it had."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with storage_client() as client:
            blob = client.bucket(self._bucket).blob(self._name)
            try:
                if claims:
                    content = row_bytes({run: claim.to_json().decode() for run, claim in claims.items()})
                    blob.upload_from_string(content, if_generation_match=generation, **_patience())
                else:
                    blob.delete(if_generation_match=generation, **_patience())
            except (PreconditionFailed, NotFound):
                return False
        return True

    def _is_dead(self, claim: Claim, now: float) -> bool:
        return abs(now - claim.renewed) > self._times.expires_s or claim.is_known_dead()


def _patience() -> dict[str, Any]:
    """Short limits: a renewal is tried again soon, and a job that ends does not wait for storage that fails."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(_RETRY_SECONDS), "timeout": _ANSWER_SECONDS}
