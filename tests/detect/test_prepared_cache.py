"""What a start keeps of a model is what the next one would make, and nothing else is taken for it."""

import dataclasses
import os

import numpy as np
import pytest

from models.metadata import metadata_from_json, metadata_to_json
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import prepared_cache, saved_model
from pipeline.detect.load_model import converted_model, load
from pipeline.detect.versions import locate
from pipeline.errors import ModelError
from tests.detect.versioned_models import HW, save_version

pytestmark = pytest.mark.usefixtures("warm_preparations")
PIXELS = np.random.default_rng(1).integers(0, 255, (*HW, 3), np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybrid-detection-pipeline" / "models"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_version(tmp_path_factory.mktemp("models"), 7, values=20_000)


def settings(**given):
    return DetectConfig(**{"batch_sizes": (1,), "score_threshold": 0.0, **given})


def outputs(model, **given):
    loaded = load(ModelConfig(path=str(model)), settings(**given))
    try:
        return loaded.engine([PIXELS])[0].arrays
    finally:
        loaded.engine.close()


@pytest.mark.parametrize(
    "given", [{}, {"precision": "bfloat16"}, pytest.param({"engine": "openvino"}, marks=pytest.mark.slow)], ids=str
)
def test_a_second_start_reads_what_the_first_one_wrote_and_gives_the_same(given, model, cache):
    """Read it is: a name that was changed in the entry is the model's."""
    if given.get("engine") == "openvino":
        pytest.importorskip("openvino", reason="the extra openvino is not installed")
    first, second = outputs(model, **given), outputs(model, **given)
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    (entry,) = cache.iterdir()
    with np.load(entry, allow_pickle=False) as parts:
        changed = dict(parts)
    metadata = dataclasses.replace(metadata_from_json(str(changed["metadata"])), name="changed")
    np.savez(entry, **{**changed, "metadata": metadata_to_json(metadata)})
    assert load(ModelConfig(path=str(model)), settings(**given)).metadata.name == "changed"


def test_weights_of_each_type_are_the_same_bytes_again(model, cache, tmp_path):
    import ml_dtypes

    folder, version = locate(str(model), None)
    prepared = saved_model.prepared_model(folder, version, ModelConfig(path=folder), settings(), gpu=False)
    weights = {
        "a:0": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b/c:0": np.array([0.1, 3e38], ml_dtypes.bfloat16),
        "d:0": np.zeros((0, 4), np.float16),
    }
    changed = dataclasses.replace(prepared, optimised=dataclasses.replace(prepared.optimised, weights=weights))
    changed = dataclasses.replace(changed, warmup_requests=(b"a jpeg", np.zeros((*HW, 3), np.uint8)))
    prepared_cache.write_entry(str(tmp_path / "entry.npz"), changed)
    read = prepared_cache.read_entry(str(tmp_path / "entry.npz"), folder, version, folder)
    assert read is not None and read.optimised.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert read.optimised.weights[name].dtype == weight.dtype
        assert read.optimised.weights[name].tobytes() == weight.tobytes()
    assert read.optimised.graph == prepared.optimised.graph
    assert read.warmup_requests[0] == b"a jpeg" and (read.warmup_requests[1] == 0).all()


@pytest.mark.parametrize("damage", ["half", "empty", "text"])
def test_a_damaged_entry_is_made_anew(damage, model, cache):
    first = outputs(model)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "text": b"no zip file"}[damage])
    np.testing.assert_array_equal(outputs(model)["scores"], first["scores"])
    assert len(entry.read_bytes()) == len(whole)


def test_what_changes_a_graph_changes_its_entry_and_nothing_else_does(model, monkeypatch):
    """Other content, settings, switches of TensorFlow, or a GPU; but not how many threads run it."""
    folder, version = locate(str(model), None)

    def entry(gpu=False, **given):
        prepared_cache._surroundings.cache_clear()
        return prepared_cache.entry_of(folder, folder, version, ModelConfig(path=folder), settings(**given), gpu=gpu)

    first = entry()
    assert entry(intra_op_threads=7, feeder_processes=3, batch_timeout_ms=9.0) == first
    changes = ({"score_threshold": 0.5}, {"iou_threshold": 0.1}, {"max_detections": 3}, {"classes": ("bright",)}, {"xla": True})
    changes += ({"labels_per_box": "several"}, {"precision": "bfloat16"}, {"engine": "openvino"}, {"gpu": True})
    others = [entry(**change) for change in changes]
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    others.append(entry())
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS")
    (model / "assets.extra").mkdir(exist_ok=True)
    (model / "assets.extra" / "more").write_text("more")
    others.append(entry())
    (model / "assets.extra" / "more").unlink()
    assert entry() == first
    assert len({first, *others}) == 1 + len(others)


def test_a_model_that_changes_while_it_is_loaded_is_refused_and_not_kept(model, cache, monkeypatch):
    """Else its graph would be kept under the digest of other files."""

    def changed_first(local, *args):
        with open(os.path.join(local, "another"), "w") as file:
            file.write("more")
        return described_signature(local, *args)

    described_signature = saved_model.described_signature
    monkeypatch.setattr(saved_model, "described_signature", changed_first)
    try:
        with pytest.raises(ModelError, match="its files changed while it was loaded"):
            outputs(model)
    finally:
        (model / "another").unlink()
    assert not cache.exists()


def test_the_entries_that_were_not_read_for_longest_go_first(model, cache):
    """Together they take a bounded room."""
    folder, version = locate(str(model), None)
    prepared = saved_model.prepared_model(folder, version, ModelConfig(path=folder), settings(), gpu=False)
    (own,) = cache.iterdir()
    size = own.stat().st_size
    for age, name in enumerate(("c", "b", "a")):
        prepared_cache.keep_in_cache(f"{cache}/{name}.npz", prepared)
        os.utime(cache / f"{name}.npz", ns=(age * 10**9, age * 10**9))
    prepared_cache.keep_in_cache(f"{cache}/new.npz", prepared, most_bytes=3 * size + 100)
    assert sorted(entry.name for entry in cache.iterdir()) == sorted([own.name, "a.npz", "new.npz"])


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(model, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    assert outputs(model)["scores"].shape == (1,)


def test_openvino_converts_once_for_all_processes(model, cache):
    """The process that converts keeps what it made; the job itself reads it."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    config = ModelConfig(path=str(model))
    first = converted_model(config, settings(engine="openvino"))
    assert len(list(cache.iterdir())) == 1
    second = converted_model(config, settings(engine="openvino"))
    np.testing.assert_array_equal(first.optimised.xml, second.optimised.xml)
