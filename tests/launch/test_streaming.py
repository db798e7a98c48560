"""Streaming as a user runs it: real Pub/Sub and Cloud Storage emulators, and a real model."""

import base64
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import types
from pathlib import Path

import pytest

from pipeline import run
from pipeline.records import row_bytes
from tests.conftest import write_bright_image
from tests.launch.jobs import needs_prism, rows_of
from tests.processes import wait_until
from tests.shard_rows import rows_in
from tests.streaming_job import CONFIG, CuttableProxy, StreamingJob

IMAGES = 500
INPUT_TOPIC = "the topic that feeds the input"


def is_broken(uri: str) -> bool:
    return Path(uri).name in BROKEN


def uris_of(rows: list[dict]) -> list:
    return sorted((row["image"].get("uri") for row in rows), key=str)


def by_uri(rows: list[dict]) -> dict[str, dict]:
    return {row["image"]["uri"]: row for row in rows}


def rows_in_messages(messages: list) -> list[dict]:
    return [json.loads(message.data) for message in messages]


HOSTILE = [b"hello", b"{", b'{"images": []}', b'{"uri": "/etc/passwd"}', b'["file:///etc/passwd"]', b'{"bytes": "?"}']
REFUSED = {
    "empty": b'{"request_id": "empty", "images": []}',
    "oversized": json.dumps({"request_id": "oversized", "images": [f"gs://b/{n}" for n in range(1001)]}).encode(),
    "no list": b'{"request_id": "no list", "images": 3}',
}
INLINE_BROKEN = b"\xff\xd8\xff\xe0 not a whole JPEG"
DEAD = 13  # all of these, the broken files, and the broken bytes
BROKEN = {"empty.jpg": b"", "text.jpg": b"no image", "cut.jpg": b"\xff\xd8\xff\xe0\0\x10JFIF"}


@pytest.fixture(scope="module")
def ended(_pubsub_process, tmp_path_factory, bright_model) -> types.SimpleNamespace:
    """What is left of a job that was fed everything at once and then ended with SIGTERM."""
    folder = tmp_path_factory.mktemp("stream")
    random.seed(5)
    for n in range(IMAGES):
        x, y = random.randrange(60), random.randrange(40)
        write_bright_image(folder / "in" / f"{n:03d}.jpg", (160, 120), (x, y, x + 20 + n % 50, y + 15 + n % 60))
    for name, content in BROKEN.items():
        (folder / "in" / name).write_bytes(content)
    images = sorted(str(path) for path in (folder / "in").iterdir())
    left, sizes = iter(images), itertools.cycle((1, 3, 11, 40))
    asked = iter(lambda: [*itertools.islice(left, next(sizes))], [])
    requests = {f"r{number}": uris for number, uris in enumerate(asked)}
    asking = [{"request_id": name, "images": [{"uri": uri} for uri in uris]} for name, uris in requests.items()]
    notice = (b"{}", {"eventType": "OBJECT_DELETE", "bucketId": "bucket", "objectId": "x.jpg", "objectGeneration": "1"})
    singly = [{"uri": uri} for uri in images if not is_broken(uri)]  # what fails is tried again when it is asked for again
    mixed = [*asking, *singly, *singly, *HOSTILE, *REFUSED.values(), INLINE_BROKEN, notice]
    messages = [json.dumps(m).encode() if isinstance(m, dict) else m for m in mixed]
    random.shuffle(messages)

    # the model is so quick that it would take each image at once: only waiting shows that batches form
    flags = ("--allow-uri-prefix", "gs://", folder / "in", "--shard-seconds", "2", "--batch-timeout-ms", "20")
    with StreamingJob(_pubsub_process, folder, bright_model, *flags, forked=False) as job:
        job.publish(*messages)
        wanted = {job.detections: IMAGES, job.dead_letters: DEAD, job.answers: len(requests) + len(REFUSED)}
        taken = [job.take(topic, count) for topic, count in wanted.items()]
        code = job.signal(signal.SIGTERM)
        detections, dead_letters, answers = ([*some, *job.rest(topic)] for topic, some in zip(wanted, taken, strict=True))
    published = {"detections": detections, "dead_letters": dead_letters, "answers": answers}
    return types.SimpleNamespace(folder=folder, job=job, images=images, requests=requests, code=code, **published)


