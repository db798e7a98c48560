"""COCO AP of an output, and the agreement of two outputs."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.evaluate import FIGURES, compare, evaluate
from models.evaluate.detection_rows import RowsError, read_rows
from pipeline.commands.evaluate import main
from pipeline.results.current import read_rows as rows_of_output
from tests.fixtures import REPO

ONE = pytest.approx(1.0, abs=1e-12)  # pycocotools divides by a count plus an epsilon
CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 7, "name": "plant"}]


def truth(images=("a.jpg", "b.jpg"), boxes=None, categories=CATEGORIES):
    """Ground truth with one 100x100 cat in each image, or the given (image index, category id, xywh)."""
    boxes = [(index, 1, [10, 10, 100, 100]) for index in range(len(images))] if boxes is None else boxes
    objects = [{"id": i, "image_id": 100 + image, "category_id": c, "bbox": box} for i, (image, c, box) in enumerate(boxes)]
    listed = [{"id": 100 + i, "file_name": name, "width": 640, "height": 480} for i, name in enumerate(images)]
    return {"images": listed, "annotations": objects, "categories": categories}


def found(name="cat", box=(10, 10, 110, 110), confidence=0.9, class_id=0):
    return {"box_xyxy": list(box), "class_id": class_id, "class_name": name, "confidence": confidence}


def row(uri, *detections, width=640, height=480):
    image = {"uri": uri, "generation": "1", "width": width, "height": height}
    return {"image": image, "model": {}, "detections": list(detections)}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def error_of(capsys, *command):
    """The one line with which a command is refused."""
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [row("/x/a.jpg", found()), row("gs://b/c/b.jpg", found())],
            {"AP": ONE, "AP_large": ONE, "AR_100": ONE, "AP_small": None, "per_class": {"cat": ONE, "dog": None, "plant": None}},
            id="perfect",
        ),
        pytest.param([row("a.jpg"), row("b.jpg")], {"AP": 0.0, "AR_100": 0.0, "detections": 0}, id="no detections"),
        pytest.param(
            [row("a.jpg", found())],  # precision 1 at the recalls 0, 0.01, … 0.5, of 101
            {"AP": pytest.approx(51 / 101), "AR_100": 0.5, "images": 2, "images_without_row": 1},
            id="an image without row counts as one without detections",
        ),
        pytest.param(
            [row(name, found()) for name in ("a.jpg", "b.jpg", "c.jpg")],
            {"AP": ONE, "detections": 2, "rows_without_ground_truth": 1},
            id="a row without ground truth",
        ),
        pytest.param(
            [row("a.jpg", found(), found("zebra", confidence=0.99)), row("b.jpg", found(), width=480, height=640)],
            {"AP": ONE, "detections_ignored": {"zebra": 1}, "size_mismatches": 1},
            id="a class that is no category, and an image of another size",
        ),
    ],
)
def test_figures_of_what_can_be_counted_by_hand(rows, expected):
    result = evaluate(rows, truth())
    assert list(result)[:12] == list(FIGURES)
    assert {key: result[key] for key in expected} == expected


ANIMALS = [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}]
FROM_0 = [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}]


@pytest.mark.parametrize(
    ("name", "class_id", "category", "by", "categories"),
    [
        pytest.param("cat", 99, 1, "name", CATEGORIES, id="as it stands"),
        pytest.param("Pl-Ant", 0, 7, "name", CATEGORIES, id="other spelling"),
        pytest.param("tv", 0, 2, "name", [{"id": 1, "name": "T V"}, {"id": 2, "name": "tv"}], id="exact before similar"),
        pytest.param("class 1", 1, 3, "class_id", CATEGORIES, id="no name: second category"),
        pytest.param("", 2, 7, "class_id", CATEGORIES, id="empty: third category"),
        pytest.param("class 3", 2, 3, "category_id", CATEGORIES, id="the model's number, from 1: category 3"),
        pytest.param("class 18", 18, 18, "category_id", ANIMALS, id="no position, but a category's id: AP was 0"),
        pytest.param("class 1", 0, 0, "class_id", FROM_0, id="numbers from 1 are no ids of categories from 0"),
        *(
            pytest.param(darknet, 0, 5, "name", [{"id": 5, "name": coco}], id=f"Darknet's {darknet}")
            for darknet, coco in {"aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "tvmonitor": "tv"}.items()
        ),
    ],
)
def test_classes_are_matched_by_name_else_by_their_order(name, class_id, category, by, categories):
    labels = truth(["a.jpg"], [(0, category, [10, 10, 100, 100])], categories)
    result = evaluate([row("a.jpg", found(name, class_id=class_id))], labels)
    assert (result["AP"], result["classes_by"]) == (ONE, by)
    assert result["per_class"][next(one["name"] for one in categories if one["id"] == category)] == ONE


@pytest.mark.parametrize("match", ["name", "path"])
def test_images_of_one_name_are_told_apart_by_their_folders(match):
    content = truth(["x/a.jpg", "a.jpg", "b.jpg"])
    rows = [row("gs://bucket/x/a.jpg", found()), row("/data/y/a.jpg", found()), row("elsewhere/b.jpg", found())]
    assert evaluate(rows, content, match=match)["AP"] == ONE, "the longest path that fits decides"


@pytest.mark.parametrize("match", ["name", "path"])
@pytest.mark.parametrize("archive", ["gs://b/photos.zip#", "photos.tar.gz#x/", "photos.TGZ#"])
def test_a_member_of_an_archive_has_the_labels_of_its_name_in_the_archive(archive, match):
    rows = [row(f"{archive}{name}.jpg", found()) for name in "ab"]
    assert evaluate(rows, truth(["a.jpg", "photos.tar.gz#x/b.jpg" if "x" in archive else "b.jpg"]), match=match)["AP"] == ONE


def test_the_best_label_of_a_box_counts_or_all_of_them():
    """The wrong label comes first: with one label a box the object is missed, with several it is found after a false alarm."""
    several = [row("a.jpg", found("dog", confidence=0.8), found("cat", confidence=0.3))]
    one, both = (evaluate(several, truth(["a.jpg"]), multi_label=multi_label) for multi_label in (False, True))
    assert (one["AP"], one["labels_left_out"], one["detections"]) == (0.0, 1, 1)
    assert (both["AP"], both["labels_left_out"], both["detections"]) == (ONE, 0, 2)


SAME_NAME = truth(["x/a.jpg", "y/a.jpg"])
ONE_ROW = [row("a.jpg")]
REFUSED = {
    "no match": ([row("c.jpg")], truth(), r"none of 1 rows .* the rows have c.jpg; the ground truth has a.jpg, b.jpg"),
    "same name": ([row("x/a.jpg"), row("y/a.jpg")], truth(), r"two rows for one .* x/a.jpg and y/a.jpg; try --match path"),
    "twice": ([*ONE_ROW, *ONE_ROW], truth(), r"two rows for one .* a.jpg and a.jpg; each image may have one row"),
    "no detections": ([{"image": {}}], truth(), r"row 1: expected \{\"image\": \{\"uri\"\}.*got KeyError: 'detections'"),
    "a short box": ([row("a.jpg", {"box_xyxy": [1, 2, 3]})], truth(), r"row 1: expected .*got ValueError: .* has not 4 numbers"),
    "not a number": ([row("a.jpg", found(confidence=float("nan")))], truth(), r"row 1: .*got ValueError: .* no finite number"),
    "no row": ([7], truth(), r"row 1: expected"),
    "other classes": ([row("a.jpg", found("tiger"))], truth(), r"no class .* have tiger; the labels have cat, dog, plant"),
    "truth without lists": (ONE_ROW, {"images": []}, "expected COCO annotations with the lists images, annotations and categor"),
    "empty truth": (ONE_ROW, {"images": [], "annotations": [], "categories": []}, "at least one image and one category"),
    "an image without name": (ONE_ROW, truth() | {"images": [{"id": 1}]}, "got KeyError: 'file_name'"),
    "a short box of truth": (ONE_ROW, truth(boxes=[(0, 1, [1, 2])]), "got ValueError"),
    "a box without end": (ONE_ROW, truth(boxes=[(0, 1, [1, 2, 3, float("inf")])]), "a box of no finite numbers"),
}


@pytest.mark.parametrize(("rows", "labels", "message"), REFUSED.values(), ids=REFUSED)
def test_rows_and_ground_truth_that_cannot_be_used_are_refused(rows, labels, message):
    with pytest.raises(RowsError, match=message):
        evaluate(rows, labels)


def test_a_row_that_fits_no_path_is_refused():
    with pytest.raises(RowsError, match=r"none of 1 rows .* have /data/xx/a.jpg; .* x/a.jpg, y/a.jpg; try --match name"):
        evaluate([row("/data/xx/a.jpg")], SAME_NAME, match="path")


def test_a_folder_an_output_a_glob_a_file_and_a_shard_read_alike(tmp_path):
    rows = [row("a.jpg", found(box=(9.0, 10.5, 110, 100))), row("b.jpg")]
    write_lines(tmp_path / "out/detections/detections-0.jsonl", rows[:1])
    write_lines(tmp_path / "out/detections/2026/more.jsonl", rows[1:])
    write_lines(tmp_path / "out/detections/.staging-1/half.jsonl", [row("c.jpg")])
    write_lines(tmp_path / "out/dead_letters/dead.jsonl", [{"stage": "decode"}])
    table = [{**each["image"], "uri_bytes": None, "detections": each["detections"]} for each in rows]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "shard.parquet")
    lines = f"{tmp_path}/out/detections/**/*.jsonl"
    for source in (tmp_path / "out", tmp_path / "out/detections", lines, tmp_path / "shard.parquet"):
        assert evaluate(rows_of_output(str(source)), truth()) == evaluate(rows, truth()), source
    with pytest.raises(RowsError, match=r"shard.parquet: expected JSON Lines or COCO results, got Parquet"):
        read_rows(tmp_path / "shard.parquet")
    assert [one.uri for one in read_rows(tmp_path / "out/detections/detections-0.jsonl")] == ["a.jpg"]


COCO_RESULTS = [{"image_id": 100, "category_id": 1, "bbox": [10, 10, 100, 100], "score": 0.9}]


def test_coco_results_carry_the_ids_of_the_ground_truth(tmp_path):
    path = tmp_path / "results.json"
    others = [COCO_RESULTS[0] | each for each in ({"category_id": 99}, {"image_id": 7}, {"category_id": 3, "score": 0.95})]
    path.write_text(json.dumps([*COCO_RESULTS, *others]))
    result = evaluate(path, truth(["a.jpg"]))
    assert result["detections"] == 2, "all labels of a box"
    assert (result["AP"], result["classes_by"], result["rows_without_ground_truth"]) == (ONE, "category_id", 1)
    assert result["detections_ignored"] == {"99": 1}


def test_an_image_list_beside_coco_results_gives_their_ids_a_meaning(tmp_path):
    """Ids that count from 1 name other images and classes than the ground truth's equal ids."""
    images = [{"id": 1, "file_name": "/x/b.jpg", "width": 640, "height": 480}, {"id": 101, "file_name": "a.jpg"}]
    (tmp_path / "images.json").write_text(json.dumps({"images": images, "categories": [{"id": 1, "name": "dog"}]}))
    (tmp_path / "results.json").write_text(json.dumps([COCO_RESULTS[0] | {"image_id": 1}]))
    result = evaluate(tmp_path / "results.json", truth(boxes=[(1, 3, [10, 10, 100, 100])]))
    assert result["per_class"] == {"cat": None, "dog": ONE, "plant": None}
    assert (result["images_without_row"], result["classes_by"]) == (0, "name")


