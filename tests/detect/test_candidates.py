"""Pixels go to the device, and candidates come back: all of them, also of a crowded image, whatever engine runs the model."""

import shutil

import numpy as np
import pytest

from models.geometry import iou_matrix
from pipeline.commands.import_model import main as import_model
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import name_and_version
from pipeline.detect.model_arrays import PICKED, candidates_of, picked_candidates
from pipeline.errors import ModelError
from tests.detect.test_families import NAMED, best_of, centres_to_corners, picture, save
from tests.onnx_files import HW, NAMES
from tests.tiny_models import detected

pytest.importorskip("onnxruntime", reason="the extra onnxruntime is not installed")
pytest.importorskip("openvino", reason="the extra openvino is not installed")
onnx = pytest.importorskip("onnx", reason="the extra onnxruntime is not installed")

MANY = 1000  # boxes of the toy
SCORE, IOU = 0.4, 0.6
PICTURES = [picture(HW[::-1], seed) for seed in range(3)]
DRAW = np.random.default_rng(7)
CENTRES = DRAW.uniform((0, 0), HW[::-1], (MANY, 2))
BASE = np.concatenate([CENTRES, DRAW.uniform(5, 9, (MANY, 2)), DRAW.uniform(0, 0.8, (MANY, 3)) ** 2], 1)
SLOPE = np.concatenate([DRAW.normal(0, 4, (MANY, 2)), DRAW.uniform(-2, 2, (MANY, 2)), DRAW.uniform(0, 0.35, (MANY, 3))], 1)


def rows_for(pixels, top=255.0):
    """What the toy answers for an image, `(MANY, 4 + C)`."""
    return BASE + SLOPE * (pixels.astype(np.float64) / top).mean()


def save_onnx(path, *, opset=17, half=False, layout="4+C,M", channels_first=True):
    """The toy as an ONNX file."""
    from onnx import TensorProto, helper, numpy_helper

    dtype = np.float16 if half else np.float32
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    swapped = layout == "4+C,M"
    constants = {"base": BASE.T if swapped else BASE, "slope": SLOPE.T if swapped else SLOPE}
    initializers = [numpy_helper.from_array(array.astype(dtype)[None], name) for name, array in constants.items()]
    initializers.append(numpy_helper.from_array(np.array([-1, 1, 1]), "flat"))
    if opset >= 18:
        initializers.append(numpy_helper.from_array(np.array([1, 2, 3]), "axes"))
        light = helper.make_node("ReduceMean", ["images", "axes"], ["light"], keepdims=1)
    else:
        light = helper.make_node("ReduceMean", ["images"], ["light"], axes=[1, 2, 3], keepdims=1)
    nodes = [
        light,
        helper.make_node("Reshape", ["light", "flat"], ["row"]),
        helper.make_node("Mul", ["row", "slope"], ["more"]),
        helper.make_node("Add", ["more", "base"], ["boxes"]),  # a name that a step has, too
    ]
    shape = ["batch", 3, *HW] if channels_first else ["batch", *HW, 3]
    images = helper.make_tensor_value_info("images", kind, shape)
    answer = helper.make_tensor_value_info("boxes", kind, ["batch", 7, MANY] if swapped else ["batch", MANY, 7])
    graph = helper.make_graph(nodes, "toy", [images], [answer], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    helper.set_model_props(model, {"names": str(dict(enumerate(NAMES))), "imgsz": str([*HW]), "task": "detect"})
    onnx.save(model, str(path))
    return str(path)


def save_tensorflow(folder):
    """The toy as a SavedModel."""
    import tensorflow as tf

    def predict(images):
        light = tf.reduce_mean(images, [1, 2, 3])[:, None, None]
        return {"output_0": tf.constant(BASE, tf.float32) + tf.constant(SLOPE, tf.float32) * light}

    return save(folder, predict)


def check(results, *, score, several=False, places=1e-3):
    """Compares with suppression written out, over all boxes."""
    for (_, pixels), result in zip(PICTURES, results, strict=True):
        rows = rows_for(pixels)
        boxes, scores = centres_to_corners(rows[:, :4]), rows[:, 4:]
        if several:
            of, classes = np.nonzero(scores >= score)
            apart = boxes[of] + 1e4 * classes[:, None]
            kept = best_of(apart, scores[of, classes][:, None], score=score, iou=IOU)[0][:300]
            kept_classes = np.round(kept[:, 0] / 1e4).astype(int)
            boxes, classes = kept - 1e4 * kept_classes[:, None], kept_classes
        else:
            boxes, classes, _ = (part[:300] for part in best_of(boxes, scores, score=score, iou=IOU))
        found = result.detections
        assert len(found) == len(boxes) and sorted(found.class_ids) == sorted(classes)
        far = 1e4
        ious = iou_matrix(boxes + far * classes[:, None], found.boxes_xyxy + far * found.class_ids[:, None].astype(float))
        assert ious.max(axis=1).min() > 1 - places


def passed(score):
    return [int((rows_for(pixels)[:, 4:].max(1) >= score).sum()) for _, pixels in PICTURES]


ENGINES = ["onnxruntime", "openvino", "tensorflow"]


@pytest.mark.parametrize("several", [False, True], ids=["best", "several"])
@pytest.mark.parametrize(("score", "crowded"), [(0.7, False), (0.05, True)], ids=["few", "crowded"])
@pytest.mark.parametrize("engine", [pytest.param("onnxruntime", marks=pytest.mark.matrix), "openvino", "tensorflow"])
def test_each_engine_gives_what_suppression_over_all_boxes_gives(tmp_path, engine, score, crowded, several):
    """Also where more boxes pass than a device picks, and where a box has several classes."""
    assert (min(passed(score)) > PICKED) == crowded and min(passed(score)) > 20
    is_onnx = engine != "tensorflow"
    path = save_onnx(tmp_path / "toy.onnx") if is_onnx else save_tensorflow(tmp_path / "toy")
    settings = DetectConfig(
        engine=engine,
        score_threshold=score,
        iou_threshold=IOU,
        max_detections=300,
        labels_per_box="several" if several else "best",
    )
    described = {} if is_onnx else {**NAMED, "nms": "pipeline"}  # by its shape it is one that suppresses itself
    results, _ = detected(path, [image for image, _ in PICTURES], settings, **described)
    check(results, score=score, several=several)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    "file",
    [{"opset": 11}, {"opset": 13}, {"opset": 18}, {"opset": 21, "layout": "M,4+C"}, {"channels_first": False}, {"half": True}],
    ids=str,
)
def test_files_of_every_age_layout_and_precision_run(tmp_path, engine, file):
    """float16 has steps of 1/16 between 64 and 128."""
    settings = DetectConfig(engine=engine, score_threshold=0.7, iou_threshold=IOU, max_detections=300)
    images, path = [image for image, _ in PICTURES], save_onnx(tmp_path / "toy.onnx", **file)
    results, _ = detected(path, images, settings, nms="pipeline")
    if not file.get("half"):
        check(results, score=0.7)
    for (_, pixels), result in zip(PICTURES, results, strict=True):
        rows = rows_for(pixels)
        expected, *_ = best_of(centres_to_corners(rows[:, :4]), rows[:, 4:], score=0.7, iou=IOU)
        ious = iou_matrix(expected, result.detections.boxes_xyxy.astype(float))
        assert (ious.max(axis=1) > 0.97).mean() > 0.97