def test_batch_and_stream_give_equal_rows(ended, run_job, bright_model, tmp_path):
    """On the topic and in the archive, each once although it was asked for three times, and the same dead letters."""
    assert run_job("--input", ended.folder / "in", "--output", tmp_path / "out", "--model", bright_model)[0] == 0
    batch = rows_of(tmp_path / "out")
    assert len(batch) == IMAGES
    assert len({message.attributes["detection_id"] for message in ended.detections}) == IMAGES
    assert sorted(rows_in_messages(ended.detections), key=row_bytes) == batch
    assert rows_of(ended.job.archive) == batch
    dead = rows_of(tmp_path / "out", "dead_letters")
    assert [row for row in rows_of(ended.job.archive, "dead_letters") if is_broken(row["image"].get("uri", ""))] == dead
    assert len(dead) == len(BROKEN)


def test_what_is_no_request_is_a_dead_letter_and_stops_nothing(ended):
    """On the topic and in files; nothing outside the allowed prefixes is read."""
    rows = rows_in_messages(ended.dead_letters)
    assert len(rows) == DEAD
    payloads = {base64.b64decode(row.get("payload_base64", "")) for row in rows if row["stage"] == "message"}
    assert payloads == {*HOSTILE, *REFUSED.values()}
    inline = [row for row in rows if row["image"].get("uri", "").startswith("inline:")]
    assert [base64.b64decode(row["payload_base64"]) for row in inline] == [INLINE_BROKEN]
    assert sorted(map(str, rows)) == sorted(map(str, rows_of(ended.job.archive, "dead_letters")))
    assert sum(row["reason"] == "not_allowed" for row in rows) == 2
    ids = [message.attributes["request_id"] for message in ended.dead_letters if "request_id" in message.attributes]
    broken = [name for name, uris in ended.requests.items() for uri in uris if is_broken(uri)]
    assert sorted(ids) == sorted([*REFUSED, *broken]), "a refused request is known by the id in its JSON"


def test_each_request_is_answered_once_with_all_its_images(ended):
    """Also for images that another request or message asked for first; what failed is named; rows are those of the topic."""
    answers = rows_in_messages(ended.answers)
    assert all(answer["complete"] for answer in answers)
    answered = sorted((answer["request_id"], uris_of(answer["results"]), uris_of(answer["failed"])) for answer in answers)
    expected = [
        (name, [uri for uri in uris if not is_broken(uri)], [uri for uri in uris if is_broken(uri)])
        for name, uris in ended.requests.items()
    ]
    assert answered == sorted([*expected, *((name, [], [None]) for name in REFUSED)])
    rows = by_uri(rows_in_messages(ended.detections))
    assert all(row == rows[row["image"]["uri"]] for answer in answers for row in answer["results"])


def test_sigterm_ends_the_job_well(ended):
    """Exit code 0, summary and report are written, and their counts add up. A backlog makes full batches."""
    assert ended.code == 0 and "Traceback" not in ended.job.output(), ended.job.output()
    summary = json.loads((ended.job.archive / "summary.json").read_text())
    images = summary["images"]
    assert (images["detected"], images["dead"]) == (IMAGES, DEAD)
    most = 3 * len(ended.images) + len(HOSTILE) + len(REFUSED) + 2
    assert len(ended.images) < images["read"] <= most  # repeats may be left when it ends
    assert images["read"] == images["detected"] + images["dead"] + images["skipped"]
    assert summary["mode"] == "streaming"
    assert (ended.job.archive / "report.html").stat().st_size > 1000
    sizes = {int(size): count for size, count in summary["batch_sizes"].items()}
    in_batches = sum(size * count for size, count in sizes.items())
    assert in_batches >= IMAGES and in_batches / sum(sizes.values()) > max(sizes) / 2, "whatever the sizes of the requests"


