"""Measures the streaming job on Google's Pub/Sub emulator: `python -m tests.benchmarks.streaming [WHAT …] [--quick] [--apart]`.

    throughput   a backlog, beside the batch job
    objects      a backlog of objects in a storage emulator that answers 50 ms late, with an engine that costs nothing
    latency      p50 and p99 from publishing to receiving, for one image alone and at half of the throughput
    documented   a backlog of messages with images, beside the stream of Beam's documentation; only where it is named

Publisher, emulator (Java) and job share this machine's cores; so does everything here that receives. With `--apart` jobs have all
cores but one, and everything else has that one. CPU time is an image's, in the process that detects (`detecting`), in this and
its feeder processes, or in all that is no job (`beside`). Rates are those of the middle eight tenths of the images.
`make bench-peers` makes the environment of Beam's stream.
Figures go to `.bench/streaming.json`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import itertools
import json
import operator
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from tests.benchmarks.contenders import CONFIG, ours
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.peers import python_of
from tests.benchmarks.rounds import run_once
from tests.benchmarks.work import NOTES
from tests.emulator_fixtures import new_bucket
from tests.emulators import PubSubEmulator, publish, running_pubsub_emulator, running_strict_gcs_emulator
from tests.processes import running, wait_until
from tests.streaming_job import CuttableProxy, StreamingJob

FREE_ENGINE = "tests.benchmarks.free_engine:open_model"


class Received(NamedTuple):
    """When a message came out, in seconds since the epoch, and the time of the event it answers, where it names one."""

    at: float
    event_time: str


class Backlog(NamedTuple):
    """What it took to detect in the images of a backlog; CPU milliseconds of an image."""

    images_per_second: float
    cpu_ms: float
    detecting_cpu_ms: float
    beside_cpu_ms: float


@contextlib.contextmanager
def receiving(emulator: PubSubEmulator, subscription: str) -> Iterator[list[Received]]:
    """Yields the list to which messages of a subscription come while the block runs."""
    received: list[Received] = []

    def take(message: Any) -> None:
        received.append(Received(time.time(), message.attributes.get("event_time", "")))
        message.ack()

    pulling = emulator.subscriber().subscribe(subscription, take)
    try:
        yield received
    finally:
        pulling.cancel()
        pulling.result()


class Bench:
    """One measurement after the other, each with a job on these cores, topics and a folder; with small numbers if `quick`."""

    def __init__(self, emulator: PubSubEmulator, quick: bool, cores: set[int]):
        self._emulator, self._quick, self._cores = emulator, quick, cores
        self._images = [path.read_bytes() for path in sorted(make_images(SMALL).glob("*.jpg"))]
        self._rate: float | None = None
        make_model()

    def throughput(self) -> dict[str, Any]:
        """A backlog of URIs that is there when the job starts, and the batch job, in turns over the same images."""
        count, rounds = (256, 1) if self._quick else (1024, 3)
        links = link_images(make_images(SMALL), (BENCH / f"links-{count}").resolve(), count)
        output = BENCH / "out" / "batch_beside_streaming"
        streams, batch_rates, batch_cpu_ms = [], [], []
        for number in range(rounds):
            with self._job("--allow-uri-prefix", str(links)) as (job, received):
                job.publish(*(json.dumps({"uri": str(path)}).encode() for path in sorted(links.iterdir())))
                streams.append(self._backlog(job, received, count))
            with _on(self._cores):
                run = run_once("batch beside streaming", ours(), number, links, output)
            batch_cpu_ms.append(round(1e3 * run.cpu_seconds_per_image, 2))
            seconds, images = np.transpose(json.loads((output / "summary.json").read_text())["throughput"])
            batch_rates.append(_steady_rate(seconds, np.cumsum(images)))
        rates, cpu_ms, _, beside_cpu_ms = (list(column) for column in zip(*streams, strict=True))
        self._rate = statistics.median(rates)
        return {
            "images_per_second": rates,
            "cpu_ms": cpu_ms,
            "beside_cpu_ms": beside_cpu_ms,
            "batch_sizes": json.loads((job.archive / "summary.json").read_text())["batch_sizes"],
            "batch_images_per_second": batch_rates,
            "batch_cpu_ms": batch_cpu_ms,
            "share_of_batch": _shares(rates, batch_rates),
            "cpu_beside_batch": _shares(cpu_ms, batch_cpu_ms),
        }

    def objects(self) -> dict[str, Any]:
        """A backlog that is named by notifications, which have the generation of an object, and one that is named by URIs."""
        count, figures = 256 if self._quick else 1024, {}
        with running_strict_gcs_emulator() as url, pytest.MonkeyPatch.context() as patch:
            bucket = new_bucket(url, patch)
            blobs = [bucket.blob(f"{number}.jpg") for number in range(count)]
            for blob, content in zip(blobs, itertools.cycle(self._images), strict=False):
                blob.upload_from_string(content)
            patch.setenv("STORAGE_EMULATOR_HOST", f"http://{CuttableProxy(url.removeprefix('http://'), 0.05).host}")
            place, kind = f"gs://{bucket.name}", {"eventType": "OBJECT_FINALIZE", "bucketId": bucket.name}
            named = [kind | {"objectId": each.name, "objectGeneration": f"{each.generation}"} for each in blobs]
            notices = [(b'{"size": "%d"}' % each.size, fields) for each, fields in zip(blobs, named, strict=True)]
            for name, messages in {"notifications": notices, "URIs": [f"{place}/{each.name}".encode() for each in blobs]}.items():
                with self._job("--allow-uri-prefix", place, "--engine", FREE_ENGINE) as (job, received):
                    job.publish(*messages)
                    figures[name] = self._backlog(job, received, count)._asdict()
        return figures

    def latency(self) -> dict[str, Any]:
        """One image alone, every half second; then a steady rate of half the throughput."""
        alone_count, seconds = (10, 10) if self._quick else (40, 60)
        rate = (self._rate or self.throughput()["images_per_second"][0]) / 2
        with self._job() as (job, received):
            self._start(job)
            self._at_rate(job, received, 16, 16.0, 0)
            alone = self._at_rate(job, received, alone_count, 2.0, 1000)
            loaded = self._at_rate(job, received, int(rate * seconds), rate, 10_000)
            _end(job)
        alone_ms, loaded_ms = _percentiles(alone), _percentiles(loaded)
        return {
            "rate": round(rate, 1),
            "images": len(received),
            "alone_ms": alone_ms,
            "loaded_ms": loaded_ms,
            "p99_to_p50": round(loaded_ms["p99"] / loaded_ms["p50"], 2),
            "p50_to_alone": round(loaded_ms["p50"] / alone_ms["p50"], 2),
        }

    def documented(self) -> dict[str, Any]:
        """A backlog of messages that carry their images, and the stream of Beam's documentation, in turns over the same ones."""
        count, rounds = (64, 1) if self._quick else (256, 3)
        messages = [(self._images[number % len(self._images)], {"name": f"{number}"}) for number in range(count)]
        rates, documented, sizes = [], [], BENCH / "out" / "documented_batches"
        sizes.unlink(missing_ok=True)
        for _ in range(rounds):
            with self._job() as (job, received):
                job.publish(*messages)
                rates.append(self._backlog(job, received, count).images_per_second)
            documented.append(self._documented(messages, sizes))
        return {
            "images_per_second": rates,
            "documented_images_per_second": documented,
            "of_documented": _shares(rates, documented),
            "documented_batches_of_size": collections.Counter(sorted(map(int, sizes.read_text().split()))),
        }

    def _documented(self, messages: Sequence[tuple[bytes, dict[str, str]]], sizes: Path) -> float:
        images, subscription = self._emulator.create(ack_deadline_seconds=60)
        topic, results = self._emulator.create()
        publish(self._emulator.publisher(), images, *messages)
        command = [python_of("frameworks"), "-m", "tests.benchmarks.peers.beam_stream"]
        command += [subscription, topic, f"{BENCH / 'model'}", f"{sizes}"]
        environment = {**os.environ, "PUBSUB_EMULATOR_HOST": self._emulator.host, NOTES: f"{BENCH / 'out'}"}
        log = BENCH / "out" / "documented.log"
        with (
            receiving(self._emulator, results) as received,
            log.open("wb") as said,
            _on(self._cores),
            running(command, env=environment, stdout=said, stderr=said) as process,
        ):
            wait_until(lambda: len(received) >= len(messages), log.read_text, process)
        return _rate_of(received)

    @contextlib.contextmanager
    def _job(self, *flags: str) -> Iterator[tuple[StreamingJob, list[Received]]]:
        folder = BENCH / "out" / "streaming"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = ("--mode", "streaming", "--runner", "DirectRunner", *flags)
        job = StreamingJob(self._emulator, folder.resolve(), "", *flags, config=CONFIG)
        with receiving(self._emulator, job.detections) as received:
            try:
                yield job, received
            finally:
                job.__exit__()

    def _start(self, job: StreamingJob) -> None:
        with _on(self._cores):
            job.start()

    def _backlog(self, job: StreamingJob, received: list[Received], count: int) -> Backlog:
        """Runs a job until it has brought so many images, which are published already, to their results."""
        self._start(job)
        looks = []
        for share in (0.1, 0.9):
            wait_until(lambda least=share * count: len(received) >= least, job.output, job)
            own, in_all = _cpu_seconds(psutil.Process(job.pid))
            looks.append((len(received), in_all, own, _cpu_seconds(psutil.Process())[1] - in_all))
        wait_until(lambda: len(received) >= count, job.output, job)
        _end(job)
        images, *seconds = (after - before for before, after in zip(*looks, strict=True))
        return Backlog(_rate_of(received), *(round(each / images * 1e3, 2) for each in seconds))

    def _at_rate(self, job: StreamingJob, received: list[Received], count: int, rate: float, first: int) -> list[float]:
        """Publishes at a steady rate; latencies in milliseconds."""
        before, started = len(received), time.time()
        for n in range(count):
            time.sleep(max(0.0, started + n / rate - time.time()))
            job.publish((self._images[n % len(self._images)], {"name": str(first + n)}))
        wait_until(lambda: len(received) >= before + count, job.output, job)
        return [(each.at - datetime.datetime.fromisoformat(each.event_time).timestamp()) * 1e3 for each in received[before:]]