def test_differences_of_matched_pairs_are_measured():
    ours = [row("a.jpg", found(box=(0, 0, 100, 100), confidence=0.9), found(box=(200, 0, 300, 100), confidence=0.5))]
    theirs = [row("a.jpg", found(box=(0, 0, 100, 80), confidence=0.8), found(box=(200, 0, 300, 100), confidence=0.7))]
    result, figures = compare(ours, theirs), {"mean_iou": 0.9, "min_iou": 0.8, "mean_score_difference": -0.05}
    figures |= {"mean_abs_score_difference": 0.15, "max_abs_score_difference": 0.2}
    assert {name: result[name] for name in figures} == pytest.approx(figures)


HIGH, LOWER = found(box=(0, 0, 10, 10)), found(box=(0, 0, 10, 9))
MATCHED = {
    "other class": ([found()], [found("dog")], 0, 0.0),
    "too little overlap": ([HIGH], [found(box=(0, 0, 10, 4))], 0, 0.0),
    "just enough overlap": ([HIGH], [found(box=(0, 0, 10, 5))], 1, 1.0),
    "one partner each": ([found(), found(confidence=0.3)], [found()], 1, 2 / 3),
    "the best partner first": ([HIGH, LOWER], [LOWER, HIGH], 2, 1.0),
    "missed": ([found(), found()], [], 0, 0.0),
    "no detections, which show no agreement": ([], [], 0, None),
}