@pytest.mark.parametrize("runner", ["direct", pytest.param("prism", marks=(needs_prism, pytest.mark.matrix))])
def test_a_message_is_acknowledged_only_when_its_row_is_durable_and_published(
    pubsub_emulator, tmp_path, bright_model, bright_png, runner
):
    """Killed after each of these steps the job loses nothing: what was not acknowledged comes again, under the same id."""
    config = f"configs/streaming_pubsub_{runner}.yaml"
    job = StreamingJob(pubsub_emulator, tmp_path, bright_model, "--shard-seconds", "1", config=config)
    ids: collections.defaultdict[str, set[str]] = collections.defaultdict(set)

    def published() -> set[str]:
        messages = job.rest(job.detections)
        for message in messages:
            ids[message.attributes["image_uri"]].add(message.attributes["detection_id"])
        return {message.attributes["image_uri"] for message in messages}

    def killed_after(step: str) -> set[str]:
        """What was published by a job that had one more image to read, and died with its first rows."""
        job.publish((bright_png, {"name": step, "request_id": step}))
        job.start(step)
        assert job.wait() == -signal.SIGKILL, job.output()
        return published()

    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(job.__exit__)
        in_topic = killed_after("published")
        assert in_topic and not rows_in(str(job.archive))
        killed_after("durable")
        archived = set(by_uri(rows_in(str(job.archive))))
        assert archived
        last = killed_after("acknowledged")
        job.start()
        came_again = set(last)
        wait_until(lambda: came_again.update(published()) or archived | in_topic <= came_again, job.output)
        wait_for_answers(job, {"published", "durable", "acknowledged"})
        assert job.signal(signal.SIGINT, group=True) == 0, job.output()
    everything = {"inline:published", "inline:durable", "inline:acknowledged"}
    assert set(ids) == set(by_uri(rows_in(str(job.archive)))) == everything
    assert [len(each) for each in ids.values()] == [1, 1, 1]


def wait_for_answers(job: StreamingJob, requests: set[str]) -> None:
    """Takes answers until each of these requests has one."""
    answered: set[str] = set()

    def all_came() -> bool:
        answered.update(json.loads(message.data)["request_id"] for message in job.take(job.answers, 1, timeout_s=5))
        return requests <= answered

    wait_until(all_came, job.output)


