"""A canary in jobs as a user runs them, each in a process of its own."""

import contextlib
import json
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.records import ImageRef, identity_hash
from pipeline.storage.files import write_file
from tests.conftest import write_bright_image
from tests.detect.versioned_models import elsewhere, save_version
from tests.forked_jobs import KILLED, Moment, run_forked
from tests.launch.jobs import rows_of, write_work
from tests.launch.test_swaps import QUICK, versions_of
from tests.processes import wait_until
from tests.streaming_job import InlineImages, StreamingJob

pytestmark = pytest.mark.usefixtures("warm_preparations")
IMAGES = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "detector"
    for version in (7, 8):
        save_version(folder, version)
    (folder / "labels.json").write_text('{"stable": 7, "canary": 8}', encoding="utf-8")
    return folder


@pytest.mark.parametrize("mode", ["shadow", "live"])
def test_a_stream_has_a_canary_whose_figures_stand_in_its_summary(pubsub_emulator, tmp_path, model, mode):
    """In shadow mode all rows come from the stable version; in live mode those of the canary's share come from the canary."""
    for n in range(IMAGES):
        write_bright_image(tmp_path / "photos" / f"{n}.png", (64, 48), (10, 10, 40, 30))
    flags = ("--model-version", "stable", "--model-poll-s", 0.2, "--canary-share", 0.5, "--canary-mode", mode)
    allowed = ("--allow-uri-prefix", f"{tmp_path}/photos/", "--score-threshold", 0)
    with contextlib.ExitStack() as ended:
        job = StreamingJob(pubsub_emulator, tmp_path, str(model), *flags, *allowed, answers=False)
        ended.push(job.__exit__)
        job.start(until="50.0% of the images meet canary 8")
        job.publish(*(f"{tmp_path}/photos/{n}.png".encode() for n in range(IMAGES)))
        rows = [json.loads(message.data) for message in job.take(job.detections, IMAGES)]
        assert job.signal(signal.SIGTERM) == 0
    wanted = [_is_chosen(row["image"]) for row in rows]
    made = ["8" if chosen and mode == "live" else "7" for chosen in wanted]
    assert [row["model"]["version"] for row in rows] == made
    canary = json.loads((job.archive / "summary.json").read_text(encoding="utf-8"))["canary"]
    shown = (canary["version"], canary["stable"], canary["mode"], canary["images"], canary["failed"], canary["agreement"])
    assert shown == ("8", "7", mode, sum(wanted), 0, 1.0 if mode == "shadow" and sum(wanted) else None)
    assert "<h2>Canary</h2>" in (job.archive / "report.html").read_text(encoding="utf-8")


def _is_chosen(image):
    return identity_hash(f"canary {ImageRef(image['uri'], image['generation']).identity}") < 0.5 * 2**64


