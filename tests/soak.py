"""A soak test of a stream: `make soak`, or `python -m tests.soak [--minutes 60] [--hours 24]`.

It simulates `--hours` hours in `--minutes` minutes. Scaled by that factor are the windows of the archive (60 s), the memory of
repeats (10 min), the look for model versions (30 s), and the length and distance of events. Not scaled: locks, deadlines of
Pub/Sub, the watchdog.

In each hour storage and Pub/Sub are away for five minutes each, a model version is released, and a compaction runs beside the
stream. In each hour of the first third the job is killed once, and once restarted by SIGTERM. The last process then runs for two
thirds of the time, and its metrics show whether memory, threads and open files stay flat.

At the end each image has one row of a model version, each request a complete answer, and a reconciliation finds nothing missing.
Exit code 0: so it is; 1: it is not; 2: an emulator is missing. Figures go to `.bench/soak.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.results.shards import shard_of_name
from tests.benchmarks.images import BENCH
from tests.bright_model import export_bright_model
from tests.conftest import write_bright_image
from tests.emulators import EmulatorMissing, PubSubEmulator, free_ports, running_pubsub_emulator, running_strict_gcs_emulator
from tests.forked_jobs import ForkedJob
from tests.monitoring.prometheus import samples_of
from tests.processes import wait_until
from tests.streaming_job import CuttableProxy, StreamingJob

_HOUR_S = 3600.0
_OUTAGE_S, _WINDOW_S, _DEDUPLICATE_S, _POLL_S = 300.0, 60.0, 600.0, 30.0  # in simulated time
_GAUGES = {"rss_mb": ("process_resident_memory_bytes", 1e6), "threads": ("detection_threads", 1), "fds": ("process_open_fds", 1)}
_KILLED = f"restarts by SIGKILL, exit code {-signal.SIGKILL}"
FLAT = {"rss_mb": 10.0, "threads": 3.0, "fds": 8.0}  # so much more is no growth
_DAMAGED = 50  # one image in so many


class Sample(NamedTuple):
    """What a scrape of the job showed; `process` is its start time."""

    at: float
    process: float
    values: Mapping[str, float]


class Feed:
    """Asks for new images at a steady rate, in a thread of its own: by notifications of Cloud Storage, inline, and three in a
    request; some repeatedly.

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
        for number in itertools.count():
            made = len(self.images)
            self._job.publish((self._notice, self._inline, self._request)[number % 3]())
            if number % 10 == 9:
                self._job.publish(self._asked_for(self._uri(self._last)))
            if left.wait((len(self.images) - made) / self._rate):
                return

    def _notice(self) -> tuple[bytes, dict[str, str]]:
        self._upload()
        made = {"objectId": self._last.name, "objectGeneration": str(self._last.generation)}
        return b"{}", {"eventType": "OBJECT_FINALIZE", "bucketId": self._bucket.name, **made}

    def _inline(self) -> tuple[bytes, dict[str, str]]:
        name = f"inline-{next(self._numbers)}"
        self.images.add(f"inline:{name}")
        return self._content, {"name": name}

    def _request(self) -> bytes:
        return self._asked_for(*(self._upload() for _ in range(3)))

    def _asked_for(self, *uris: str) -> bytes:
        asked = f"request-{next(self._numbers)}"
        self.requests.add(asked)
        return json.dumps({"request_id": asked, "images": uris}).encode()

    def _upload(self) -> str:
        number = next(self._numbers)
        damaged = number % _DAMAGED == 0
        self._last = self._bucket.blob(f"in/{number:06d}.png")
        self._last.upload_from_string(b"no image" if damaged else self._content)
        uri = self._uri(self._last)
        self.images.add(uri)
        self.damaged.update([uri] if damaged else [])
        return uri

    def _uri(self, blob: Any) -> str:
        return f"gs://{self._bucket.name}/{blob.name}"