@pytest.mark.parametrize("order", ["in order", "ties reversed"])
def test_ties_are_in_the_models_order_however_a_device_orders_them(order):
    from models.metadata import DetectorMetadata

    metadata = DetectorMetadata("m", HW, "stretch", NAMES, classes_output="", count_output="", nms="pipeline")
    scores = np.array([[0.5, 0.9, 0.5, 0.1, 0.5]], np.float32)
    boxes = np.arange(20, dtype=np.float32).reshape(1, 5, 4)
    places = np.array([[1, 0, 2, 4, 3] if order == "in order" else [1, 4, 2, 0, 3]])
    outputs = {
        "picked_places": places,
        "picked_boxes": np.take_along_axis(boxes, places[..., None], 1),
        "picked_scores": np.take_along_axis(scores, places, 1),
        "picked_classes": places % 3,
        "passed": np.array([4]),
    }
    found = picked_candidates(outputs.__getitem__, metadata, DetectConfig(score_threshold=0.5))
    assert found["boxes"][0, :, 0].tolist() == [0, 4, 8, 16] and found["count"].tolist() == [4]
    whole = candidates_of({"boxes": boxes, "scores": scores}, metadata, DetectConfig(score_threshold=0.5))
    assert (whole["boxes"] == found["boxes"]).all() and (whole["scores"] == found["scores"]).all()


