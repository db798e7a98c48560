"""Errors by kind, the confusion matrix, curves over the threshold, calibration, and whether one output is better than another."""

import json

import numpy as np
import pytest

from models.evaluate.average_precision import interval, measure, resample
from models.evaluate.mistakes import CONFIDENCES, best_threshold, calibration, find_mistakes, threshold_curves, unsure_first
from pipeline.commands.evaluate import main
from tests.models.test_evaluate import found, row, truth, write_lines
from tests.models.test_evaluate_as_pycocotools import random_case, rows_of

CAT, DOG = 1, 3


def mistakes_of(detections, objects, threshold=0.5, crowd=()):
    """(Kind, confidence) of each mistake in one image with `objects` (category, xywh), and the confusion matrix."""
    content = truth(["a.jpg"], [(0, category, box) for category, box in objects])
    for number in crowd:
        content["annotations"][number]["iscrowd"] = 1
    made = find_mistakes(measure([row("a.jpg", *detections)], content, multi_label=True), threshold)
    return sorted((one.kind, round(one.weight, 3)) for one in made.mistakes), made.confusion.tolist()


BOX = [10, 10, 100, 100]
CASES = {
    "right": ([found()], [(CAT, BOX)], [], (0, 0)),
    "nothing at all": ([], [], [], None),
    "missed": ([], [(CAT, BOX)], [("miss", 1.0)], (0, 3)),
    "found below the threshold": ([found(confidence=0.4)], [(CAT, BOX)], [("miss", 1.0)], (0, 3)),
    "nothing there": ([found(box=(300, 300, 400, 400))], [], [("false positive", 0.9)], (3, 0)),
    "found twice": ([found(), found(box=(12, 10, 110, 110), confidence=0.7)], [(CAT, BOX)], [("false positive", 0.7)], (3, 0)),
    "wrong class": ([found("dog")], [(CAT, BOX)], [("wrong class", 0.9)], (0, 1)),
    "half beside it": ([found(box=(70, 10, 170, 110))], [(CAT, BOX)], [("poorly placed", 0.9)], (0, 3)),
    "far beside it": ([found(box=(105, 10, 205, 110))], [(CAT, BOX)], [("false positive", 0.9), ("miss", 1.0)], (3, 0)),
    "the right class wins over the better box": (
        [found("dog", (10, 10, 110, 110), 0.9), found("cat", (10, 10, 110, 90), 0.6)],
        [(CAT, BOX)],
        [("false positive", 0.9)],
        (3, 1),
    ),
    "two labels of a box: the best one": ([found("dog", confidence=0.6), found("cat")], [(CAT, BOX)], [], (0, 0)),
}


@pytest.mark.parametrize(("detections", "objects", "kinds", "cell"), CASES.values(), ids=CASES)
def test_each_error_has_its_kind_and_its_place_in_the_confusion_matrix(detections, objects, kinds, cell):
    made, confusion = mistakes_of(detections, objects)
    assert made == kinds
    assert cell is None or confusion[cell[0]][cell[1]] == 1


