"""Any results folder, at any time, in other formats: of each key the newest row, of any run."""

import contextlib
import io
import os
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from pycocotools.coco import COCO

from pipeline import run
from pipeline.commands import export
from pipeline.commands.compact import main as compact
from pipeline.exports.exports import FORMATS
from pipeline.results.current import current_rows, read_rows
from pipeline.results.layout import is_result_name
from pipeline.results.reader import ResultsFolder
from tests.conftest import write_bright_image
from tests.shard_rows import VERSION, detected, failed, write_rows

DAY = 86_400.0
MONDAY = 1795392000.0  # 2026-11-23
MONDAYS = ["=1+1.jpg", "../up/b.jpg", "c\udc80.jpg", "d.jpg"]  # a formula, a path that leads above, a name that is no UTF-8


@pytest.fixture
def out(tmp_path):
    """Two runs: the second one detects one image of the first one again, and three times another one, for the first time."""
    folder = f"{tmp_path}/out"
    write_rows(folder, [detected(uri, confidence=0.5) for uri in MONDAYS], run="monday", made_at=MONDAY)
    again = [detected(uri, confidence=0.75) for uri in ("d.jpg", "a.jpg", "a.jpg")]
    write_rows(folder, again, [failed("f.jpg")], run="tuesday", made_at=MONDAY + DAY)
    write_rows(folder, [detected("a.jpg", confidence=0.75)], run="tuesday", made_at=MONDAY + DAY)
    return folder


def exported(out, *flags):
    assert export.main([out, *flags]) == 0
    return f"{out}/exports"


def table_of(out, *flags):
    """The confidence of each image in the CSV file."""
    table = pd.read_csv(f"{exported(out, '--format', 'csv', *flags)}/detections.csv")
    assert table["uri"].is_unique
    return dict(zip(table["uri"], table["confidence"], strict=True))


NEWEST = {"./=1+1.jpg": 0.5, "../up/b.jpg": 0.5, "c\\udc80.jpg": 0.5, "d.jpg": 0.75, "a.jpg": 0.75}


def test_of_two_runs_the_newest_row_of_each_image_counts_also_after_a_compaction(out, capsys):
    assert table_of(out) == NEWEST
    assert capsys.readouterr().out == f"5 rows in {out}/exports/detections.csv\n"
    assert compact([out]) == 0
    assert table_of(out) == NEWEST
    for place in (out, f"{out}/detections"):
        assert {row.uri for row in read_rows(place)} == {*MONDAYS, "a.jpg"}


def test_rows_of_a_run_a_model_or_since_a_day_are_exported_alone(out):
    other = VERSION._replace(model="other")
    write_rows(out, [detected("d.jpg", confidence=0.25, version=other)], version=other, run="other", made_at=MONDAY)
    assert table_of(out, "--run", "monday") == dict.fromkeys([*NEWEST][:4], 0.5)
    assert table_of(out, "--since", "2026-11-24") == {"d.jpg": 0.75, "a.jpg": 0.75}
    assert table_of(out, "--model", "other") == {"d.jpg": 0.25}
    assert compact([out]) == 0
    assert table_of(out, "--run", "tuesday") == table_of(out, "--since", "2026-11-24", "--model", "yolo")


def test_a_folder_on_cloud_storage_is_exported_there_and_on_this_disk(gcs_bucket, tmp_path):
    out = f"gs://{gcs_bucket.name}/out"
    write_rows(out, [detected("a.jpg", confidence=0.5)], made_at=MONDAY)
    write_rows(out, [detected("a.jpg", confidence=0.75)], made_at=MONDAY + DAY)
    for to in ([], [], ["--to", f"{tmp_path}/to"]):
        exported(out, "--format", "csv,coco,yolo", *to)
    content = gcs_bucket.blob("out/exports/detections.csv").download_as_bytes()
    assert content == (tmp_path / "to" / "detections.csv").read_bytes()
    assert pd.read_csv(io.BytesIO(content))["confidence"].tolist() == [0.75]
    with zipfile.ZipFile(io.BytesIO(gcs_bucket.blob("out/exports/yolo.zip").download_as_bytes())) as archive:
        assert archive.testzip() is None, "nothing can seek there"
        assert len(archive.namelist()) == 4
    names = {blob.name.partition("/")[2] for blob in gcs_bucket.list_blobs(prefix="out/exports/")}
    assert names == {
        f"exports/{name}"
        for name in ("coco/annotations.json", "coco/images.json", "coco/results.json", "detections.csv", "yolo.zip")
    }


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_each_image_once_sorted_and_replaces_the_export_before(out, name, tmp_path):
    """Whatever their names are; and nothing unfinished is left."""
    exported(out, "--format", name, "--run", "tuesday")
    folder = exported(out, "--format", name, "--sort")
    rows = [*current_rows(out, sort=True)]
    assert [row["image"]["uri"] for row in rows] == ["../up/b.jpg", "=1+1.jpg", "a.jpg", "c\udc80.jpg", "d.jpg"]
    copies = [tmp_path / os.path.basename(file) for file in FORMATS[name].files]
    with contextlib.ExitStack() as stack:
        FORMATS[name].write(rows, *(stack.enter_context(open(copy, "wb")) for copy in copies))
    for file, copy in zip(FORMATS[name].files, copies, strict=True):
        assert Path(folder, file).read_bytes() == copy.read_bytes()
    files = [os.path.relpath(f"{place}/{each}", out) for place, _, names in os.walk(out) for each in names]
    assert all(map(is_result_name, files))
    assert not any("export-" in each for each in os.listdir(out))


