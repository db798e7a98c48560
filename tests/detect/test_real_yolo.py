"""Real weights of Ultralytics' YOLO: in both engines the pipeline finds in photos what Ultralytics itself finds."""

import pytest

from tests.real_yolo import ENGINES, WEIGHTS, agreement, detected, photos_of_fixtures, reference


@pytest.fixture(scope="module", params=WEIGHTS, ids=WEIGHTS)
def of_ultralytics(request, tmp_path_factory):
    """A model as an ONNX file, the photos, and what Ultralytics finds in them."""
    folder, photos = tmp_path_factory.mktemp("yolo"), photos_of_fixtures()
    return folder / "model.onnx", photos, reference(WEIGHTS[request.param], folder, photos)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_object_of_ultralytics_is_found_at_its_place_and_no_other(of_ultralytics, engine):
    model, photos, wanted = of_ultralytics
    found = agreement(wanted, detected(model, engine, photos))
    assert found.wanted >= 5, "the photos show something"
    assert found.wanted == found.found == found.matched, found
    assert found.worst_iou > 0.999 and found.worst_score < 1e-4, found