@pytest.mark.parametrize(("ours", "theirs", "matched", "agreement"), MATCHED.values(), ids=MATCHED)
def test_detections_are_matched_one_to_one(ours, theirs, matched, agreement):
    result = compare([row("a.jpg", *ours)], [row("a.jpg", *theirs)])
    assert (result["matched"], result["agreement"]) == (matched, agreement and pytest.approx(agreement))
    assert (result["mean_iou"] is None) == (matched == 0)
    assert compare([row("a.jpg", *theirs)], [row("a.jpg", *ours)])["matched"] == matched


def test_the_iou_threshold_decides_what_is_a_pair():
    ours, theirs = [row("a.jpg", found(box=(0, 0, 10, 10)))], [row("a.jpg", found(box=(0, 0, 10, 8)))]
    assert [compare(ours, theirs, iou_threshold=t)["matched"] for t in (0.5, 0.8, 0.81)] == [1, 1, 0]


def test_images_that_one_output_lacks_count_against_agreement():
    result = compare([row("a.jpg", found()), row("b.jpg", found())], [row("a.jpg", found()), row("c.jpg")])
    assert (result["images"], result["images_only_in_detections"], result["images_only_in_reference"]) == (1, 1, 1)
    assert result["agreement"] == pytest.approx(2 / 3)