def test_an_export_that_fails_leaves_the_one_before(out, tmp_path, capsys):
    before = table_of(out)
    (tmp_path / "truth.json").write_text("[]")
    assert export.main([out, "--format", "csv,coco", "--run", "monday", "--coco-ground-truth", f"{tmp_path}/truth.json"]) == 2
    assert "expected COCO annotations" in capsys.readouterr().err
    assert dict(pd.read_csv(f"{out}/exports/detections.csv")[["uri", "confidence"]].to_numpy()) == before
    assert os.listdir(f"{out}/exports") == ["detections.csv"]
    assert not any("export-" in each for each in os.listdir(out))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--format", "csv", "--run", "sunday"], "out holds no row of detections, --run sunday"),
        (["--format", "cvs"], f"--format: expected {', '.join(FORMATS)}, crops, got 'cvs'"),
        (["--format", "csv", "--since", "soon"], "--since: expected "),
    ],
)
def test_what_cannot_be_exported_is_told_in_one_line(out, capsys, flags, said):
    assert export.main([out, *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not os.path.exists(f"{out}/exports") or not os.listdir(f"{out}/exports")


def test_crops_are_cut_from_the_images_of_the_current_rows(tmp_path, capsys):
    out, photo = f"{tmp_path}/out", f"{tmp_path}/a.png"
    Image.new("RGB", (640, 480)).save(photo)
    write_rows(out, [detected(photo, confidence=0.5)], made_at=MONDAY)
    write_rows(out, [detected(photo, confidence=0.75)], made_at=MONDAY + DAY)
    assert export.main([out, "--format", "crops", "--to", f"{tmp_path}/to"]) == 0, capsys.readouterr().err
    assert os.listdir(f"{tmp_path}/to/crops/cat") == ["a-1-0.75.jpg"]


def test_an_export_begins_anew_when_a_compaction_deletes_its_shards(out, monkeypatch):
    """The worst moment: the rows are chosen, the first shard is read, and then all shards are replaced by a merged one."""
    read, compacted = ResultsFolder.batches, []

    def read_late(results, shards, **how):
        for part in read(results, shards, **how):
            yield part
            if not compacted:
                compacted.append(0)
                compacted[0] = compact([out])

    monkeypatch.setattr(ResultsFolder, "batches", read_late)
    assert table_of(out) == NEWEST
    assert compacted == [0]


@pytest.mark.slow
def test_a_job_exports_what_counts_as_done_for_it(tmp_path, monkeypatch, capsys, bright_model):
    """Not the rows of other settings: an image has one row in each file, whatever ran before."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_bright_image(tmp_path / "in" / f"{name}.png", (64, 48), (10, 10, 30, 30))
    job = ["--output", "out", "--model", bright_model]
    assert run.main(["--input", "in/a.png", *job]) == 0
    assert run.main(["--input", "in/*.png", *job, "--score-threshold", "0.9"]) == 0
    capsys.readouterr()
    assert run.main(["--input", "in/*.png", *job, "--export", "csv,coco"]) == 0
    assert "exported 2 rows: out/exports/detections.csv, out/exports/coco/results.json" in capsys.readouterr().out
    uris = pd.read_csv("out/exports/detections.csv")["uri"]
    assert sorted(map(os.path.basename, uris)) == ["a.png", "b.png"]
    assert len(COCO("out/exports/coco/images.json").imgs) == 2
