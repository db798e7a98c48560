"""What readers may rely on: every row that this program writes fits the schema that it gives of them, and nothing else does."""

import dataclasses
import json
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline import run
from pipeline.extra_fields import extra_text
from pipeline.failures import REASONS, ImageError
from pipeline.records import DetectedImage, Detections, ImageRef, dead_letter_row, detection_row, row_bytes
from pipeline.row_schema import dead_letter_schema, detection_schema
from tests.conftest import write_bright_image
from tests.fixtures import REPO

DETECTION = jsonschema.Draft202012Validator(detection_schema())
DEAD_LETTER = jsonschema.Draft202012Validator(dead_letter_schema())

names = st.text(max_size=20)
extras = st.dictionaries(names, st.none() | st.booleans() | st.integers() | st.floats() | names, max_size=40).map(extra_text)
refs = st.builds(ImageRef, names, names, st.integers(0), st.none() | st.floats(), names, extra=extras)


def as_read(row):
    return json.loads(row_bytes(row))


@pytest.mark.parametrize("schema", [detection_schema(), dead_letter_schema()], ids=lambda schema: schema["title"])
def test_the_schemas_are_schemas(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@hypothesis_settings(deadline=None)
@given(
    ref=refs,
    count=st.integers(0, 5),
    width=st.integers(1, 10**5),
    name=names,
    boxes=st.floats(-1e6, 1e6, width=32),
    confidence=st.floats(0, 1, width=32),
)
def test_any_row_of_detections_fits(ref, count, width, name, boxes, confidence):
    found = Detections(
        np.full((count, 4), boxes, np.float32),
        np.arange(count, dtype=np.int32),
        np.full(count, confidence, np.float32),
        (name,) * count,
    )
    DETECTION.validate(as_read(detection_row(DetectedImage(ref, width, 1, name, "", found))))


@hypothesis_settings(deadline=None)
@given(
    ref=refs,
    stage_and_reason=st.sampled_from([(stage, reason) for stage, reasons in REASONS.items() for reason in reasons]),
    message=names,
    payload=st.binary(max_size=20),
    model=names,
)
def test_any_dead_letter_fits(ref, stage_and_reason, message, payload, model):
    letter = ImageError(*stage_and_reason, message).dead_letter(ref, payload)
    DEAD_LETTER.validate(as_read(dead_letter_row(dataclasses.replace(letter, model_name=model, model_version=model))))


def test_what_a_job_writes_fits_with_what_was_said_of_the_images(tmp_path, bright_model):
    """A manifest says more of some images; one image is damaged, one absent."""
    write_bright_image(tmp_path / "a.png", (64, 48), (10, 12, 30, 36))
    write_bright_image(tmp_path / "b.png", (64, 48), (10, 12, 30, 36))
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    lines = ["uri,camera,label", "a.png,7,rectangle", "b.png,,", "bad.png,8,", "absent.png,9,x"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    out = tmp_path / "out"

    code = run.main(["--input", str(tmp_path / "list.csv"), "--output", str(out), "--model", bright_model])

    assert code == 0
    rows = [json.loads(line) for path in out.glob("detections/*.jsonl") for line in path.open("rb")]
    dead = [json.loads(line) for path in out.glob("dead_letters/*.jsonl") for line in path.open("rb")]
    for row in rows:
        DETECTION.validate(row)
    for row in dead:
        DEAD_LETTER.validate(row)
    said = {row["image"]["uri"].rpartition("/")[2]: row.get("extra") for row in rows + dead}
    assert said == {
        "a.png": {"camera": "7", "label": "rectangle"},
        "b.png": None,
        "bad.png": {"camera": "8"},
        "absent.png": {"camera": "9", "label": "x"},
    }


GOOD = {
    "image": {"uri": "a.jpg", "generation": "1", "width": 2, "height": 1},
    "model": {"name": "m", "version": "3"},
    "detections": [{"box_xyxy": [0, 0.5, 1, 1], "class_id": 0, "class_name": "cat", "confidence": 0.5}],
}
DEAD = {"image": {}, "stage": "read", "reason": "not_found", "message": "x"}


@pytest.mark.parametrize(
    ("schema", "row"),
    [
        pytest.param(DETECTION, GOOD | {"more": 1}, id="unknown key"),
        pytest.param(DETECTION, {"image": GOOD["image"], "model": GOOD["model"]}, id="no detections"),
        pytest.param(DETECTION, GOOD | {"detections": [GOOD["detections"][0] | {"confidence": 1.5}]}, id="confidence"),
        pytest.param(DETECTION, GOOD | {"detections": [GOOD["detections"][0] | {"box_xyxy": [1, 2, 3]}]}, id="three numbers"),
        pytest.param(DETECTION, GOOD | {"detections": [GOOD["detections"][0] | {"box_xyxy": [1, 2, 3, None]}]}, id="null"),
        pytest.param(DETECTION, GOOD | {"image": GOOD["image"] | {"width": 0}}, id="no width"),
        pytest.param(DETECTION, GOOD | {"extra": "x"}, id="extra that is no object"),
        pytest.param(DETECTION, GOOD | {"extra": {"...": 0}}, id="nothing left out"),
        pytest.param(DEAD_LETTER, DEAD | {"stage": "nowhere"}, id="unknown stage"),
        pytest.param(DEAD_LETTER, DEAD | {"stage": "decode"}, id="reason of another stage"),
        pytest.param(DEAD_LETTER, DEAD | {"model": {"name": "m"}}, id="a model without a version"),
        pytest.param(DEAD_LETTER, DEAD | {"detections": []}, id="detections of a dead letter"),
        pytest.param(DEAD_LETTER, GOOD, id="the other kind"),
    ],
)
def test_what_is_no_row_does_not_fit(schema, row):
    DETECTION.validate(GOOD)
    DEAD_LETTER.validate(DEAD)
    assert not schema.is_valid(row)


@pytest.mark.parametrize(("of", "schema"), [("detections", detection_schema()), ("dead_letters", dead_letter_schema())])
def test_the_command_writes_the_schema_without_tensorflow_or_beam(of, schema):
    code = (
        "import sys; from pipeline.row_schema import main; main(); assert not {'tensorflow', 'apache_beam'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, of], cwd=REPO, capture_output=True, text=True, timeout=580, check=True)
    assert json.loads(done.stdout) == schema
