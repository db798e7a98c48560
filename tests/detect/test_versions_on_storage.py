"""Versions on Cloud Storage: the same as local ones, on the storage emulator."""

import pytest

from pipeline.config import DetectConfig
from tests.detect.versioned_models import look, opened_detectors, save_version, upload_version

CPU = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2, score_threshold=0.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_version(folder, 7), save_version(folder, 8)
    return folder


@pytest.mark.matrix
def test_a_version_is_waited_for_refused_once_taken_and_rolled_back(gcs_bucket, saved, capfd):
    path = f"gs://{gcs_bucket.name}/models/detector"
    upload_version(saved / "7", f"{path}/7")
    with opened_detectors() as load:
        detector = load(path, None, CPU)
        upload_version(saved / "8", f"{path}/8", without="saved_model.pb")
        look(detector, 3)
        assert (detector.model.version, capfd.readouterr().err) == ("7", "")

        gcs_bucket.blob("models/detector/8/saved_model.pb").upload_from_string(b"no model")
        look(detector, 4)
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("model detector: version 8 is refused, version 7 stays: TensorFlow cannot load it: ")
        assert detector.counted_swaps() == {"refusals": 1}

        upload_version(saved / "8", f"{path}/8")
        look(detector, 1)
        assert detector.model.version == "7"  # somebody may be writing it still
        look(detector, 1)
        assert detector.model.version == "8"

        for blob in gcs_bucket.list_blobs(prefix="models/detector/8/"):
            blob.delete()
        look(detector)
        assert detector.model.version == "7"
        assert detector.counted_swaps() == {"swaps": 2}
