"""Text from outside, whatever it holds: half surrogate pairs, control characters and NULs, wherever an input has text."""

import base64
import itertools
import json
import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.commands import compact, export, reconcile
from pipeline.config.setting import EXPORT_FORMATS
from tests.launch.jobs import images_of, rows_of
from tests.launch.test_elsewhere import TWO_PROCESSES
from tests.listing import test_archives
from tests.processes import wait_until
from tests.streaming_job import StreamingJob
from tests.tfrecord_files import example, write

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "400")) // 20 if os.environ.get("FUZZ") == "1" else 3
ODD = ["\ud83d", "\udcff", "\ude00\ud83d", "\0", "\x01", "\x1b[31m", "\x7f", "\x85", "\u2028", "\n", "\r", '"', "\\", "é", "😀"]
CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # no name of an image may have these
IN_JSON = ["inline", "there", "not there", "object", "outside"]
KINDS = [*IN_JSON, "bytes", "text", "notification", "dead letter"]  # these have their request id in an attribute
texts = st.lists(st.sampled_from(ODD) | st.characters(exclude_categories=()), max_size=6).map("".join)
extras = st.dictionaries(texts, texts | st.lists(texts, max_size=2) | st.dictionaries(texts, texts, max_size=2), max_size=3)
asked = st.lists(st.tuples(st.sampled_from(KINDS), texts, texts, extras), min_size=1, max_size=12)


class Asking:
    """Makes messages with any texts; each asks for one image, and for an answer.

    Attributes:
      detected: Of each request id, as JSON has it, whether its image is detected.
    """

    def __init__(self, folder, bucket, png):
        self._folder, self._bucket, self._png = folder, bucket, png
        self._numbers = itertools.count()
        self.detected: dict[str, bool] = {}

    def message(self, kind: str, name: str, request_id: str, extra: dict) -> tuple[bytes, dict[str, str]]:
        """A message of one kind."""
        number = next(self._numbers)
        name, request_id = f"{number} {name}", f"{number} {request_id}"
        if kind not in IN_JSON:  # Pub/Sub takes only Unicode
            name, request_id = (text.encode("utf-8", "replace").decode() for text in (name, request_id))
        path = f"{self._folder}/{re.sub('[/%#]', '', name)}"
        self.detected[as_json_has_it(request_id)] = kind in ("inline", "bytes") or (
            kind == "there" and put(path, self._png) and not CONTROL.search(path)
        )
        in_json = {
            "inline": {"bytes": base64.b64encode(self._png).decode(), "name": name},
            "object": {"uri": f"gs://{self._bucket}/{name}", "generation": name},
            "outside": {"images": [{"uri": f"/etc/{name}", **extra}]},
        }
        if kind in IN_JSON:
            return json.dumps({**extra, "request_id": request_id, **in_json.get(kind, {"uri": path})}).encode(), {}
        notice = {"eventType": "OBJECT_FINALIZE", "bucketId": self._bucket, "objectId": f"{name}.jpg", "objectGeneration": name}
        letter = {"image": {"uri": path}, "stage": "read", "reason": "not_found", "message": name, "extra": extra}
        contents = {"bytes": self._png, "text": path.encode(), "dead letter": json.dumps(letter).encode(), "notification": b"{}"}
        return contents[kind], {"request_id": request_id, "name": name, **(notice if kind == "notification" else {})}


def put(path: str, content: bytes) -> bool:
    """Writes a file; whether a file can have this name."""
    try:
        Path(path).write_bytes(content)
    except ValueError:
        return False
    return True


