"""Whether a run may take the place of an earlier one: the same command may, another may not unless it is told to."""

import json
import os
import re

import pytest

from pipeline.config import load_config
from pipeline.errors import OutputError
from pipeline.results import completion
from pipeline.results.completion import Provenance
from pipeline.results.layout import shard_name
from pipeline.results.run import Run
from pipeline.results.write_policy import check_write_policy, run_name, same_work
from pipeline.storage.files import write_file

BATCH = "detections/detections-00000-of-00001.jsonl"
ARCHIVE = "detections/detections-20261121T020000Z-0a1b2c3d-00000-of-00001.jsonl"
WAYS_ON = "; give --only-new to add what they lack, --replace to remove them, or another folder"


def settings(**changes):
    """All settings of a job, as a summary has them."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config([], {"input": ["photos/"], "output": "out", **changes}).as_dict()


@pytest.fixture
def earlier(tmp_path):
    """Leaves the results of an earlier run; returns their folder."""

    def leave(config=None, files=(BATCH,)):
        for name in files:
            write_file(f"{tmp_path}/{name}", b"")
        if config:
            summary = {"images": {}, "config": config, "mode": config["mode"], "run": "r1"}
            write_file(f"{tmp_path}/summary.json", json.dumps(summary).encode())
        return str(tmp_path)

    return leave


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"write__shards": 3, "write__coco": True, "write__samples": 5},
        {"detect__precision": "bfloat16", "detect__concurrent_batches": 2, "read__read_threads": 1, "runner": "PrismRunner"},
        {"max_dead_share": 1.0, "output": "./out/"},
        {"model__model_poll_s": 1.0},
    ],
    ids=["same", "files", "speed", "judgement", "watching"],
)
def test_a_run_with_the_same_rows_may_replace_an_earlier_one(earlier, changes):
    check_write_policy(earlier(settings()), settings(**changes))
    check_write_policy(earlier(settings(**changes)), settings())


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"input": ["dead_letters/*.jsonl"]}, 'with input ["photos/"] where this one has ["dead_letters/*.jsonl"]'),
        ({"model__path": "/models/yolov4"}, 'with model.path "digits" where this one has "/models/yolov4"'),
        ({"model__model_version": "7"}, 'with model.model_version null where this one has "7"'),
        ({"model__name": "mine"}, 'with model.name null where this one has "mine"'),
        ({"detect__score_threshold": 0.5}, "with score_threshold 0.25 where this one has 0.5"),
        ({"detect__iou_threshold": 0.5}, "with iou_threshold 0.45 where this one has 0.5"),
        ({"detect__classes": ["dog"]}, 'with classes [] where this one has ["dog"]'),
        ({"detect__max_detections": 5}, "with max_detections 100 where this one has 5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_with_other_rows_is_refused_in_one_line_unless_it_is_told_to_replace(earlier, changes, difference):
    folder = earlier(settings())
    with pytest.raises(OutputError) as caught:
        check_write_policy(folder, settings(**changes))
    assert str(caught.value) == f"output {folder}: holds the results of a run {difference}{WAYS_ON}"
    check_write_policy(folder, settings(**changes), replace=True)


class TestWhatDecidesWhichRowsComeOut:
    """One list stands behind `--only-new`, which compares what indexes have, and the check that results are not mixed."""

    def test_it_is_one_list(self, earlier, monkeypatch):
        changed = settings(detect__precision="bfloat16")
        assert Provenance.of(changed) == Provenance.of(settings())
        check_write_policy(earlier(settings()), changed)
        monkeypatch.setattr(completion, "ROW_SETTINGS", (*completion.ROW_SETTINGS, "precision"))
        assert Provenance.of(changed) != Provenance.of(settings())
        with pytest.raises(OutputError, match='with precision "float32" where this one has "bfloat16"'):
            check_write_policy(earlier(settings()), changed)

    @pytest.mark.parametrize(
        "changes",
        [
            {"detect__max_detections": 5},
            {"detect__classes": ["dog"]},
            {"detect__labels_per_box": "several"},
            {"model__nms": "pipeline"},
        ],
        ids=str,
    )
    def test_each_of_its_settings_counts_for_both(self, earlier, changes):
        assert Provenance.of(settings(**changes)) != Provenance.of(settings())
        with pytest.raises(OutputError, match="holds the results of a run with"):
            check_write_policy(earlier(settings()), settings(**changes))

    def test_rows_of_an_earlier_release_count_as_made_with_the_best_label(self, earlier):
        before = settings()
        before["detect"].pop("labels_per_box", None)
        assert Provenance.of(settings(detect__labels_per_box="best")) == Provenance.of(before)
        check_write_policy(earlier(before), settings(detect__labels_per_box="best"))
        with pytest.raises(OutputError, match='with labels_per_box "best" where this one has "several"'):
            check_write_policy(earlier(before), settings(detect__labels_per_box="several"))

    def test_when_a_model_is_looked_for_counts_for_neither(self, earlier):
        changed = settings(model__model_poll_s=1.0, model__model_memory_mb=100)
        assert Provenance.of(changed) == Provenance.of(settings())
        check_write_policy(earlier(settings()), changed)


def test_a_long_difference_is_cut(earlier):
    with pytest.raises(OutputError) as caught:
        check_write_policy(earlier(settings()), settings(input=["x" * 1000]))
    assert len(str(caught.value)) < 400


def test_settings_that_one_version_does_not_know_are_not_compared(earlier):
    old = settings()
    del old["detect"]["max_detections"], old["model"]["nms"]
    check_write_policy(earlier(old), settings(detect__max_detections=5, model__nms="pipeline"))


@pytest.mark.parametrize("files", [(), ("notes.txt",), ("detections/mine.jsonl",), (".staging-abc/old",)], ids=str)
def test_a_folder_without_results_is_free(earlier, files):
    check_write_policy(earlier(files=files), settings())


@pytest.mark.parametrize("file", [BATCH, "coco/images.json", "report.html"])
def test_results_of_which_nothing_is_known_are_refused(earlier, file):
    folder = earlier(files=[file])
    with pytest.raises(OutputError, match=r"whose settings are not known, since its summary\.json is missing; give --only-new"):
        check_write_policy(folder, settings())
    check_write_policy(folder, settings(), replace=True)


@pytest.mark.parametrize("replace", [False, True])
def test_a_batch_job_never_touches_the_archive_of_a_stream(earlier, replace):
    with pytest.raises(OutputError, match="holds the archive of a stream"):
        check_write_policy(earlier(files=[ARCHIVE]), settings(), replace=replace)
    check_write_policy(earlier(files=[ARCHIVE]), settings(only_new=True))


def test_a_batch_job_does_not_double_what_was_compacted(earlier):
    folder = earlier(files=[ARCHIVE.replace("-00000", "-compact0a1b2c3d4e5f-00000", 1)])
    with pytest.raises(OutputError, match="holds compacted rows, a batch job would double them; give --only-new to add to it"):
        check_write_policy(folder, settings())
    check_write_policy(folder, settings(only_new=True))


def test_a_stream_adds_to_its_archive_and_to_the_results_of_batch_jobs_with_its_settings(earlier):
    stream = {"mode": "streaming", "input": ["projects/p/subscriptions/s"], "output": "projects/p/topics/t"}
    check_write_policy(earlier(settings(**{**stream, "input": ["other"]}), files=[ARCHIVE]), settings(**stream))
    check_write_policy(earlier(settings(), files=[BATCH]), settings(**stream))
    with pytest.raises(OutputError, match=r"holds the results of a batch job with score_threshold 0\.25 where this one has 0\.5"):
        check_write_policy(earlier(settings(), files=[BATCH]), settings(**stream, detect__score_threshold=0.5))


def test_a_stream_does_not_add_to_results_of_which_nothing_is_known(earlier):
    with pytest.raises(OutputError, match="holds the results of a batch job whose settings are not known"):
        check_write_policy(earlier(files=[BATCH]), settings(mode="streaming"))


class TestRunName:
    def test_the_same_command_has_the_same_name_and_one_that_adds_has_its_start_in_it(self):
        name = run_name(settings(), 1795226400.0)
        assert re.fullmatch("[0-9a-f]{8}", name)
        assert run_name(settings(write__shards=3, detect__precision="bfloat16", output="x"), 0.0) == name
        assert run_name(settings(only_new=True), 1795226400.0) == f"{name}-20261121T020000Z"

    @pytest.mark.parametrize(
        "changes",
        [{"input": ["other/"]}, {"detect__score_threshold": 0.5}, {"model__name": "mine"}, {"mode": "streaming"}],
        ids=str,
    )
    def test_another_command_has_another_name(self, changes):
        assert run_name(settings(**changes), 0.0) != run_name(settings(), 0.0)


def test_a_run_that_adds_is_never_refused(earlier):
    adds = settings(only_new=True, input=["other/"], detect__score_threshold=0.5)
    for files in ([BATCH], [ARCHIVE], [BATCH, ARCHIVE], []):
        check_write_policy(earlier(files=files), adds)


def test_a_command_does_not_double_what_runs_that_added_have_left(earlier):
    """Its own files it may write anew."""
    own = f"{shard_name('detections', 0, 1, run_name(settings(), 0.0))}.jsonl"
    check_write_policy(earlier(settings(), files=[own]), settings())
    folder = earlier(settings(), files=[f"{shard_name('detections', 0, 1, run_name(settings(only_new=True), 0.0))}.jsonl"])
    with pytest.raises(OutputError, match="holds the results of several runs") as caught:
        check_write_policy(folder, settings())
    assert str(caught.value).endswith(WAYS_ON)
    check_write_policy(folder, settings(), replace=True)


def test_another_job_at_work_is_refused_only_if_its_rows_will_be_others(tmp_path):
    output = str(tmp_path)
    with Run.new(output).held({"settings": settings()}):
        check_write_policy(output, settings(write__shards=2))
        with pytest.raises(OutputError, match=r"another job is at work there with score_threshold 0\.25 where this one has 0\.5"):
            check_write_policy(output, settings(detect__score_threshold=0.5), replace=True)
    check_write_policy(output, settings(detect__score_threshold=0.5))


def test_rows_of_a_run_that_was_killed_before_its_summary_are_known_by_what_it_left(earlier):
    folder = earlier()
    staging = Run.new(folder)
    child = os.fork()
    if child == 0:
        with staging.held({"settings": settings()}):
            staging.commit([])
            os._exit(0)
    os.waitpid(child, 0)
    check_write_policy(folder, settings())
    with pytest.raises(OutputError, match="holds the results of a run with score_threshold"):
        check_write_policy(folder, settings(detect__score_threshold=0.5))


def test_results_are_found_again_by_each_release():
    """By the name of a command's run, the hash by which a run resumes another, and those by which `only_new` finds rows."""
    detect = {"score_threshold": 0.25, "iou_threshold": 0.45, "classes": ["dog", "häslein"], "max_detections": 100}
    command = {
        "mode": "batch",
        "input": ["/photos/"],
        "output": "/out",
        "model": {"path": "/models/yolo", "name": "yolo"},
        "detect": {**detect, "labels_per_box": "best", "max_megapixels": 100.0},
        "read": {"max_file_mb": 64.0},
    }
    model = ("yolo", "7")
    assert run_name(command, 0.0) == "44cea0be"
    assert same_work(command, model) == "97195fccab3835d7b035e13c0b962210"
    assert Provenance.of(command, model) == ("a551f757", "339ea2b2", *model)
