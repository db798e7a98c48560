"""A soak test of a stream: `make soak`, or `python -m tests.soak [--minutes 60] [--hours 24]`.

It simulates `--hours` hours in `--minutes` minutes. Scaled by that factor are the windows of the archive (60 s), the memory of
repeats (10 min), the look for model versions (30 s), and the length and distance of events. Not scaled: locks, deadlines of
Pub/Sub, the watchdog.

In each hour storage and Pub/Sub are away for five minutes each, a model version is released, and a compaction runs beside the
stream. In each hour of the first third the job is killed once, and once restarted by SIGTERM. The last process then runs for two
thirds of the time, and its metrics show whether memory, threads and open files stay flat.

At the end each image has one row of a model version, each request a complete answer, and a check finds nothing damaged.
Exit code 0: so it is; 1: it is not; 2: an emulator is missing. Figures go to `.bench/soak.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline.results.reader import ResultsFolder, list_shards
from pipeline.stats.progress import in_background
from tests.benchmarks.images import BENCH
from tests.bright_model import export_bright_model
from tests.conftest import write_bright_image
from tests.emulators import EmulatorMissing, PubSubEmulator, free_ports, running_pubsub_emulator, running_strict_gcs_emulator
from tests.forked_jobs import ForkedJob
from tests.monitoring.prometheus import samples_of
from tests.processes import wait_until
from tests.streaming_job import CuttableProxy, StreamingJob

_HOUR_S = 3600.0
_OUTAGE_S = 300.0  # in simulated time
_SCALED_FLAGS = {"--shard-seconds": 60.0, "--deduplicate-s": 600.0, "--model-poll-s": 30.0}
_GAUGES = {"rss_mb": ("process_resident_memory_bytes", 1e6), "threads": ("detection_threads", 1), "fds": ("process_open_fds", 1)}
_FLAT = {"rss_mb": 10.0, "threads": 3.0, "fds": 8.0}  # so much more is no growth
_DAMAGED = 50  # one image in so many

Scraped = Mapping[tuple[str, ...], float]


class Feed:
    """Asks for new images at a steady rate: by notifications of Cloud Storage, inline, and three in a request; some repeatedly.

    Attributes:
      images: URIs asked for.
      damaged: Of these, those that can have no row.
      requests: Ids of requests.
    """

    def __init__(self, job: StreamingJob, bucket: Any, content: bytes, rate: float):
        self.images: set[str] = set()
        self.damaged: set[str] = set()
        self.requests: set[str] = set()
        self._job, self._bucket, self._content, self._rate = job, bucket, content, rate
        self._numbers = itertools.count()

    def publish(self, left: threading.Event) -> None:
        """Publishes until `left` is set."""
        while not left.is_set():
            notice, *uploaded = (self._upload() for _ in range(4))
            made = {"objectId": notice.name, "objectGeneration": str(notice.generation)}
            name, asked = (f"{kind}-{next(self._numbers)}" for kind in ("inline", "request"))
            self.images.add(f"inline:{name}")
            self.requests.add(asked)
            request = {"request_id": asked, "images": [self._uri(blob) for blob in (*uploaded, notice)]}
            self._job.publish(
                (b"{}", {"eventType": "OBJECT_FINALIZE", "bucketId": self._bucket.name, **made}),
                (self._content, {"name": name}),
                json.dumps(request).encode(),
            )
            left.wait(5 / self._rate)

    def _upload(self) -> Any:
        number = next(self._numbers)
        blob = self._bucket.blob(f"in/{number:06d}.png")
        is_damaged = number % _DAMAGED == 0
        blob.upload_from_string(b"no image" if is_damaged else self._content)
        self.images.add(self._uri(blob))
        self.damaged.update([self._uri(blob)] if is_damaged else [])
        return blob

    def _uri(self, blob: Any) -> str:
        return f"gs://{self._bucket.name}/{blob.name}"


class Soak:
    """A stream on emulators, and what disturbs it.

    Args:
      emulator: Pub/Sub.
      storage: URL of a storage emulator that honours preconditions.
      folder: For the model and logs.
      scale: Simulated seconds of a second.
      rate: New images a second.
      forked: See `StreamingJob`.

    Attributes:
      counts: Events so far.
    """

    def __init__(self, emulator: PubSubEmulator, storage: str, folder: Path, scale: float, rate: float, *, forked: bool = False):
        self._emulator, self._scale, self._folder = emulator, scale, folder
        self.counts: Counter[str] = Counter()
        self._answered: set[str] = set()  # images and requests with an outcome
        self._incomplete: set[str] = set()
        self._scraped: list[Scraped] = [{}]
        self._saved, self._versions = Path(export_bright_model(folder / "saved" / "1"), "1"), folder / "versions"
        self._versions.mkdir()
        self._version = 0
        self._release()
        self._services = {"storage": CuttableProxy(storage.removeprefix("http://")), "pubsub": CuttableProxy(emulator.host)}
        self._bucket = _new_bucket(storage)
        self._archive, images = (f"gs://{self._bucket.name}/{name}" for name in ("archive", "in/"))
        self._compact = ("pipeline.commands.compact", "--output", self._archive)
        self._check = ("pipeline.commands.check", self._archive)
        (self._port,) = free_ports(1)
        flags = ["--archive", self._archive, "--metrics-port", self._port, "--metrics-host", "127.0.0.1"]
        flags += ["--allow-uri-prefix", images, "--answer-deadline-s", 600]
        for name, seconds in _SCALED_FLAGS.items():
            flags += [name, max(1.0, round(seconds / scale, 3))]
        host = self._services["pubsub"].host
        self._job = StreamingJob(emulator, folder, str(self._versions), *flags, host=host, killed=forked, forked=forked)
        write_bright_image(folder / "bright.png", (64, 48), (10, 12, 30, 36))
        self._feed = Feed(self._job, self._bucket, (folder / "bright.png").read_bytes(), rate)

    def run(self, hours: int) -> dict[str, Any]:
        """Runs so many simulated hours; returns the figures."""
        storage = f"http://{self._services['storage'].host}"
        with mock.patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": storage, "NO_GCE_CHECK": "true"}):
            return self._figures(self._run_job(hours))

    def _run_job(self, hours: int) -> int:
        """Runs the job through all that happens to it; returns its exit code."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._job)
            for topic in (self._job.detections, self._job.dead_letters, self._job.answers):
                stack.enter_context(in_background("receiver", functools.partial(self._receive, topic)))
            stack.enter_context(in_background("metrics", self._watch))
            with in_background("feed", self._feed.publish):
                started = time.monotonic()
                for hour in range(hours):
                    self._disturb(restart=hour < max(1, hours // 3))
                    print(f"hour {hour + 1} of {hours}: {len(self._answered)} outcomes, {dict(self.counts)}", flush=True)
                    time.sleep(max(0.0, started + (hour + 1) * _HOUR_S / self._scale - time.monotonic()))
            self._until_answered()
            return self._job.signal(signal.SIGTERM)

    def _receive(self, subscription: str, left: threading.Event) -> None:
        """Receives what the job publishes to a topic."""
        while not left.is_set():
            for message in self._emulator.take(subscription, 1, timeout_s=2):
                name = message.attributes["request_id" if subscription == self._job.answers else "image_uri"]
                self._answered.add(name)
                self._incomplete.update([name] if b'"complete": false' in message.data[:200] else [])

    def _watch(self, left: threading.Event) -> None:
        """Scrapes the job's metrics every second; there are none while it starts."""
        while not left.wait(1.0):
            try:
                self._scraped.append(samples_of(self._port))
            except OSError:
                self._scraped.append({})

    def _disturb(self, *, restart: bool) -> None:
        """What happens in an hour."""
        self._until(lambda: bool(list_shards(self._archive)))  # a folder without results is a wrong command
        with ForkedJob(self._compact[1:], self._folder / "compact.log", module=self._compact[0]) as compaction:
            self._release()
            version = str(self._version)
            self._until(lambda: any(key[0] == "detection_model_info" and key[-1] == version for key in self._scraped[-1]))
            self.counts["swaps"] += 1
            for name in self._services:
                self._cut_off(name)
            for number in (signal.SIGKILL, signal.SIGTERM) if restart else ():
                self.counts[f"restarts by {number.name}, exit code {self._job.signal(number)}"] += 1
                self._job.start()
                self._until_answered()
                self._until(self._is_ready)
            self.counts[f"compactions that ended with {compaction.wait()}"] += 1

    def _release(self) -> None:
        self._version += 1
        shutil.copytree(self._saved, self._versions / "unfinished", copy_function=os.link)
        (self._versions / "unfinished").rename(self._versions / str(self._version))
        shutil.rmtree(self._versions / str(self._version - 2), ignore_errors=True)

    def _cut_off(self, name: str) -> None:
        """Cuts a service off, at least until the job's readiness shows it."""
        self._services[name].cut()
        until = time.monotonic() + _OUTAGE_S / self._scale
        self._until(lambda: not self._is_ready() and time.monotonic() >= until)
        self._services[name].recover()
        self._until_answered()
        self._until(self._is_ready)
        self.counts[f"outages of {name}"] += 1

    def _is_ready(self) -> bool:
        return self._scraped[-1].get(("detection_ready",)) == 1

    def _until_answered(self) -> None:
        """Waits for the outcomes of all images and requests that have been asked for by now."""
        asked = self._feed.images | self._feed.requests
        self._until(lambda: asked <= self._answered, lambda: f"no outcome: {asked - self._answered}")

    def _until(self, holds: Callable[[], bool], more: Callable[[], str] = str) -> None:
        wait_until(holds, lambda: f"{self._job.output()[-4000:]}\n{more()}", self._job)

    def _figures(self, code: int) -> dict[str, Any]:
        codes = {"stream": code}
        for module, *arguments in (self._compact, self._check):
            codes[module] = ForkedJob(arguments, self._folder / f"{module}.log", module=module).wait()
        rows, dead = (self._rows(kind) for kind in ("detections", "dead_letters"))
        feed = self._feed
        with_row, with_letter = ({uri for uri, *_ in found} for found in (rows, dead))
        return {
            "images": len(feed.images),
            "requests": len(feed.requests),
            **self.counts,
            "lost_images": sorted((feed.images - feed.damaged - with_row) | (feed.damaged - with_letter)),
            "duplicate_rows": sorted(row for row, number in (rows + dead).items() if number > 1),
            "lost_answers": sorted(feed.requests - self._answered),
            "incomplete_answers": sorted(self._incomplete),
            "exit_codes": codes,
            "last_process": self._last_process(),
        }

    def _rows(self, kind: str) -> Counter[tuple[str, ...]]:
        """How many rows each image, generation, model version and settings has."""
        columns = ["uri", "generation", "model", "version", "settings"]
        batches = (batch for _, batch in ResultsFolder(self._archive, (kind,)).batches(columns=columns))
        return Counter(tuple(row.values()) for batch in batches for row in batch.to_pylist())

    def _last_process(self) -> dict[str, Any]:
        """What the last process used: the medians of the second and of the last quarter of its life."""
        scraped = [each for each in self._scraped if each]
        started = ("process_start_time_seconds",)
        samples = [each for each in scraped if each[started] == scraped[-1][started]]
        quarter = len(samples) // 4
        used: dict[str, Any] = {"samples": len(samples)}  # one a second
        for name, (metric, unit) in _GAUGES.items():
            values = [each[metric,] / unit for each in samples]
            early, late = values[quarter : 2 * quarter] or values, values[-quarter:]
            used[name] = [round(statistics.median(some), 1) for some in (early, late)]
        return used


def faults(figures: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, but for growth."""
    empty = ("lost_images", "duplicate_rows", "lost_answers", "incomplete_answers")
    wrong = [f"{name}: {figures[name]}" for name in empty if figures[name]]
    return wrong + [f"{name} ended with {code}" for name, code in figures["exit_codes"].items() if code]


def growth(figures: Mapping[str, Any]) -> list[str]:
    """What the last process used more of at its end than `_FLAT` allows."""
    used = [(name, *figures["last_process"][name], most) for name, most in _FLAT.items()]
    return [f"{name} grew from {early} to {late}" for name, early, late, most in used if late > early + most]


def _new_bucket(storage: str) -> Any:
    """A new bucket, reached directly."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage as gcs

    client = gcs.Client(project="test-project", credentials=AnonymousCredentials(), client_options={"api_endpoint": storage})
    return client.create_bucket("soak")


def main() -> int:
    """Runs the soak; returns 0 if nothing was lost, duplicated or grew."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--minutes", type=float, default=60.0)
    flags.add_argument("--hours", type=int, default=24, help="simulated in these minutes (default: %(default)s)")
    flags.add_argument("--rate", type=float, default=5.0, help="new images a second (default: %(default)s)")
    given = flags.parse_args()
    folder = (BENCH / "out" / "soak").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with running_pubsub_emulator() as emulator, running_strict_gcs_emulator() as storage:
            figures = Soak(emulator, storage, folder, given.hours * 60 / given.minutes, given.rate).run(given.hours)
    except EmulatorMissing as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2))
    (BENCH / "soak.json").write_text(json.dumps(figures, indent=2))
    wrong = [*faults(figures), *growth(figures)]
    print(*(wrong or ["nothing lost, no duplicates, flat"]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