AUTO = ("--model-version", "stable", "--canary-share", 1, "--canary-auto", "--canary-images", 10, *QUICK)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Version 7, which takes its time, version 8, which agrees with it, and version 9, which does not."""
    folder = tmp_path_factory.mktemp("saved")
    save_version(folder, 7, call_ms=200), save_version(folder, 8), save_version(folder, 9, outputs=elsewhere)
    return folder


@pytest.fixture
def on_trial(tmp_path, saved):
    """Makes a folder of version 7, which is in use, and of a canary."""

    def make(canary: int) -> Path:
        for version in (7, canary):
            shutil.copytree(saved / str(version), tmp_path / "detector" / str(version))
        (tmp_path / "detector" / "labels.json").write_text(json.dumps({"stable": 7, "canary": canary}), encoding="utf-8")
        return tmp_path / "detector"

    return make


def labels_of(model: Path) -> dict[str, int]:
    return json.loads((model / "labels.json").read_text(encoding="utf-8"))


@pytest.fixture
def batch(tmp_path):
    """A batch job over many images: its command but for the model, and their names."""
    write_work(tmp_path / "in", images=4000, image_wh=(64, 48))
    command = [
        "--input",
        tmp_path / "in",
        "--output",
        tmp_path / "out",
        "--concurrent-batches",
        1,
        "--intra-op-threads",
        1,
        *AUTO,
    ]
    return command, [str(path) for path in sorted((tmp_path / "in").iterdir())]


def assert_promoted(said: str, model: Path, out: Path, names: list[str], processes: int = 1) -> None:
    """That a batch job has promoted version 8 while it worked, and has done all of its images."""
    assert labels_of(model) == {"stable": 8}, said
    rows = rows_of(out)
    assert sorted(row["image"]["uri"] for row in rows) == names
    assert {versions_of(row) for row in rows} == {("7", "7"), ("8", "8")}, said
    assert 1 <= said.count("model detector: canary promoted; canary 8: ") <= processes
    assert 1 <= said.count("model detector: version 7 -> 8, loaded in ") <= processes
    assert "canary dropped" not in said and "Traceback" not in said


def test_a_batch_job_in_two_processes_promotes_a_canary_that_agrees(on_trial, batch, tmp_path):
    """Each of them has a canary of its own; the first to have met enough images promotes it for both."""
    model, (command, names), log = on_trial(8), batch, tmp_path / "log"
    workers = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    assert run_forked([*command, "--model", model, *workers], log) == 0, log.read_text()
    assert_promoted(log.read_text(), model, tmp_path / "out", names, processes=2)
    canary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["canary"]
    assert [canary[name] for name in ("version", "failed", "agreement", "outcome")] == ["8", 0, 1.0, "promoted"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_job_killed_around_the_record_of_its_decision_goes_by_what_stands_there(on_trial, batch, tmp_path, when):
    """Before it, nothing is decided, and the same command decides again; after it, the same command begins with the canary."""
    model, (command, names), log = on_trial(8), batch, tmp_path / "log"
    command = [*command, "--model", model]
    assert run_forked(command, log, Moment("pipeline.detect.canary_watcher:write_file", when=when)) == KILLED, log.read_text()
    assert labels_of(model) == ({"stable": 7, "canary": 8} if when == "before" else {"stable": 8})
    assert sorted(path.name for path in model.iterdir()) == ["7", "8", "labels.json"]
    assert run_forked(command, log) == 0, log.read_text()
    if when == "before":
        assert_promoted(log.read_text(), model, tmp_path / "out", names)
        canary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["canary"]
        assert [canary[name] for name in ("version", "failed", "agreement", "outcome")] == ["8", 0, 1.0, "promoted"]
        return
    assert labels_of(model) == {"stable": 8}, log.read_text()
    rows = rows_of(tmp_path / "out")
    assert sorted(row["image"]["uri"] for row in rows) == names
    assert {versions_of(row) for row in rows} == {("8", "8")}
    assert "canary promoted" not in log.read_text()


def test_a_stream_killed_between_its_decision_and_the_record_decides_again(pubsub_emulator, on_trial, saved, tmp_path):
    """No message is lost with it. It promotes the canary then, and drops the next one, which does not agree."""
    model = on_trial(8)
    write_bright_image(tmp_path / "bright.png", (64, 48), (10, 12, 30, 36))
    job = StreamingJob(pubsub_emulator, tmp_path, str(model), *AUTO, answers=False)
    images = InlineImages(job, (tmp_path / "bright.png").read_bytes())
    with contextlib.ExitStack() as ended:
        ended.push(job.__exit__)
        job.start(killed_after="judged", until="of the images meet canary")
        images.publish(range(20))
        assert job.wait() == -signal.SIGKILL, job.output()
        assert labels_of(model) == {"stable": 7, "canary": 8}
        job.start(until="of the images meet canary")
        images.publish(range(20, 40))
        wait_until(lambda: images.answered(40) and "model detector: version 7 -> 8, loaded in " in job.output(), job.output)
        assert labels_of(model) == {"stable": 8}
        images.publish(range(40, 60))
        wait_until(lambda: images.answered(60), job.output)
        shutil.copytree(saved / "9", model / "9")
        write_file(str(model / "labels.json"), b'{"stable": 8, "canary": 9}')
        wait_until(lambda: "of the images meet canary 9" in job.output(), job.output)
        images.publish(range(60, 80))
        wait_until(lambda: images.answered(80) and "canary dropped" in job.output(), job.output)
        assert labels_of(model) == {"stable": 8}
        assert job.signal(signal.SIGTERM) == 0, job.output()
    assert {row["model"]["version"] for name, row in images.rows.items() if int(name[7:]) >= 40} == {"8"}
    assert json.loads((job.archive / "summary.json").read_text(encoding="utf-8"))["canary"]["outcome"] == "dropped"
    said = job.output()
    assert [said.count(line) for line in ("canary promoted; canary 8: ", "canary dropped; canary 9: ")] == [1, 1]


def test_a_job_whose_canary_met_no_image_says_so_at_its_end_and_in_its_report(run_job, tmp_path, model):
    """It was done before the canary was loaded."""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 40, 30))
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "out", "--model", model, "--model-version", "stable")
    code, out, err = run_job(*arguments)
    assert code == 0 and "canary 8 gets 5.0% of the images once it is loaded" in err
    assert "  canary 8: 0 images: it is not loaded yet\n" in out
    canary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["canary"]
    assert (canary["version"], canary["images"], canary["why_no_images"]) == ("8", 0, "it is not loaded yet")
    assert "It met no image: it is not loaded yet." in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
