"""What cannot stand in one file is refused, and the files of a format are never of two exports."""

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
from PIL import Image

from pipeline.commands import export
from pipeline.exports import exports
from pipeline.log_lines import log_lines
from pipeline.records import Detections
from tests.shard_rows import OTHER, VERSION, detected, write_rows

PERSON = VERSION._replace(settings="00000000")


def person(uri, version):
    """A detected image whose class has another name."""
    image = detected(uri, version=version)
    found = image.detections
    return type(image)(
        image.ref, 640, 480, *version[:2], Detections(found.boxes_xyxy, found.class_ids, found.confidences, ("person",))
    )


@pytest.fixture
def out(tmp_path):
    write_rows(f"{tmp_path}/out", [detected("p/a.jpg"), detected("p/b.jpg")], made_at=1.0)
    return f"{tmp_path}/out"


BY_NUMBER = ("coco", "yolo", "tfrecord")


@pytest.mark.parametrize(
    ("version", "names", "flags", "said"),
    [
        pytest.param(VERSION._replace(model="other"), (*BY_NUMBER, "voc", "cvat"), [], "--model decides", id="two models"),
        pytest.param(
            OTHER,
            BY_NUMBER,
            [],
            "in version 8; --model-version decides|in version 7; --model-version decides",
            id="a class with two names",
        ),
        pytest.param(PERSON, BY_NUMBER, [], "in others of version 7; --settings decides", id="of one version"),
        pytest.param(OTHER, (*BY_NUMBER, "voc", "cvat"), ["--all"], "an image may have several; leave it out", id="all rows"),
    ],
)
def test_what_cannot_stand_in_one_file_is_refused_in_a_line_that_names_the_flag(out, version, names, flags, said, capsys):
    """D1: old boxes had the new names, and a label file was that of the oldest row."""
    write_rows(out, [person("p/a.jpg", version)], version=version, made_at=2.0)
    for name in names:
        assert export.main([out, "--format", name, *flags]) == 2
        err = capsys.readouterr().err
        assert any(each in err for each in said.split("|")) and err.startswith(f"error: {name} ") and err.count("\n") == 1
    for name in {"voc", "cvat", "csv", "jsonl", "label-studio"} - {*names}:
        assert export.main([out, "--format", name]) == 0


def test_flags_choose_and_the_newest_row_is_the_default(out, capsys):
    write_rows(out, [person("p/a.jpg", OTHER), person("p/b.jpg", OTHER)], version=OTHER, made_at=2.0)
    for flags, names in (([], ["person"]), (["--model-version", "7"], ["cat"])):
        assert export.main([out, "--format", "coco", *flags]) == 0, capsys.readouterr().err
        images = json.loads(Path(out, "exports/coco/images.json").read_text())
        assert len(images["images"]) == 2 and [each["name"] for each in images["categories"]] == names


def of_export(folder):
    """Which export each file of COCO is of, by its number of images or boxes."""
    found = {}
    for name in ("results", "images", "annotations"):
        path = Path(folder, "coco", f"{name}.json")
        if path.exists():
            content = json.loads(path.read_text())
            found[name] = len({each["image_id"] for each in content} if name == "results" else content["images"])
    return found


@log_lines()
def test_an_export_that_is_stopped_at_any_moment_leaves_files_of_one_export(out, monkeypatch, capsys):
    """D13: boxes of the new one stood beside the images of the old one."""
    replace, number = os.replace, 0
    while True:
        monkeypatch.setattr(os, "replace", replace)
        assert export.main([out, "--format", "coco", "--model-version", "7"]) == 0
        assert of_export(f"{out}/exports") == {"results": 2, "images": 2, "annotations": 2}
        if not number:
            write_rows(out, [person("p/c.jpg", OTHER)], version=OTHER, made_at=2.0)
        number += 1
        left = number

        def stopping(*args):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return replace(*args)

        monkeypatch.setattr(os, "replace", stopping)
        code = export.main([out, "--format", "coco", "--model-version", "8"])
        assert len({*of_export(f"{out}/exports").values()}) == 1, number
        if code == 0:
            break
        assert code == 130 and "the files of a format that are there belong together" in capsys.readouterr().err
    assert number > 3


def test_of_two_exports_at_once_all_files_are_of_one(out, monkeypatch):
    """The second one begins to give its files their names while the first one does."""
    write_rows(out, [person("p/c.jpg", OTHER)], version=OTHER, made_at=2.0)
    replace, second = os.replace, []
    begun, codes = threading.Event(), []

    def pausing(source, target):
        if target.endswith("coco/images.json") and not second:
            second.append(threading.Thread(target=lambda: codes.append(at_once(begun))))
            second[0].start()
            assert begun.wait(60)
        return replace(source, target)

    def at_once(begun):
        locked = exports.locked

        @contextlib.contextmanager
        def noting(*args, **how):
            begun.set()
            with locked(*args, **how):
                yield

        monkeypatch.setattr(exports, "locked", noting)
        return len(exports.export(out, ["coco"], exports.Wanted(version="8")).files)

    monkeypatch.setattr(os, "replace", pausing)
    exports.export(out, ["coco"], exports.Wanted(version="7"))
    second[0].join()
    assert codes == [3] and of_export(f"{out}/exports") == {"results": 1, "images": 1, "annotations": 1}


def crops_of(folder):
    return {str(path.relative_to(folder)) for path in Path(folder, "exports/crops").rglob("*") if path.is_file()}


@log_lines()
def test_crops_of_two_exports_are_never_mixed_and_other_files_stay(tmp_path, monkeypatch, capsys):
    """Crops of rows that no longer count trained an ImageFolder; the worst moments are those between two names."""
    out, photo, gone = f"{tmp_path}/out", f"{tmp_path}/a.png", f"{tmp_path}/b.png"
    for path in (photo, gone):
        Image.new("RGB", (640, 480)).save(path)
    write_rows(out, [detected(photo), detected(gone)], made_at=1.0)
    write_rows(out, [person(photo, OTHER)], version=OTHER, made_at=2.0)
    old, new = (["--format", "crops", "--model-version", version] for version in "78")
    assert export.main([out, *old]) == 0, capsys.readouterr().err
    first, others = crops_of(out), {"exports/crops/cat/mine.jpg", "exports/crops/notes.txt"}
    assert {os.path.dirname(path) for path in first} == {"exports/crops/cat"} and len(first) == 2
    for path in others:
        Path(out, path).write_bytes(b"mine")
    replace, stops = os.replace, 0
    while True:
        stops += 1
        left = stops

        def stopping(source, target):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return replace(source, target)

        monkeypatch.setattr(os, "replace", stopping)
        code = export.main([out, *new])
        monkeypatch.setattr(os, "replace", replace)
        now = crops_of(out) - others
        assert now in (first, set()) or not now & first, stops
        if code == 0:
            break
        assert code == 130
        assert export.main([out, *old]) == 0
    assert stops > 2 and crops_of(out) == now | others and {os.path.dirname(path) for path in now} == {"exports/crops/person"}
    Path(out, "exports/crops/cat/mine.jpg").unlink()
    assert export.main([out, *old]) == 0
    assert sorted(os.listdir(f"{out}/exports/crops")) == ["cat", "notes.txt"], "a class without crops is no class"
    os.remove(photo)
    os.remove(gone)
    assert export.main([out, *new]) == 1
    assert crops_of(out) == first | {"exports/crops/notes.txt"}, "without any image there is no export"