class Received:
    """What a topic got, received in a thread of its own: for each image or request when messages came, by Pub/Sub's clock."""

    def __init__(self, emulator: PubSubEmulator, subscription: str, name: str):
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.incomplete: set[str] = set()
        self._emulator, self._subscription, self._name = emulator, subscription, name

    def receive(self, left: threading.Event) -> None:
        """Receives until `left` is set."""
        from google.api_core import exceptions

        client = self._emulator.subscriber()
        while not left.is_set():
            with contextlib.suppress(exceptions.DeadlineExceeded, exceptions.ServiceUnavailable):
                answer = client.pull(subscription=self._subscription, max_messages=100, timeout=1)
                for received in answer.received_messages:
                    self._add(received.message)
                if ids := [received.ack_id for received in answer.received_messages]:
                    client.acknowledge(subscription=self._subscription, ack_ids=ids)

    def _add(self, message: Any) -> None:
        name = message.attributes[self._name]
        self.times[name].append(message.publish_time.timestamp())
        if b'"complete": false' in message.data[:200]:
            self.incomplete.add(name)

    def repeated(self) -> Iterator[tuple[float, float]]:
        """When each message came that repeats one, with the time of that one."""
        for times in self.times.values():
            yield from itertools.pairwise(sorted(times))


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
        self._scale, self._folder, self._versions = scale, folder, folder / "versions"
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._seen: Mapping[tuple[str, ...], float] = {}
        self._disturbed: list[tuple[float, float]] = []
        self._version = 0
        self._saved = Path(export_bright_model(folder / "saved" / "1"), "1")
        self._versions.mkdir()
        self._release()
        self._storage, self._pubsub = CuttableProxy(storage.removeprefix("http://")), CuttableProxy(emulator.host)
        self._variables = {"STORAGE_EMULATOR_HOST": f"http://{self._storage.host}", "NO_GCE_CHECK": "true"}
        self.bucket = _bucket(storage)
        self.archive = f"gs://{self.bucket.name}/archive"
        (self._port,) = free_ports(1)
        self._job = StreamingJob(
            emulator, folder, str(self._versions), *self._flags(), host=self._pubsub.host, killed=forked, forked=forked
        )
        write_bright_image(folder / "bright.png", (64, 48), (10, 12, 30, 36))
        self.feed = Feed(self._job, self.bucket, (folder / "bright.png").read_bytes(), rate)
        self.results = Received(emulator, self._job.detections, "image_uri")
        self.letters = Received(emulator, self._job.dead_letters, "image_uri")
        self.answers = Received(emulator, self._job.answers, "request_id")
        self._topics = (self.results, self.letters, self.answers)

    def _flags(self) -> list[object]:
        flags: list[object] = ["--archive", self.archive, "--metrics-port", self._port, "--metrics-host", "127.0.0.1"]
        flags += ["--allow-uri-prefix", f"gs://{self.bucket.name}/in/", "--answer-deadline-s", 600]
        scaled = (("shard-seconds", _WINDOW_S), ("deduplicate-s", _DEDUPLICATE_S), ("model-poll-s", _POLL_S))
        for name, seconds in scaled:
            flags += [f"--{name}", max(1.0, round(seconds / self._scale, 3))]
        return flags

    def run(self, hours: int) -> dict[str, Any]:
        """Runs so many simulated hours; returns the figures."""
        started = time.monotonic()
        with mock.patch.dict(os.environ, self._variables):
            code = self._lived(hours)
            return self._figures(code, time.monotonic() - started)

    def _lived(self, hours: int) -> int:
        """Runs the job through all that happens to it; returns its exit code."""
        fed, left = threading.Event(), threading.Event()
        work: list[Future[None]] = []
        with ThreadPoolExecutor() as pool:
            try:
                self._job.start()
                work += [pool.submit(each, left) for each in (*(topic.receive for topic in self._topics), self._watch)]
                feeding = pool.submit(self.feed.publish, fed)
                self._live(hours, fed)
                feeding.result()  # else what it asks for last is neither waited for nor detected
                self._until_done()
                code = self._job.signal(signal.SIGTERM)
            finally:
                fed.set()
                left.set()
                self._job.__exit__()
        for each in work:
            each.result()  # raises what it raised
        return code

    def _live(self, hours: int, fed: threading.Event) -> None:
        started = time.monotonic()
        for hour in range(hours):
            self._hour(restart=hour < max(1, hours // 3))
            _say(f"hour {hour + 1} of {hours}: {self._so_far()}")
            fed.wait(max(0.0, started + (hour + 1) * _HOUR_S / self._scale - time.monotonic()))
        fed.set()

    def _hour(self, restart: bool) -> None:
        with self._command("compact", "pipeline.compact", "--output", self.archive) as compaction:
            self._swap()
            self._outage("storage", self._storage)
            self._outage("pubsub", self._pubsub)
            if restart:
                self._restart(signal.SIGKILL)
                self._restart(signal.SIGTERM)
            self.counts[f"compactions that ended with {compaction.wait()}"] += 1

    def _swap(self) -> None:
        self._release()
        self._until(lambda: any(key[0] == "detection_model_info" and key[-1] == str(self._version) for key in self._seen))
        self.counts["swaps"] += 1

    def _release(self) -> None:
        self._version += 1
        shutil.copytree(self._saved, self._versions / "unfinished", copy_function=os.link)
        (self._versions / "unfinished").rename(self._versions / str(self._version))
        shutil.rmtree(self._versions / str(self._version - 2), ignore_errors=True)

    def _outage(self, name: str, proxy: CuttableProxy) -> None:
        """Cuts a service off, at least until the job says so."""
        with self._disturbing():
            proxy.cut()
            until = time.monotonic() + _OUTAGE_S / self._scale
            self._until(lambda: not self._is_ready() and time.monotonic() >= until)
            proxy.mend()
            self._until_done()
            self._until(self._is_ready)
        self.counts[f"outages of {name}"] += 1

    def _is_ready(self) -> bool:
        return self._seen.get(("detection_ready",)) == 1

    def _restart(self, number: signal.Signals) -> None:
        with self._disturbing():
            code = self._job.signal(number)
            self.counts[f"restarts by {number.name}, exit code {code}"] += 1
            self._job.start()
            self._until_done()
            self._until(self._is_ready)

    @contextlib.contextmanager
    def _disturbing(self) -> Iterator[None]:
        began = time.time()
        yield
        self._disturbed.append((began, time.time()))

    def _until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, self._printed, self._job)

    def _until_done(self) -> None:
        """Waits for the outcomes of all images and requests that have been asked for by now."""
        missing = [*self.feed.images.copy(), *self.feed.requests.copy()]

        def done() -> bool:
            missing[:] = [name for name in missing if not any(name in topic.times for topic in self._topics)]
            return not missing

        wait_until(done, lambda: f"{self._printed()}\nno outcome: {missing}", self._job)

    def _printed(self) -> str:
        return self._job.output()[-4000:]

    def _command(self, log: str, module: str, *arguments: str) -> ForkedJob:
        return ForkedJob(arguments, self._folder / f"{log}.log", module=module)

    def _watch(self, left: threading.Event) -> None:
        """Scrapes the job's metrics every second."""
        while not left.wait(1.0):
            self._seen = self._scraped()
            if self._seen:
                values = {name: self._seen[metric,] / unit for name, (metric, unit) in _GAUGES.items()}
                self.samples.append(Sample(time.time(), self._seen["process_start_time_seconds",], values))

    def _scraped(self) -> Mapping[tuple[str, ...], float]:
        """The job's metrics; none while it starts."""
        with contextlib.suppress(OSError):
            return samples_of(self._port)
        return {}

    def _so_far(self) -> str:
        last = self.samples[-1].values if self.samples else {}
        seen = [f"{value:.0f} {name}" for name, value in last.items()]
        return ", ".join([f"{len(self.results.times)} images", *(f"{n} {name}" for name, n in self.counts.items()), *seen])

    def _figures(self, code: int, seconds: float) -> dict[str, Any]:
        compacted = self._command("compact", "pipeline.compact", "--output", self.archive).wait()
        inputs = ["--input", f"gs://{self.bucket.name}/in/**", "--output", self.archive]
        reconciled = self._command("reconcile", "pipeline.reconcile", *inputs).wait()
        return {
            "minutes": round(seconds / 60, 1),
            "simulated_hours": round(seconds * self._scale / _HOUR_S, 1),
            "images": len(self.feed.images),
            "requests": len(self.feed.requests),
            **self.counts,
            **self.archived(),
            **self._published(),
            "exit_codes": {"stream": code, "compact": compacted, "reconcile": reconciled},
            "last_process": self._last_process(),
        }

    def archived(self) -> dict[str, int]:
        """What is wrong with the archive."""
        rows, dead = (self._rows(kind) for kind in ("detections", "dead_letters"))
        uris, dead_uris = {row[0] for row in rows}, {row[0] for row in dead}
        lost = (self.feed.images - self.feed.damaged - uris) | (self.feed.damaged - dead_uris)
        if lost:
            _say(f"lost, with the times of their results: { {uri: self.results.times.get(uri) for uri in sorted(lost)} }")
        return {
            "lost_images": len(lost),
            "doubled_rows": sum(n - 1 for n in (rows + dead).values()),
            "rows_of_a_second_version": len(rows) - len(uris),
            "uncounted_images": sum(map(_uncounted, self._summaries())),
            "staging_files": self._unfinished() - self.counts[_KILLED],
        }

    def _published(self) -> dict[str, int]:
        return {
            "lost_answers": len(self.feed.requests - self.answers.times.keys()),
            "incomplete_answers": len(self.answers.incomplete),
            "repeated_results": sum(1 for _ in self.results.repeated()),
            "repeated_answers": sum(1 for _ in self.answers.repeated()),
            "repeated_without_a_cause": sum(map(self._without_a_cause, (self.results, self.answers))),
        }

    def _without_a_cause(self, topic: Received) -> int:
        """Messages that repeat another though neither a restart nor an outage came between: a restart forgets, a cut hides."""
        return sum(all(end < first or second < began for began, end in self._disturbed) for first, second in topic.repeated())

    def _rows(self, kind: str) -> Counter[tuple[str, str, str]]:
        """How many rows each image, generation and model version has."""
        found: Counter[tuple[str, str, str]] = Counter()
        for shard in self.shards(kind):
            found.update(zip(*read_table(shard, ["uri", "generation", "version"]).to_pydict().values(), strict=True))
        return found

    def _unfinished(self) -> int:
        """The number of files in folders of unfinished files; a run that is killed leaves one, for a day."""
        return sum("/.staging" in blob.name for blob in self.bucket.list_blobs(prefix="archive/"))

    def shards(self, kind: str) -> list[Any]:
        """The objects of a kind's shards."""
        return [blob for blob in self.bucket.list_blobs(prefix=f"archive/{kind}/") if shard_of_name(blob.name)]

    def _summaries(self) -> Iterator[Mapping[str, int]]:
        """The counts of images of each run that was not killed."""
        for blob in self.bucket.list_blobs(prefix="archive/"):
            if blob.name.endswith("/summary.json"):
                yield json.loads(blob.download_as_bytes())["images"]

    def _last_process(self) -> dict[str, Any]:
        """What the last process used: the medians of the second and of the last quarter of its life."""
        samples = [sample for sample in self.samples if sample.process == self.samples[-1].process]
        quarter = len(samples) // 4
        early, late = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
        used: dict[str, Any] = {"minutes": round((samples[-1].at - samples[0].at) / 60, 1), "samples": len(samples)}
        for name in FLAT:
            values = [[sample.values[name] for sample in some] for some in (early, late)]
            used[name] = [round(statistics.median(each), 1) for each in values]
        return used


def faults(figures: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, but for growth."""
    none = ("lost_images", "lost_answers", "incomplete_answers", "doubled_rows", "repeated_without_a_cause", "uncounted_images")
    wrong = [f"{name}: {figures[name]}" for name in (*none, "staging_files") if figures[name]]
    wrong += [f"{name} ended with {code}" for name, code in figures["exit_codes"].items() if code]
    if figures["rows_of_a_second_version"] > figures["repeated_results"]:
        wrong.append("more rows of a second version than repeats")
    return wrong


def _uncounted(images: Mapping[str, int]) -> int:
    return abs(images["read"] - images["detected"] - images["dead"] - images["skipped"])


def growth(figures: Mapping[str, Any]) -> list[str]:
    """What the last process used more of at its end than `FLAT` allows."""
    used = figures["last_process"]
    return [
        f"{name} grew from {early} to {late}"
        for name, most in FLAT.items()
        for early, late in [used[name]]
        if late > early + most
    ]


def read_table(shard: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of an object."""
    return pq.read_table(io.BytesIO(shard.download_as_bytes()), columns=columns)


def _bucket(storage: str) -> Any:
    """A new bucket, reached directly."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage as gcs

    client = gcs.Client(project="test-project", credentials=AnonymousCredentials(), client_options={"api_endpoint": storage})
    return client.create_bucket("soak")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    """Runs the soak; returns 0 if nothing was lost, doubled or grew."""
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
    print(*(wrong or ["nothing lost, nothing doubled, flat"]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