def test_images_of_a_batch_have_their_own_numbers_of_candidates():
    from models.metadata import DetectorMetadata

    metadata = DetectorMetadata("m", HW, "stretch", NAMES, classes_output="", count_output="", nms="pipeline", class_id_offset=1)
    scores = np.array([[[0.1, 0.2], [0.3, 0.8]], [[0.0, 0.0], [0.0, 0.0]], [[0.9, 0.4], [0.6, 0.7]]], np.float32)
    boxes = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    found = candidates_of({"boxes": boxes, "scores": scores}, metadata, DetectConfig(score_threshold=0.5))
    assert found["count"].tolist() == [1, 0, 2]
    assert found["boxes"][:, :, 0].tolist() == [[4, 0], [0, 0], [16, 20]]
    assert found["classes"].tolist() == [[2, 1], [1, 1], [1, 2]]
    none = candidates_of({"boxes": boxes, "scores": np.zeros_like(scores)}, metadata, DetectConfig())
    assert {name: array.shape for name, array in none.items()} == {
        "boxes": (3, 0, 4),
        "scores": (3, 0),
        "classes": (3, 0),
        "count": (3,),
    }


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_external_data_is_part_of_the_model_its_version_and_its_import(tmp_path, engine):
    """As `torch.onnx.export(dynamo=True)` writes it: weights trained anew are another version."""
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "toy.onnx"
    onnx.save(
        onnx.load(save_onnx(tmp_path / "whole.onnx")),
        str(file),
        save_as_external_data=True,
        location="toy.onnx.data",
        size_threshold=1024,
    )
    images = [image for image, _ in PICTURES]
    settings = DetectConfig(engine=engine, score_threshold=0.7, iou_threshold=IOU, max_detections=300)
    results, detector = detected(file, images, settings)
    check(results, score=0.7)
    assert import_model([str(file), "--output", str(tmp_path / "m" / "1")]) == 0
    check(detected(tmp_path / "m", images, settings)[0], score=0.7)
    data = file.with_name("toy.onnx.data")
    data.write_bytes(data.read_bytes()[:-8] + b"\0" * 8)
    assert name_and_version(ModelConfig(str(file)))[1] != detector.model.version


def as_attributes(network):
    """The same network, whose weights are attributes of nodes, the largest in a branch."""
    weights = sorted(network.graph.initializer, key=lambda each: len(each.raw_data))
    nodes = [onnx.helper.make_node("Constant", [], [each.name], value=each) for each in weights]
    branch = onnx.helper.make_graph([nodes.pop()], "branch", [], [onnx.ValueInfoProto(name=weights[-1].name)])
    nodes.append(onnx.helper.make_node("Constant", [], ["always"], value=onnx.numpy_helper.from_array(np.array(True))))
    nodes.append(onnx.helper.make_node("If", ["always"], [weights[-1].name], then_branch=branch, else_branch=branch))
    nodes.extend(network.graph.node)
    del network.graph.initializer[:], network.graph.node[:]
    network.graph.node.extend(nodes)
    return network


@pytest.mark.parametrize("change", [lambda network: network, as_attributes], ids=["initializers", "attributes"])
def test_weights_in_a_file_of_another_name_need_a_folder_of_versions(change, tmp_path, capsys):
    """The version of a single file is a fingerprint, which would miss them."""
    whole, file = change(onnx.load(save_onnx(tmp_path / "whole.onnx"))), tmp_path / "toy.onnx"
    onnx.save(whole, str(file), save_as_external_data=True, location="weights.bin", size_threshold=1024, convert_attribute=True)
    settings = DetectConfig(engine="onnxruntime", score_threshold=0.7, iou_threshold=IOU, max_detections=300)
    with pytest.raises(
        ModelError, match=r"keeps weights in weights\.bin, .*; make a folder of versions: copy .* toy/1/model\.onnx"
    ):
        detected(file, [], settings)
    assert import_model([str(file), "--output", str(tmp_path / "m" / "1")]) == 2
    assert "keeps weights in weights.bin" in capsys.readouterr().err
    (tmp_path / "toy" / "1").mkdir(parents=True)
    shutil.copy(file, tmp_path / "toy" / "1" / "model.onnx")
    shutil.copy(tmp_path / "weights.bin", tmp_path / "toy" / "1")
    check(detected(tmp_path / "toy", [image for image, _ in PICTURES], settings)[0], score=0.7)


@pytest.mark.parametrize("place", ["local", "storage"])
def test_weights_of_another_name_in_a_folder_without_a_number_need_one(place, request, tmp_path):
    """As `onnx.save` names them. The fingerprint of such a folder would miss them, as that of a single file."""
    folder, whole = tmp_path / "toy", onnx.load(save_onnx(tmp_path / "whole.onnx"))
    folder.mkdir()
    onnx.save(whole, folder / "model.onnx", save_as_external_data=True, size_threshold=1024)
    (weights,) = (each.name for each in folder.glob("*.data"))
    path = str(folder)
    if place == "storage":
        bucket = request.getfixturevalue("gcs_bucket")
        path = f"gs://{bucket.name}/toy"
        for name in ("model.onnx", weights):
            bucket.blob(f"toy/{name}").upload_from_filename(str(folder / name))
    settings = DetectConfig(engine="onnxruntime", score_threshold=0.7, iou_threshold=IOU, max_detections=300)
    for given in (path, f"{path}/model.onnx"):
        with pytest.raises(ModelError) as caught:
            detected(given, [], settings)
        todo = f"make a version with a number: move model.onnx and {weights} to {path}/1/, and give --model {path}"
        assert str(caught.value) == f"model {path}: keeps weights in {weights}, which its version does not follow; {todo}"
    if place == "local":
        assert import_model([path, "--output", str(tmp_path / "m" / "1")]) == 0, "the copy has a number"
        check(detected(tmp_path / "m", [image for image, _ in PICTURES], settings)[0], score=0.7)
