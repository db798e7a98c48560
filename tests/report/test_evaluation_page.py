"""`evaluation.html`: one file that shows the figures, the curves and the errors of a model with pictures."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from pipeline.commands.evaluate import main
from tests.models.test_evaluate import found, row, truth, write_lines

NASTY = "</style><script>alert('a')</script>\u202e"


def photo(path):
    """A photo of 640 x 480 noisy pixels, which compress badly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)).save(path, quality=90)
    return path


def page_of(folder, rows, content, *arguments):
    (folder / "truth.json").write_text(json.dumps(content))
    write_lines(folder / "rows.jsonl", rows)
    command = ["--detections", f"{folder}/rows.jsonl", "--ground-truth", f"{folder}/truth.json", "--resamples", "20"]
    assert main([*command, "--page", f"{folder}/evaluation.html", *arguments]) == 0
    page = (folder / "evaluation.html").read_text(encoding="utf-8")
    return page.replace("<wbr>", "")  # places at which a long name may break


def section(page, title):
    return next(part for part in page.split("<section>") if f"<h2>{title}</h2>" in part)


def text(html):
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.fixture
def errors(tmp_path):
    """A miss, a false positive, a wrong class and a poorly placed box, each in a photo of its own."""
    boxes = [(0, 1, [40, 40, 100, 100]), *[(n, 1, [10, 10, 100, 100]) for n in (2, 3, 4)]]
    detected = {
        "miss": [],
        "false": [found("dog", confidence=0.81)],
        "class": [found("dog", confidence=0.82)],
        "place": [found(box=(70, 10, 170, 110), confidence=0.83)],
        "right": [found(confidence=0.84)],
        "unlabelled": [found(confidence=0.5)],
    }
    labelled = [photo(tmp_path / "photos" / f"{name}.jpg").name for name in detected if name != "unlabelled"]
    rows = [row(f"{tmp_path}/photos/{name}.jpg", *objects) for name, objects in detected.items()]
    return tmp_path, rows, truth(labelled, boxes)


def test_each_error_is_shown_with_its_picture_and_in_words(errors):
    page = page_of(*errors, "--threshold", "0.5")
    shown = section(page, "Errors")
    for kind, said in {
        "Misses: 1": "cat not detected",
        "False positives: 1": "not labelled dog 0.81",
        "Wrong class: 1": "cat dog 0.82, IoU 1.00",
        "Poorly placed: 1": "cat cat 0.83, IoU 0.25",
    }.items():
        part = next(part for part in shown.split("<h3>") if part.startswith(kind))
        assert said in text(part)
        assert part.count("data:image/jpeg;base64,") == 1
        assert part.count("<use href=") == 2  # once beside the labels, once beside the detections
    assert "photos/unlabelled.jpg 1 0.500" in text(section(page, "What to label next"))
    assert "Precision 0.250 Recall 0.250" in text(section(page, "At confidence 0.50"))


@pytest.mark.parametrize(("present", "left_out"), [(11, True), (10, False)])
def test_the_confusion_matrix_has_every_class_that_occurs_before_it_leaves_one_out(tmp_path, present, left_out):
    """Of 30 classes the last ones occur, and all their detections are right."""
    categories = [{"id": number, "name": f"class {number}"} for number in range(30)]
    images = [f"{number}.jpg" for number in range(30 - present, 30)]
    boxes = [(at, 30 - present + at, [10, 10, 100, 100]) for at in range(present)]
    rows = [row(name, found(f"class {name.removesuffix('.jpg')}")) for name in images]
    shown = section(page_of(tmp_path, rows, truth(images, boxes, categories)), "Confusion")
    assert shown.count('<th scope="row">class ') == 10
    assert ("Only the classes with the most errors." in shown) == left_out