def as_json_has_it(text: str) -> str:
    """Two halves of a surrogate pair are the pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def check_files(output: Path, inputs: str, model: str, capfd) -> None:
    """Every reader of a results folder reads its files: exports, a comparison with the input, compaction."""
    shards = [*output.glob("*/*.parquet")]
    assert shards
    for shard in shards:
        with shard.open("rb") as file:
            pq.ParquetFile(file).read().validate(full=True)
    before = [rows_of(output, kind) for kind in ("detections", "dead_letters")]
    capfd.readouterr()
    code, error = export.main([str(output), "--format", ",".join(EXPORT_FORMATS)]), capfd.readouterr().err
    assert code == 0 and "cannot be read" not in error, error
    assert reconcile.main(["--output", str(output), "--input", inputs, "--model", model]) in (0, 1), capfd.readouterr().err
    assert compact.main([str(output)]) == 0, capfd.readouterr().err
    assert [rows_of(output, kind) for kind in ("detections", "dead_letters")] == before
    (output / "report.html").read_text("utf-8")
    json.loads((output / "summary.json").read_text("utf-8"))


@pytest.mark.hypothesis
def test_each_message_of_a_stream_ends_as_a_row_or_a_dead_letter_and_is_answered(
    pubsub_emulator, gcs_bucket, tmp_path, bright_model, bright_png, capfd
):
    """The whole graph, on the in-memory runner: one message with half a surrogate pair used to end the job, at each start."""
    (tmp_path / "in").mkdir()
    asking = Asking(tmp_path / "in", gcs_bucket.name, bright_png)
    detected: dict[str, bool] = {}

    def all_answered() -> bool:
        for message in job.take(job.answers, 1, timeout_s=1):
            answer = json.loads(message.data)
            assert answer["complete"] and len(answer["results"]) + len(answer["failed"]) == 1
            detected[answer["request_id"]] = bool(answer["results"])
        return asking.detected.keys() <= detected.keys()

    flags = ("--allow-uri-prefix", "gs://", tmp_path / "in", "--shard-seconds", "1")
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, *flags) as job:

        @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
        @given(asked)
        def all_end(messages):
            job.publish(*(asking.message(*each) for each in [*messages, ("inline", "neighbour", "", {})]))
            wait_until(all_answered, job.output, job)

        job.publish(*(asking.message(kind, odd, odd, {odd: [odd, {odd: odd}]}) for kind in KINDS for odd in ODD))
        wait_until(all_answered, job.output, job)
        all_end()
        assert job.signal(signal.SIGTERM) == 0, job.output()
        published = [json.loads(message.data) for topic in (job.detections, job.dead_letters) for message in job.rest(topic)]
    assert detected == asking.detected
    assert "Traceback" not in job.output()
    assert len(published) == len(detected)
    rows, dead = rows_of(job.archive), rows_of(job.archive, "dead_letters")
    assert (len(rows), len(rows) + len(dead)) == (sum(detected.values()), len(detected))
    check_files(job.archive, f"{tmp_path}/in", bright_model, capfd)


@pytest.mark.parametrize("where", ["here", pytest.param("elsewhere", marks=pytest.mark.matrix)])
def test_each_image_of_a_batch_job_ends_as_a_row_or_a_dead_letter(tmp_path, run_job, bright_model, bright_png, where, capfd):
    """Names of files, lines of manifests, members of archives, examples: all odd, and so are the folders.

    A name with control characters is a dead letter wherever it stands; all other names are images.

    Elsewhere, what is listed, the records and the names of shards go from process to process.
    """
    folder, out, manifest = tmp_path / "in \udcff", tmp_path / "out \udcff\x01", tmp_path / "list.jsonl"
    folder.mkdir()
    names = [odd for odd in ODD if put(f"{folder}/{odd}.png", bright_png)]
    (folder / "broken \udcff.png").write_bytes(b"no image")
    test_archives.write(folder / "some.tar", {f"member {name}.png": bright_png for name in names})
    ids = (odd.encode("utf-8", "surrogatepass") for odd in ODD)
    write(tmp_path / "some.tfrecord", *(example(image_encoded=bright_png, image_source_id=each) for each in ids))
    lines = [{"uri": f"{folder}/{names[0]}.png"}, *({"uri": f"gone {odd}.png", odd: [odd, {odd: odd}]} for odd in ODD)]
    manifest.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--input", folder, tmp_path / "some.tfrecord", manifest, "--output", out, "--model", bright_model]
    arguments += ["--max-dead-share", "1", *(TWO_PROCESSES if where == "elsewhere" else ())]
    code, _, error = run_job(*arguments)
    assert code == 0 and "Traceback" not in error, error
    in_containers = [*names, *ODD]  # members of the archive, and examples
    detected, refused = (
        [name for name in [*names, *in_containers] if bool(CONTROL.search(name)) is bad] for bad in (False, True)
    )
    detected, dead = len(detected), len(["broken", *ODD, *refused])
    assert images_of(out) == {"read": detected + dead + 1, "detected": detected, "dead": dead, "skipped": 1}
    assert (len(rows_of(out)), len(rows_of(out, "dead_letters"))) == (detected, dead)
    assert {f"{folder}/{name}.png" for name in names if not CONTROL.search(name)} <= {row["image"]["uri"] for row in rows_of(out)}
    check_files(out, str(folder), bright_model, capfd)
    code, _, error = run_job(*arguments, "--retry-dead")
    gone, members = ([name for name in of if bool(CONTROL.search(name)) is bad] for of, bad in ((ODD, False), (names, True)))
    assert code == 0 and images_of(out)["dead"] == len([*gone, *members]), error  # the other failures are final