def test_a_request_whose_images_others_are_at_is_answered_also_when_the_job_is_killed(
    pubsub_emulator, gcs_bucket, tmp_path, bright_model, monkeypatch
):
    """It used to be acknowledged as soon as its own images were done, and nobody asked for its answer again.

    The job is killed while a repeat waits: the first request has an image in hand that the second asks for as well, and hangs at
    an object that cannot be read; what the second asked for alone is published, and so is an image of a third message, whose
    bundle came after the second's was final.
    """
    for name in ("both", "second", "third"):
        write_bright_image(tmp_path / "in" / f"{name}.png", (64, 48), (10, 12, 30, 36))
        for attempt in range(10):
            gcs_bucket.blob(f"out of reach {attempt}.png").upload_from_filename(str(tmp_path / "in" / f"{name}.png"))
    storage = CuttableProxy(os.environ["STORAGE_EMULATOR_HOST"].removeprefix("http://"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{storage.host}")

    def link(name: str) -> str:
        uri = str(tmp_path / "in" / f"{name}-{attempt}.png")
        os.link(tmp_path / "in" / f"{name}.png", uri)
        return uri

    def ask(name: str, *uris: str) -> None:
        job.publish(json.dumps({"request_id": f"{name} {attempt}", "images": uris}).encode())

    def published(uri: str, timeout_s: float) -> bool:
        done.update(message.attributes["image_uri"] for message in job.take(job.detections, 1, timeout_s=timeout_s))
        return uri in done

    flags = ("--allow-uri-prefix", "gs://", tmp_path / "in", "--feeder-processes", "2")  # on one core, too: one of them hangs
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, *flags, killed=True) as job:
        for attempt in range(10):  # a job that has just begun may have one bundle at a time, and all hangs
            done: set[str] = set()
            both, second, third = link("both"), link("second"), link("third")
            storage.cut()
            ask("first", both, f"gs://{gcs_bucket.name}/out of reach {attempt}.png")
            wait_until(lambda n=attempt + 1: job.output().count("storage fails") == n, job.output)
            ask("second", both, second)
            if published(second, timeout_s=5):
                break
            storage.recover()
            wait_until(lambda uri=both: published(uri, timeout_s=1), job.output)
        ask("third", third)
        wait_until(lambda: published(third, timeout_s=1), job.output)
        assert job.signal(signal.SIGKILL) == -signal.SIGKILL
        assert both not in done
        storage.recover()
        job.start()
        wait_for_answers(job, {f"{name} {attempt}" for name in ("first", "second", "third")})
        assert job.signal(signal.SIGTERM) == 0, job.output()


def test_a_stream_that_is_stopped_while_its_store_is_away_skips_what_it_cannot_read_and_the_next_one_detects_it(
    pubsub_emulator, gcs_bucket, tmp_path, bright_model, bright_png, monkeypatch
):
    """Also a repeat in another message. None is a dead letter, nor acknowledged."""
    uris = [f"gs://{gcs_bucket.name}/{name}.png" for name in "ab"]
    requests = [json.dumps({"request_id": name, "images": uris[:1]}).encode() for name in ("first", "second")]
    for name in "ab":
        gcs_bucket.blob(f"{name}.png").upload_from_string(bright_png)
    storage = CuttableProxy(os.environ["STORAGE_EMULATOR_HOST"].removeprefix("http://"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{storage.host}")
    with StreamingJob(pubsub_emulator, tmp_path, bright_model) as job:
        storage.cut()
        job.publish(*requests, uris[1].encode())
        wait_until(lambda: "storage fails" in job.output(), job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
        images = json.loads((job.archive / "summary.json").read_text())["images"]
        assert images["read"] == images["skipped"] > 0
        storage.recover()
        job.start()
        wait_for_answers(job, {"first", "second"})
        assert sorted(message.attributes["image_uri"] for message in job.take(job.detections, 2)) == uris
        assert job.signal(signal.SIGTERM) == 0, job.output()
        assert not job.rest(job.dead_letters)


def test_the_reports_of_a_stream_are_there_after_its_first_window(pubsub_emulator, tmp_path, bright_model, bright_png):
    """So one that is killed leaves them. The copies at the top are of runs that ended."""
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, "--shard-seconds", "1") as job:
        job.publish(bright_png)
        wait_until(lambda: [*job.archive.glob("runs/*/summary.json")], job.output)
        (path,) = job.archive.glob("runs/*/summary.json")
        renewed = json.loads(path.read_text())
        assert path.with_name("report.html").exists() and not (job.archive / "summary.json").exists()
        assert job.signal(signal.SIGTERM) == 0, job.output()
    last = json.loads((job.archive / "summary.json").read_text())
    assert last["images"] == renewed["images"] == {"read": 1, "detected": 1, "dead": 0, "skipped": 0}
    assert [last[each] for each in ("model", "startup_seconds")] == [renewed[each] for each in ("model", "startup_seconds")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "projects/test-project/subscriptions/none"], "there is no such subscription"),
        (["--output", "projects/test-project/topics/none"], "there is no such topic"),
        (["--dead-letter-topic", "projects/test-project/topics/none"], "dead_letter_topic projects/test-project/topics/none"),
        (["--answer-topic", "nonsense"], "expected projects/<project>/topics/<name>"),
        (["--input", "projects/p/subscriptions/s01"], "with a project id of 6 characters or more"),
        (["--input", "photos/*.jpg"], "expected projects/<project>/subscriptions/<name>"),
        (["--input", "a", "b"], "expected one subscription"),
        (["--output", INPUT_TOPIC], "it feeds the input, so the job would read what it publishes"),
        (["--dead-letter-topic", INPUT_TOPIC], "it feeds the input"),
    ],
    ids=str,
)
def test_a_wrong_place_is_one_line_and_exit_code_2(pubsub_emulator, error_of, flags, message):
    images, subscription = pubsub_emulator.create()
    output, _ = pubsub_emulator.create()
    flag, *values = [images if part == INPUT_TOPIC else part for part in flags]
    given = {"--input": [subscription], "--output": [output]} | {flag: values}
    assert message in error_of("--config", CONFIG, *(part for name, parts in given.items() for part in (name, *parts)))


def test_a_dry_run_reads_no_message(pubsub_emulator, bright_model, capsys):
    images, subscription = pubsub_emulator.create()
    output, _ = pubsub_emulator.create()
    pubsub_emulator.publisher().publish(images, b"an image").result()
    places = ["--input", subscription, "--output", output]
    assert run.main(["--config", CONFIG, *places, "--model", bright_model, "--dry-run"]) == 0
    assert "a message is acknowledged when its results are published and its rows are durable" in capsys.readouterr().out
    assert len(pubsub_emulator.take(subscription, 1)) == 1


def test_a_pubsub_that_cannot_be_used_is_one_line_and_exit_code_2(monkeypatch, error_of):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/none.json")
    places = ["--input", "projects/test-project/subscriptions/s01", "--output", "projects/test-project/topics/t01"]
    assert "no usable credentials" in error_of("--config", CONFIG, *places)
