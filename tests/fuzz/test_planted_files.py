"""Whatever lies in a results folder: a job and a compaction end well or in one line, touch nothing outside, and lose no row."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline.results.lease import leased
from pipeline.results.other_runs import attached_run, committed_states, finish_dead, remove_dead, runs_at_work, take_over_killed
from pipeline.results.reports import check_reports
from pipeline.results.resume_points import ResumePoint, footer_of, resume_points_of
from pipeline.results.write_policy import check_write_policy
from pipeline.storage.spill_files import SpillFile
from pipeline.write.spill_rows import RowsResumePoint, Shard

from pipeline import reconcile
from pipeline.compact import compact
from pipeline.errors import UserError
from pipeline.results.layout import StagedFile
from pipeline.results.run import Run, fence
from pipeline.stats.summary import JobStats, merge_stats
from pipeline.stats.worker_reports import WorkerReports
from pipeline.storage.files import write_file
from pipeline.stream.archive import Archive
from tests.rows_of_files import found

ROWS = "detections/detections-3f2a9c01-20261121T02000%dZ-00000-of-00001.jsonl"
RUN = "0123456789ab"
STAGED = "0123456789abcdef0123456789abcdef/rows"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2000")) // 4 if os.environ.get("FUZZ") == "1" else 40
SETTINGS = {"mode": "batch", "input": ["x/**"], "only_new": True, "write": {}, "model": {}, "detect": {}}

names = st.sampled_from(
    [
        *("../outside/secret", "/etc/passwd", "..", ".", "", "a\0b", "photo.jpg", ROWS % 0, ROWS % 7, "\udc80", "summary.json"),
        *(f".staging-{RUN}/{name}" for name in (STAGED, "../../outside/secret", "link/secret")),
        "runs/../../outside/x",
    ]
)
values = st.recursive(
    names | st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.just("batch"),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(names, part, max_size=3),
)
commits = st.fixed_dictionaries(
    {"names": st.lists(st.tuples(names, names), max_size=3) | values, "gone": st.dictionaries(names, names, max_size=2) | values},
)
about = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["running", "detached", "committed", "done", "stopped"]) | values,
        "settings": st.just(SETTINGS) | st.dictionaries(st.sampled_from([*SETTINGS]), values) | values,
    },
    optional={
        "commit": commits | values,
        "same": st.just("command") | values,
        "started_at": st.floats(-1e300, 1e300) | st.just(1e9) | values,
        "leased": st.booleans() | values,
        "detached": st.just(["job", 1.0, 2.0]) | values,
    },
)
claims = st.fixed_dictionaries(
    {"run": names, "patterns": values, "host": values, "pid": values, "life": values, "since": values, "renewed": values}
)
summaries = st.fixed_dictionaries(
    {"images": values, "config": st.just(SETTINGS) | values, "mode": values},
    optional={"run": names, "name": names, "samples": st.lists(names, max_size=3) | values},
)
rows = st.fixed_dictionaries({"image": st.fixed_dictionaries({"uri": values, "generation": values})}, optional={"model": values})
spills = st.builds(SpillFile, names, st.integers(-5, 5), st.integers(-99, 99), st.integers(-99, 99))
footers = st.builds(
    lambda *parts: footer_of(ResumePoint(*parts)),
    st.lists(st.tuples(st.builds(Shard, names, st.integers(), st.integers()) | st.just("a"), spills), max_size=3),
    st.just(JobStats()) | values.filter(lambda value: value is not None),
)
contents = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"[" * 9000, b"\0" * 30, b"{", b"PAR1" + b"\0" * 20 + b"PAR1"]),
    (about | claims | summaries | rows | values).map(lambda value: json.dumps(value).encode()),
    footers,
)
STATES = ["run.json", "written", "lock", "figures/0a", STAGED]
STATES += ["spill/0a.resume", "resumed-x/0a.resume", "a.jpg"]
places = st.one_of(
    st.builds(
        "{}/{}".format, st.sampled_from([f".staging-{RUN}", ".staging-photos", ".staging-", "OWN"]), st.sampled_from(STATES)
    ),
    st.sampled_from(
        ["summary.json", "report.html", ".lease-0a", ".lease-0a.new", ".lease", "reconcile.html", "samples/001-a.jpg"]
    ),
    st.sampled_from(
        ["detections-3f2a9c01-20261121T020000Z-00000-of-00001", "detections-00000-of-00001", "dead_letters-00000-of-00001"]
    ).map("index/{}.parquet".format),
    st.sampled_from(
        ["detections/detections-99999999T999999Z-x-00000-of-00001.jsonl", "dead_letters/dead_letters-00000-of-00001.jsonl"]
    ),
    st.builds(
        ".staging-{}/archive/{}".format,
        st.sampled_from(["0a", "a b", "photos"]),
        st.sampled_from(["lock", "a.jpg", "evil-20261121T020000Z-00000-of-00001-m5b-0a.rows"])
        | st.just("detections-20261121T020000Z-00000-of-00001-0a-m5b5d-0a.rows"),
    ),
)
planted = st.dictionaries(places, contents, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


def laid(folder, files, link):
    """A results folder with rows, an image, and planted files; beside it what nobody may touch."""
    top = Path(tempfile.mkdtemp(dir=folder))
    output = f"{top}/out"
    write_file(f"{top}/outside/secret", b"secret")
    write_file(f"{output}/photo.jpg", b"photo")
    for number in range(2):
        write_file(f"{output}/{ROWS % number}", found(f"{number}.jpg").line)
    for name, content in files.items():
        if not name.startswith("OWN/"):
            write_file(f"{output}/{name}", content)
    if link:
        os.makedirs(f"{output}/.staging-{RUN}", exist_ok=True)
        os.symlink(f"{top}/outside", f"{output}/.staging-{RUN}/link")
    for path in Path(output).glob(".staging-*"):
        os.utime(path, (0, 0))
    return output


def a_job(output, own):
    """What a job does beside its images; `own` is planted in its own folder while it works."""
    check_write_policy(output, SETTINGS)
    list(committed_states(output))
    finish_dead(output)
    check_reports(output, 3, coco=True)
    attached_run(output, "job")
    staging = Run.new(output)
    with (
        leased(staging.folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence),
        staging.held({"settings": SETTINGS, "same": "command"}),
    ):
        for name, content in own.items():
            write_file(f"{staging.folder}/{name}", content)
        take_over_killed(staging, "command")
        for resumed in resume_points_of(staging.folder, RowsResumePoint):
            merge_stats([resumed.counted], 3)
        WorkerReports(staging).now()
        staging.rows_kept()
        runs_at_work(output)
        write_file(f"{staging.folder}/{STAGED}", found("2.jpg").line)
        staging.commit([StagedFile(f"{staging.folder}/{STAGED}", ROWS % 2)])
        remove_dead(output, but=staging)


def images_in(output):
    """The images that have rows."""
    lines = [line for path in Path(output).glob("detections/*.jsonl") for line in path.read_bytes().splitlines()]
    return b"\n".join(lines)


@settings(max_examples=EXAMPLES)
@given(planted, st.booleans())
def test_whatever_is_planted_runs_nothing_and_touches_nothing_outside_and_no_row_is_lost(folder, files, link):
    """Somebody who may write to the results folder can harm these results, and nothing else."""
    output = laid(folder, files, link)
    own = {name.removeprefix("OWN/"): content for name, content in files.items() if name.startswith("OWN/")}
    for work in (
        lambda: a_job(output, {name: own[name] for name in own if name != STAGED}),
        Archive(output, "0b", window_s=60.0).recover,
        lambda: compact(output),
        lambda: reconcile.main(["--input", f"{output}/*.jpg", "--output", output]),
    ):
        try:
            work()
        except UserError as err:
            assert len(str(err).splitlines()) == 1
    assert (Path(output).parent / "outside" / "secret").read_bytes() == b"secret"
    assert sorted(os.listdir(Path(output).parent)) == ["out", "outside"]
    assert os.listdir(Path(output).parent / "outside") == ["secret"]
    assert Path(f"{output}/photo.jpg").read_bytes() == b"photo"
    for number in range(2):
        assert found(f"{number}.jpg").line.rstrip() in images_in(output)