def main() -> None:
    """Runs the measurements that are named, or all."""
    every = ("throughput", "objects", "latency")
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("what", nargs="*", choices=[*every, "documented", []], help="default: all but documented")
    flags.add_argument("--quick", action="store_true", help="small numbers, to see that it works")
    flags.add_argument("--apart", action="store_true", help="the last core is for the emulator and for this process")
    given = flags.parse_args()
    results: dict[str, Any] = {}
    cores = os.sched_getaffinity(0)
    if given.apart:
        os.sched_setaffinity(0, {max(cores)})  # threads and processes that start from here on inherit it
        cores -= {max(cores)}
    with running_pubsub_emulator() as emulator:
        bench = Bench(emulator, given.quick, cores)
        for what in given.what or every:
            results[what] = figures = getattr(bench, what)()
            print(what, json.dumps(figures, indent=2), flush=True)
    (BENCH / "streaming.json").write_text(json.dumps(results, indent=2))


def _end(job: StreamingJob) -> None:
    if code := job.signal(signal.SIGTERM):
        raise SystemExit(f"the job ended with {code}:\n{job.output()[-2000:]}")


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """Within the block this thread is on these cores, and so are the processes that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """User and system time of a process, and of this and its children."""
    own, *children = (sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))
    return own, own + sum(children)


def _steady_rate(seconds: Sequence[float], done: np.ndarray) -> float:
    """Images/s without the first and the last tenth: the slope of the images that are done at each of these times."""
    middle = (done >= 0.1 * done[-1]) & (done <= 0.9 * done[-1])
    return round(float(np.polyfit(np.asarray(seconds)[middle] - seconds[0], done[middle], 1)[0]), 2)


def _rate_of(received: Sequence[Received]) -> float:
    times = sorted(message.at for message in received)
    return _steady_rate(times, np.arange(len(times)))


def _shares(figures: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The quotients of the rounds: their median, the least and the largest."""
    quotients = [round(each, 3) for each in map(operator.truediv, figures, others)]
    return {"median": statistics.median(quotients), "least": min(quotients), "most": max(quotients)}


def _percentiles(values: list[float]) -> dict[str, float]:
    shares = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, share)), 1) for name, share in shares.items()}


if __name__ == "__main__":
    main()