@pytest.mark.parametrize("labelled", ["cat", "1"], ids=["of the labels", "of the rows, for labels without names"])
def test_each_class_of_the_page_has_a_name_of_its_own_and_categories_of_one_name_are_one_class(tmp_path, labelled):
    """The page ended with an error of zip(), and every object of the second category was a miss."""
    categories = [
        {"id": 1, "name": labelled},
        {"id": 2, "name": "dog" if labelled == "cat" else "2"},
        {"id": 7, "name": labelled},
    ]
    boxes = [(0, 1, [10, 10, 100, 100]), (1, 7, [10, 10, 100, 100]), (0, 2, [300, 10, 100, 100])]
    second = found("dog" if labelled == "cat" else "cat", (300, 10, 400, 110), class_id=1)
    rows = [row("a.jpg", found(), second), row("b.jpg", found(class_id=2))]
    page = page_of(tmp_path, rows, truth(["a.jpg", "b.jpg"], boxes, categories), "--json", f"{tmp_path}/figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["AP"] == pytest.approx(1) and len(figures["per_class"]) == 2
    assert "recall 1.000, 2 objects" in text(page) and "recall 1.000, 1 object" in text(page)


def test_the_figures_of_the_page_are_those_of_the_command(errors, capsys):
    page = page_of(*errors, "--json", str(errors[0] / "figures.json"))
    figures = json.loads((errors[0] / "figures.json").read_text())
    assert f"<b>{figures['AP']:.3f}</b>" in page
    low, high = figures["intervals"]["AP"]
    assert f"95 % interval {low:.3f} to {high:.3f}" in page
    assert all("1 row without ground truth: ignored" in text for text in (page, capsys.readouterr().out))


@pytest.mark.parametrize("threshold", ["0.5", "0.815", "0"])
def test_the_command_shows_precision_and_recall_of_the_page(threshold, errors, capsys):
    """At any threshold, of one that is no hundredth, too."""
    page = page_of(*errors, "--threshold", threshold)
    (shown,) = re.findall(r"at confidence (\S+) and IoU 0.50: precision (\S+), recall (\S+)", capsys.readouterr().out)
    assert "Precision {1} Recall {2}".format(*shown) in text(section(page, "At confidence {}".format(*shown)))


def test_the_page_is_one_file_without_scripts_whatever_names_say(errors, capsys):
    folder, rows, content = errors
    content["categories"] = [{"id": 1, "name": NASTY}, {"id": 3, "name": "dog"}]
    rows = json.loads(json.dumps(rows).replace('"cat"', json.dumps(NASTY)))
    rows.append(row(f"/x/{NASTY}.jpg", found("dog", confidence=0.5)))
    page = page_of(folder, rows, content)
    assert "\\u202e" in page and "<script" not in page
    assert "\u202e" not in page + "".join(capsys.readouterr())
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*', page) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]+)', page).group(1)
    assert policy.startswith("default-src &#39;none&#39;")
    assert " style=" not in page


@pytest.mark.parametrize(("width", "height", "is_turned"), [(3200, 2400, False), (640, 480, True)], ids=["large", "turned"])
def test_the_box_lies_on_its_object_in_the_upright_photo(tmp_path, width, height, is_turned):
    """A black object on white, in a photo that is read at a fraction of its size."""
    x, y, w, h = width // 2, height // 3, width // 10, height // 5
    pixels = np.full((height, width, 3), 255, np.uint8)
    pixels[y : y + h, x : x + w] = 0
    image, exif = Image.fromarray(pixels), Image.Exif()
    if is_turned:
        exif[0x0112] = 6
        image = image.transpose(Image.Transpose.ROTATE_90)
    image.save(tmp_path / "a.jpg", exif=exif)
    content = truth(["a.jpg"], [(0, 1, [x, y, w, h])])
    page = section(page_of(tmp_path, [row(f"{tmp_path}/a.jpg", width=width, height=height)], content), "Errors")
    (encoded,) = re.findall(r"data:image/jpeg;base64,([^\"]+)", page)
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")).copy()
    drawn = re.search(r'viewBox="0 0 (.+) .+" role[^§]*?class="of" x="(.+)" y="(.+)" width="(.+)" height="(.+)"', page).groups()
    across, *box = map(float, drawn)  # the page may show a small picture enlarged
    left, top, wide, high = (round(edge * picture.shape[1] / across) for edge in box)
    assert picture[top + 3 : top + high - 3, left + 3 : left + wide - 3].max() < 60
    picture[max(top - 3, 0) : top + high + 3, max(left - 3, 0) : left + wide + 3] = 255
    assert picture.min() > 190


def test_images_are_found_in_another_folder_and_a_missing_one_is_said(errors):
    folder, rows, content = errors
    moved = json.loads(json.dumps(rows).replace(str(folder / "photos"), "gs-that-was/day/photos"))
    packed = json.loads(json.dumps(moved).replace("/photos/", "/photos.zip#"))
    for named, given in ((moved, folder), (packed, folder / "photos")):
        page = page_of(folder, named, content, "--threshold", "0.5", "--images", str(given))
        assert page.count("data:image/jpeg") == 4
    page = page_of(folder, moved, content, "--threshold", "0.5")
    assert ("data:image/jpeg" in page, page.count("image not readable")) == (False, 8)


def test_pictures_stay_few_however_many_errors_there_are(tmp_path):
    photo(tmp_path / "a.jpg")
    wrong = [found("dog", (20 * n, 10, 20 * n + 15, 30), 0.9 - n / 100) for n in range(30)]
    page = page_of(tmp_path, [row(f"{tmp_path}/a.jpg", *wrong)], truth(["a.jpg"], [(0, 1, [0, 300, 5, 5])]), "--threshold", "0.1")
    assert "False positives: 30" in page
    assert page.count("data:image/jpeg") == 8 + 1
    assert len(page) < 200_000