def test_outputs_without_a_common_image_cannot_be_compared():
    with pytest.raises(RowsError, match=r"no image in common: the first has a.jpg, the second b.jpg"):
        compare([row("a.jpg")], [row("b.jpg")])
    with pytest.raises(RowsError, match=r"the first has x/a.jpg, the second y/a.jpg; try --match name"):
        compare([row("x/a.jpg")], [row("y/a.jpg")], match="path")


@pytest.mark.slow
def test_the_command_prints_the_figures_and_writes_them(tmp_path, capsys):
    write_lines(tmp_path / "detections/d.jsonl", [row("a.jpg", found(), found("zebra")), row("c.jpg")])
    (tmp_path / "truth.json").write_text(json.dumps(truth()))
    places = ["--detections", str(tmp_path), "--ground-truth", f"{tmp_path}/truth.json"]
    assert main([*places, "--json", f"{tmp_path}/figures.json"]) == 0
    printed = capsys.readouterr().out
    assert "AP at IoU 0.50:0.95                AP          0.505   95 % interval 0.000 to 1.000\n" in printed
    assert "AP, objects up to 32x32 pixels     AP_small        -\n" in printed
    assert "  cat                                   0.505   0.500\n" in printed
    assert "1 ground-truth image without a row: counted as without detections\n" in printed
    assert "1 row without ground truth: ignored\n" in printed
    assert "1 detection of classes that are no category: ignored: zebra (1)\n" in printed
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written == json.loads(json.dumps(evaluate(tmp_path, tmp_path / "truth.json", resamples=1000)))


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        pytest.param("--json", "truth.json", "reads or writes that file already", id="labels"),
        pytest.param("--json", "link", "reads or writes that file already", id="link to them"),
        pytest.param("--page", "rows.jsonl", "reads or writes that file already", id="rows"),
        pytest.param("--page", "figures.json", "reads or writes that file already", id="one name for both"),
        pytest.param("--json", "/dev/stdout", "choose another name", id="file of standard output"),
        pytest.param("--json", "pipe", "found something else there", id="pipe"),
        pytest.param("--page", "folder", "found something else there", id="folder"),
    ],
)
def test_no_file_is_written_over_an_input_or_what_is_no_file(tmp_path, monkeypatch, capsys, flag, name, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [row("a.jpg", found())])
    (tmp_path / "truth.json").write_text(json.dumps(truth()))
    os.symlink("truth.json", "link")
    os.mkfifo("pipe")
    os.mkdir("folder")
    before = {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in tmp_path.iterdir()}
    files = {"--json": "figures.json", flag: name}
    places = ["--detections", "rows.jsonl", "--ground-truth", "truth.json", *(each for file in files.items() for each in file)]
    assert f"{flag} {name}: " in (said := error_of(capsys, *places)) and message in said
    assert {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in tmp_path.iterdir()} == before


