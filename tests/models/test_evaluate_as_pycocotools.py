"""The figures of any boxes are those of pycocotools, and those of a resample are those of its images."""

import contextlib
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from models.evaluate import FIGURES, evaluate
from models.evaluate.average_precision import mean_figures, measure
from tests.models.test_evaluate import found, row


def random_case(seed, images=12, classes=4, most=9, grid=8, extra=6, digits=1):
    """COCO ground truth and results whose boxes often overlap, with equal scores, crowds, all sizes and many detections."""
    generator = np.random.default_rng(seed)

    def box():
        x, y = generator.integers(0, 40, 2) * grid
        w, h = generator.integers(1, 20, 2) * generator.choice([1, grid])
        return [float(v) for v in (x, y, w, h)]

    annotations, results = [], []
    for image in range(images):
        for _ in range(generator.integers(0, most)):
            one, category = box(), int(generator.integers(classes))
            crowd = int(generator.random() < 0.1)
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": category + 1, "bbox": one, "iscrowd": crowd}
                | {"area": one[2] * one[3] * float(generator.choice([1.0, 0.6]))}
            )
            for _ in range(generator.integers(0, 3)):
                moved = [v + float(generator.integers(-2, 3)) for v in one[:2]] + one[2:]
                results.append((image, category if generator.random() < 0.8 else int(generator.integers(classes)), moved))
        results += [(image, int(generator.integers(classes)), box()) for _ in range(generator.integers(0, extra))]
    if seed % 5 == 0:  # more detections of a class than count
        results += [(0, 0, box()) for _ in range(130)]
    scored = [
        {"image_id": image, "category_id": category + 1, "bbox": one, "score": round(float(generator.random()), digits)}
        for image, category, one in results
    ]
    truth = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 640, "height": 480} for i in range(images)],
        "annotations": annotations,
        "categories": [{"id": c + 1, "name": f"thing {c}"} for c in range(classes)],
    }
    return truth, scored


def rows_of(truth, results):
    found_in = {image["id"]: [] for image in truth["images"]}
    for one in results:
        (x, y, w, h), number = one["bbox"], one["category_id"] - 1
        found_in[one["image_id"]].append(found(f"thing {number}", (x, y, x + w, y + h), one["score"], class_id=number))
    return [row(image["file_name"], *found_in[image["id"]]) for image in truth["images"]]


def by_pycocotools(truth, results):
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results) if results else COCO(), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    by_class = [p[p > -1].mean() if (p > -1).any() else None for p in evaluation.eval["precision"][..., 0, -1].transpose(2, 0, 1)]
    return [None if value == -1 else float(value) for value in evaluation.stats], by_class


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 3, 8]), st.integers(1, 12))
def test_the_figures_of_any_boxes_are_those_of_pycocotools(seed, images, classes, grid, most):
    truth, results = random_case(seed, images, classes, most, grid)
    expected, by_class = by_pycocotools(truth, results)
    result = evaluate(rows_of(truth, results), truth, multi_label=True)
    assert [result[key] for key in FIGURES] == pytest.approx(expected, abs=1e-9)
    assert list(result["per_class"].values()) == pytest.approx(by_class, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_a_resample_has_the_figures_of_a_data_set_with_its_images_repeated(seed):
    """Scores differ: among equal ones the order of images decides, which the copies change."""
    truth, results = random_case(seed, digits=12)
    weights = np.random.default_rng(seed).integers(0, 4, len(truth["images"]))
    copies = [(image["id"], n) for image, times in zip(truth["images"], weights.tolist(), strict=True) for n in range(times)]
    numbers = {copy: number for number, copy in enumerate(copies)}

    def repeated(ones):
        return [one | {"image_id": number} for one in ones for copy, number in numbers.items() if copy[0] == one["image_id"]]

    annotations = [one | {"id": n} for n, one in enumerate(repeated(truth["annotations"]), 1)]
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in numbers.values()]
    expected, _ = by_pycocotools({**truth, "images": images, "annotations": annotations}, repeated(results))
    measured = measure(rows_of(truth, results), truth, multi_label=True)
    ap, ap50, ap75, recall = mean_figures(measured.matches, weights.astype(float))
    assert [ap, ap50, ap75, recall] == pytest.approx([expected[0], expected[1], expected[2], expected[8]], abs=1e-9)


def test_without_objects_there_is_no_figure():
    truth, results = random_case(1)
    result = evaluate(rows_of(truth, results), {**truth, "annotations": []}, resamples=5)
    assert {result[key] for key in FIGURES} == {None}
    assert set(result["intervals"].values()) == {None}
    assert not any(math.isnan(value) for value in result.values() if isinstance(value, float))
