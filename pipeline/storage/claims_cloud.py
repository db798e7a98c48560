"""Claims on Cloud Storage: one object in the results folder lists them all, and changes only where nobody changed it meanwhile.

Each change reads the object with its generation, and writes it on the condition that it still has that one
(https://cloud.google.com/storage/docs/request-preconditions); the first one, that there is no object yet. So of several that
change it at the same moment one does, and the others look again. A claim is renewed each half minute. One that was not renewed
for five minutes may be taken over, and whoever held it finds that out at the next renewal, at the latest before it publishes.

No clock decides what is right: where one is wrong by minutes a run may lose its claim, but never do two publish for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.records import row_bytes
from pipeline.storage.claims import Claim
from pipeline.storage.cloud import storage_client
from pipeline.storage.listing_backends import GS
from pipeline.storage.renewal import renewed
from pipeline.storage.state import warn_unreadable

POLL_SECONDS = 10.0
_OBJECT = ".lease"
_RENEW_SECONDS = 30.0
_DEAD_SECONDS = 300.0
_RETRY_SECONDS = 20.0
_ANSWER_SECONDS = 8.0  # Google's default of 60 would leave no time to ask again

Claims = Mapping[str, Claim]


class CloudClaims:
    """The claims in a results folder on Cloud Storage, of which one may be this run's.

    Args:
      output: The folder, `gs://…`.
    """

    poll_seconds = POLL_SECONDS

    def __init__(self, output: str) -> None:
        self._bucket, _, folder = output[len(GS) :].partition("/")
        self._name = f"{folder}/{_OBJECT}".lstrip("/")
        self.expired: list[Claim] = []

    def take(self, claim: Claim) -> Claim | None:
        """Makes a claim; returns the one that is in its way, if there is one.

        Those that it takes over, of runs that were not heard of for too long, are in `expired` then.
        """
        found: list[Claim] = []

        def add(claims: Claims) -> Claims:
            dead = {run for run, other in claims.items() if _is_dead(other)}
            self.expired = [claims[run] for run in sorted(dead) if not claims[run].is_known_dead()]
            alive = {run: other for run, other in claims.items() if run not in dead}
            found[:] = [other for run, other in alive.items() if run != claim.run and other.shares(claim)]
            return claims if found else {**alive, claim.run: claim}

        self._change(add)
        return found[0] if found else None

    def renew(self, claim: Claim) -> bool:
        """Says that a run is alive; False where its claim was taken over."""
        held: list[bool] = []
        renewed = dataclasses.replace(claim, renewed=time.time())

        def set_time(claims: Claims) -> Claims:
            held[:] = [claim.run in claims]
            return {**claims, claim.run: renewed} if held[0] else claims

        self._change(set_time)
        return held[0]

    def release(self, claim: Claim) -> None:
        """Gives a claim up; where storage fails, it ends by itself."""
        with contextlib.suppress(Exception):
            self._change(lambda claims: {run: other for run, other in claims.items() if run != claim.run})

    def alive(self) -> set[str]:
        """The runs that have a claim and were heard of."""
        return {run for run, claim in self._read()[0].items() if not _is_dead(claim)}

    @contextlib.contextmanager
    def kept(self, claim: Claim, lost: Callable[[], None]) -> Iterator[None]:
        """Renews a claim while this lasts; calls `lost`, in a thread, once it was taken over."""

        def renew() -> bool:
            if self.renew(claim):
                return True
            lost()
            return False

        with renewed("lease", _RENEW_SECONDS, renew):
            yield

    def _change(self, change: Callable[[Claims], Claims]) -> None:
        """Changes the claims: what `change` makes of them as they are, as often as it takes.

        An answer that is lost on its way does no harm: what is already so is not written again.
        """
        while True:
            claims, generation = self._read()
            changed = change(claims)
            if changed == claims or self._write(changed, generation):
                return

    def _read(self) -> tuple[Claims, int]:
        """The claims, and the generation of the object that has them; 0 where there is none."""
        from google.api_core.exceptions import NotFound

        patience = _patience()
        while True:
            with storage_client() as client:
                bucket = client.bucket(self._bucket)
                blob = bucket.get_blob(self._name, **patience)
                if blob is None:
                    return {}, 0
                with contextlib.suppress(NotFound):  # it was changed meanwhile
                    content = bucket.blob(self._name, generation=blob.generation).download_as_bytes(**patience)
                    return self._parse(content), blob.generation

    def _parse(self, content: bytes) -> Claims:
        """The claims in the object; a part of it that cannot be read counts as absent."""
        claims = {}
        try:
            for run, text in dict(json.loads(content)).items():
                claim = Claim.from_json(str(text).encode())
                claims.update({run: claim} if claim.run == run else {})
        except (ValueError, TypeError, RecursionError) as err:
            warn_unreadable(f"{GS}{self._bucket}/{self._name}", " ".join(str(err).split())[:200])
        return claims

    def _write(self, claims: Claims, generation: int) -> bool:
        """Writes the claims if the object still is as it was read; whether it was."""
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


def _is_dead(claim: Claim) -> bool:
    return abs(time.time() - claim.renewed) > _DEAD_SECONDS or claim.is_known_dead()


def _patience() -> dict[str, Any]:
    """For a short time only: who renews comes again, and who ends does not wait for storage that is gone."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(_RETRY_SECONDS), "timeout": _ANSWER_SECONDS}