def test_detections_on_a_crowd_do_not_count():
    made, confusion = mistakes_of([found(), found("dog", (15, 15, 60, 60))], [(CAT, [0, 0, 300, 300])], crowd=[0])
    assert made == [("false positive", 0.9)]
    assert sum(map(sum, confusion)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_each_object_and_each_detection_is_once_in_the_matrix(seed):
    content, results = random_case(seed)
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 0
    made = find_mistakes(measure(rows_of(content, results), content, multi_label=True), 0.4)
    classes = len(content["categories"])
    assert made.confusion[:-1].sum(axis=1).tolist() == np.bincount(made.objects.classes, minlength=classes).tolist()
    assert made.confusion[:, :-1].sum(axis=0).tolist() == np.bincount(made.detections.classes, minlength=classes).tolist()
    twice = sum(one.kind == "poorly placed" for one in made.mistakes)  # as a miss, and as a false positive
    assert made.confusion.sum() == made.confusion.trace() + len(made.mistakes) + twice


def test_curves_over_the_threshold_count_what_is_at_least_as_confident():
    detections = [found(confidence=0.9), found(box=(300, 300, 400, 400), confidence=0.5)]
    matches = measure([row("a.jpg", *detections), row("b.jpg", found(confidence=0.7))], truth()).matches
    at = CONFIDENCES.round(2).tolist()
    curves = {name: dict(zip(at, values.tolist(), strict=True)) for name, values in threshold_curves(matches).items()}
    assert [curves["recall"][at] for at in (0.0, 0.7, 0.71, 0.9, 0.91)] == [1.0, 1.0, 0.5, 0.5, 0.0]
    assert [curves["precision"][at] for at in (0.5, 0.51, 0.9)] == [pytest.approx(2 / 3), 1.0, 1.0]
    assert np.isnan(curves["precision"][0.95])
    assert curves["f1"][0.6] == 1.0
    assert 0.5 < best_threshold(matches) <= 0.7


def test_calibration_is_the_share_that_is_right():
    rows = [row("a.jpg", found(confidence=0.85), found(box=(300, 300, 400, 400), confidence=0.81)), row("b.jpg")]
    bins, error = calibration(measure(rows, truth()).matches)
    assert bins[8] == (pytest.approx(0.83), 0.5, 2)
    assert [n for _, _, n in bins] == [0] * 8 + [2, 0]
    assert error == pytest.approx(0.33)


def test_images_without_labels_are_listed_with_the_least_certain_first():
    rows = [row("a.jpg", found()), row("sure.jpg", found()), row("none.jpg"), row("unsure.jpg", *[found(confidence=0.5)] * 3)]
    listed = unsure_first(measure(rows, truth(["a.jpg"])), 0.5)
    assert [(uri, unsure) for uri, unsure, _ in listed] == [("unsure.jpg", 3), ("sure.jpg", 0), ("none.jpg", 0)]


@pytest.mark.slow
def test_an_interval_holds_the_true_value_about_19_times_in_20():
    """Of objects that are found with a probability of 0.6 each: the AP is their share, since nothing else is found."""
    generator, inside = np.random.default_rng(1), 0
    for _ in range(40):
        hit = generator.random(80) < 0.6
        content = truth([f"{i}.jpg" for i in range(80)])
        rows = [row(f"{i}.jpg", *([found()] if one else [])) for i, one in enumerate(hit)]
        low, high = interval(resample([measure(rows, content).matches], 100)[0, :, 1])
        inside += low <= 0.6 <= high
    assert 32 <= inside <= 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missed", "by_reference", "verdict"),
    [(0, 16, "better"), (16, 0, "worse"), (0, 0, "not shown to differ"), (0, 2, "not shown to differ")],
)
def test_the_command_says_in_one_line_which_output_is_better(tmp_path, capsys, missed, by_reference, verdict):
    """Both miss the objects of every fourth image, and those of the first ones given here; the test is paired."""
    (tmp_path / "truth.json").write_text(json.dumps(truth([f"{i}.jpg" for i in range(40)])))
    for name, first in {"rows.jsonl": missed, "reference.jsonl": by_reference}.items():
        write_lines(tmp_path / name, [row(f"{i}.jpg", *([found()] if i % 4 and i >= first else [])) for i in range(40)])
    places = ["--detections", f"{tmp_path}/rows.jsonl", "--reference", f"{tmp_path}/reference.jsonl"]
    places += ["--ground-truth", f"{tmp_path}/truth.json", "--json", f"{tmp_path}/figures.json", "--resamples", "400"]
    assert main(places) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "beside the reference (95 % interval " in line)
    written = json.loads((tmp_path / "figures.json").read_text())
    difference, low, high, p = (written["reference"][name] for name in ("difference", "low", "high", "p"))
    assert line.startswith(f"{verdict}: AP {difference:+.3f} ") and line.endswith(f"p = {p:.3f}, 40 images)")
    assert difference == pytest.approx(written["AP"] - written["reference"]["AP"])
    assert low <= difference <= high and (difference > 0) == (by_reference > missed)
    assert (p < 0.01) == (low > 0 or high < 0) == (verdict != "not shown to differ")
    if missed == by_reference:
        assert (low, high, p) == (0.0, 0.0, 1.0), "no draw of the images shows a difference"


def test_another_order_of_classes_is_noticed(tmp_path, capsys):
    """Labels without names go by number, so a model with its classes in another order is paired wrongly."""
    for i in range(12):
        (tmp_path / f"labels/{i}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"labels/{i}.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    rows = [row(f"{i}.jpg", found("cat", (256, 192, 384, 288), class_id=0)) for i in range(12)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert main(["--detections", str(path), "--ground-truth", f"{tmp_path}/labels", "--resamples", "0"]) == 0
    assert "12 of 12 boxes that fit have another class: is the order of classes right?\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--detections", "a"], ["--detections", "a", "--reference", "b", "--page", "c.html"]])
def test_arguments_that_do_not_go_together_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--ground-truth" in capsys.readouterr().err