def test_a_link_to_the_figures_stays_and_its_file_is_written(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [row("a.jpg", found())])
    (tmp_path / "link").symlink_to("figures.json")
    assert main(["--detections", str(path), "--reference", str(path), "--json", f"{tmp_path}/link"]) == 0
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "figures.json").read_text())["agreement"] == 1


def test_the_command_compares_two_outputs_and_ends_quietly_where_nobody_reads_on(tmp_path, capsys):
    path = write_lines(tmp_path / "d.jsonl", [row("a.jpg", found())])
    compared = ["--detections", str(path), "--reference", str(path), "--iou-threshold", "0.9"]
    assert main(compared) == 0
    assert "agreement                    1.00000\n" in capsys.readouterr().out
    with subprocess.Popen([sys.executable, "-m", "pipeline", "evaluate", *compared], stdout=-1, stderr=-1, cwd=REPO) as process:
        process.stdout.close()  # as `| head` does
        assert process.wait() == 0
        assert b"Traceback" not in (said := process.stderr.read()) and b"error" not in said


@pytest.mark.parametrize(
    ("detections", "message"),
    [
        ("absent", "absent is not there"),
        ("empty", "empty holds no .jsonl or .parquet file"),
        ("blank.jsonl", "blank.jsonl holds no rows"),
        ("broken.jsonl", "broken.jsonl, line 2 is not JSON"),
        ("https://example.com/out", "https://example.com/out is not there"),
        ("object.json", "expected a list of COCO results, got dict"),
        ("broken.parquet", "broken.parquet: expected rows of detections as Parquet, got "),
    ],
)
def test_detections_that_cannot_be_read_are_told_in_one_line_with_exit_code_2(tmp_path, monkeypatch, capsys, detections, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    row_and_brace = json.dumps(row("a.jpg")) + "\n{\n"
    files = {"blank.jsonl": "\n", "broken.jsonl": row_and_brace, "broken.parquet": "no such file " * 9, "object.json": "{}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert message in error_of(capsys, "--detections", detections, "--reference", detections)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "one of the arguments --ground-truth --reference is required"),
        ("--reference b --page p.html", "--page needs --ground-truth"),
        ("--reference b --ground-truth t.json --resamples 0", "needs --resamples of 1 or more"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        main(["--detections", "a", *flags.split()])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and message in err and err.count("\n") == 1
