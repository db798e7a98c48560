"""ONNX Runtime computes in float16 where it is asked to; boxes are decoded in float32, so that they stay where they are."""

import glob
import sys

import numpy as np
import pytest

from models.geometry import iou_matrix
from pipeline.config import DetectConfig
from pipeline.detect.engine import check_installed
from pipeline.detect.onnx_graph import read_onnx, to_float16
from pipeline.detect.onnxruntime_engine import _providers, engine_cache, in_float16
from pipeline.errors import ModelError
from tests.detect.test_families import picture
from tests.onnx_files import HW, NAMES
from tests.real_yolo import agreement, photos_of_fixtures, ultralytics_folder
from tests.real_yolo import detected as objects
from tests.tiny_models import detected

pytest.importorskip("onnxruntime", reason="the extra onnxruntime is not installed")
onnx = pytest.importorskip("onnx", reason="the extra onnxruntime is not installed")
pytest.importorskip("onnxconverter_common", reason="the extra onnxruntime is not installed")

PROVIDERS = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
ROWS, COLUMNS, STRIDE = HW[0] // 8, HW[1] // 8, 90  # boxes lie up to 1,080 pixels away, where float16 has steps of half a pixel


@pytest.fixture
def file(tmp_path):
    """Two convolutions, and behind them boxes of 30 pixels in cells of 90."""
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(3)
    cells = np.stack(np.meshgrid(np.arange(COLUMNS), np.arange(ROWS))).reshape(1, 2, -1).astype(np.float32)
    constants = {
        "w1": draw.normal(0, 0.1, (16, 3, 8, 8)),
        "w2": draw.normal(0, 0.05, (7, 16, 1, 1)),
        "cells": cells,
        "stride": np.float32(STRIDE),
        "size": np.float32(30),
    }
    initializers = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()]
    indices = {"flat": [0, 7, -1], "zero": [0], "two": [2], "four": [4], "seven": [7], "one": [1]}
    initializers += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in indices.items()]
    nodes = [
        helper.make_node("Conv", ["images", "w1"], ["a"], strides=[8, 8]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["head"]),
        helper.make_node("Reshape", ["head", "flat"], ["rows"]),
        helper.make_node("Slice", ["rows", "zero", "two", "one"], ["raw_xy"]),
        helper.make_node("Slice", ["rows", "two", "four", "one"], ["raw_wh"]),
        helper.make_node("Slice", ["rows", "four", "seven", "one"], ["logits"]),
        helper.make_node("Sigmoid", ["raw_xy"], ["shift"]),
        helper.make_node("Add", ["shift", "cells"], ["in_cells"]),
        helper.make_node("Mul", ["in_cells", "stride"], ["xy"]),
        helper.make_node("Sigmoid", ["raw_wh"], ["share"]),
        helper.make_node("Mul", ["share", "size"], ["wh"]),
        helper.make_node("Sigmoid", ["logits"], ["scores"]),
        helper.make_node("Concat", ["xy", "wh", "scores"], ["output0"], axis=1),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, *HW])
    answer = helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["batch", 7, ROWS * COLUMNS])
    graph = helper.make_graph(nodes, "toy", [images], [answer], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"names": str(dict(enumerate(NAMES))), "imgsz": str([*HW]), "task": "detect"})
    onnx.save(model, str(tmp_path / "toy.onnx"))
    return tmp_path / "toy.onnx"


def halved(file, folder):
    """The network that a GPU gets, as a file that a CPU runs: slowly, and with the same types."""
    network = in_float16(read_onnx(str(file), "m"), "m")
    del network.graph.value_info[:]  # as `add_steps` does: types that the converter has left behind
    onnx.save(network, str(folder / "half.onnx"))
    return folder / "half.onnx"


def found(file, **config):
    images = [picture(HW[::-1], seed)[0] for seed in range(3)]
    detect = DetectConfig(engine="onnxruntime", score_threshold=0.3, iou_threshold=1.0, max_detections=300)
    results, _ = detected(file, images, detect, box_units="pixels", **config)
    return [result.detections for result in results]


def check_same(full, half, least):
    """Each box at float32 has one at float16 in its place; those near the threshold may pass or not."""
    assert sum(map(len, full)) >= least
    for a, b in zip(full, half, strict=True):
        sure = a.confidences > 0.31
        if sure.any():
            assert iou_matrix(a.boxes_xyxy.astype(float), b.boxes_xyxy.astype(float)).max(axis=1)[sure].min() > 0.98


def with_its_output_listed(model):
    """As Ultralytics writes them."""
    model.graph.value_info.append(model.graph.output[0])
    return model


def with_a_mask(model):
    """Casts to float32 between the convolutions."""
    from onnx import TensorProto, helper

    model.graph.node[2].input[0] = "masked"
    mask = [
        helper.make_node("Cast", ["b"], ["is_lit"], to=TensorProto.BOOL),
        helper.make_node("Cast", ["is_lit"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["b", "mask"], ["masked"]),
    ]
    nodes = [*model.graph.node[:2], *mask, *model.graph.node[2:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def with_class_numbers(kind):
    """Answers boxes, scores and class numbers of an integer type."""
    from onnx import helper

    def changed(model):
        float32, graph = model.graph.output[0].type.tensor_type.elem_type, model.graph
        del graph.node[-1], graph.output[:]
        graph.node.extend(
            [
                helper.make_node("Concat", ["xy", "wh"], ["columns"], axis=1),
                helper.make_node("Transpose", ["columns"], ["boxes"], perm=[0, 2, 1]),
                helper.make_node("ReduceMax", ["scores"], ["best"], axes=[1], keepdims=0),
                helper.make_node("ArgMax", ["scores"], ["places"], axis=1, keepdims=0),
                helper.make_node("Cast", ["places"], ["classes"], to=kind),
            ]
        )
        of = {"boxes": (float32, [4]), "best": (float32, []), "classes": (kind, [])}
        for name, (each, more) in of.items():
            graph.output.append(helper.make_tensor_value_info(name, each, ["batch", ROWS * COLUMNS, *more]))
        return model

    return changed


def converted_already(model):
    from onnxconverter_common import float16

    for number, each in enumerate(model.graph.node):
        each.name = f"its node {number}"
    return float16.convert_float_to_float16(model, keep_io_types=True)


CLASSES = {"nms": "pipeline", "box_format": "cxcywh", "scores_output": "best"}


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (with_its_output_listed, {}),
        (with_a_mask, {}),
        pytest.param(with_class_numbers(onnx.TensorProto.INT32), CLASSES, id="int32 classes"),
        pytest.param(with_class_numbers(onnx.TensorProto.INT64), CLASSES, id="int64 classes", marks=pytest.mark.matrix),
        (converted_already, {}),
    ],
)
def test_files_of_other_exporters_become_float16(file, tmp_path, monkeypatch, change, config):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    onnx.save(change(onnx.load(str(file))), str(file))
    check_same(found(file, **config), found(halved(file, tmp_path), **config), least=60)


@pytest.mark.matrix
@pytest.mark.parametrize("weights", ["fall_detection/models/best_fp16.onnx", "nudenet/320n.onnx"])
def test_files_that_ultralytics_wrote_find_the_same_in_float16(tmp_path, monkeypatch, weights):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (model,) = ultralytics_folder().glob(f"lib/python*/site-packages/{weights}")
    full, half = (
        objects(each, "onnxruntime", photos_of_fixtures(), score_threshold=0.05) for each in (model, halved(model, tmp_path))
    )
    both = agreement(full, half)
    assert both.wanted == both.found == both.matched >= 4 and both.worst_iou > 0.98, both


def test_a_network_that_cannot_be_converted_is_one_line(file):
    model = onnx.load(str(file))
    model.graph.initializer[0].raw_data = b"cut"
    with pytest.raises(ModelError, match=r"^model m: cannot be converted to float16: ") as err:
        to_float16(model, "m")
    assert "\n" not in str(err.value)


@pytest.mark.slow
def test_boxes_stay_where_they_are_and_the_converted_file_is_kept(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "hybrid-detection-pipeline" / "onnx-float16"
    full, half, again = found(file), found(halved(file, tmp_path)), found(halved(file, tmp_path))
    (kept,) = cache.iterdir()
    weights = {each.name: each.data_type for each in onnx.load(str(kept)).graph.initializer}
    assert weights["w1"] == weights["w2"] == onnx.TensorProto.FLOAT16
    assert weights["cells"] == onnx.TensorProto.FLOAT
    differences = []
    for a, b, c in zip(full, half, again, strict=True):
        assert (b.boxes_xyxy == c.boxes_xyxy).all() and len(a) > 20
        ious = iou_matrix(a.boxes_xyxy.astype(float), b.boxes_xyxy.astype(float))
        sure = a.confidences > 0.31  # the others may pass or not
        assert ious.max(axis=1)[sure].min() > 0.98
        nearest = b.boxes_xyxy[ious.argmax(axis=1)]
        differences.append(np.abs(nearest - a.boxes_xyxy)[sure].max())
    assert 0 < max(differences) < 0.2, "float16 was used, but not where it has steps of half a pixel"


def test_a_damaged_file_in_the_cache_is_made_anew(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = found(halved(file, tmp_path))
    (kept,) = (tmp_path / "cache" / "hybrid-detection-pipeline" / "onnx-float16").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    after = found(halved(file, tmp_path))
    assert [each.boxes_xyxy.tolist() for each in before] == [each.boxes_xyxy.tolist() for each in after]


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """A machine with a GPU, on which ONNX Runtime was built with TensorRT."""
    real = glob.glob
    monkeypatch.setattr(glob, "glob", lambda path, **more: ["/dev/nvidia0"] if "nvidia" in path else real(path, **more))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: PROVIDERS)


@pytest.mark.parametrize(
    ("package", "settings", "needed_by"),
    [
        ("onnx", {"engine": "openvino", "device": "cpu"}, r"model .*toy\.onnx, an ONNX file,"),
        ("onnx", {"engine": "onnxruntime", "device": "cpu"}, r"model .*toy\.onnx, an ONNX file,"),
        ("onnxconverter_common", {"engine": "onnxruntime", "precision": "float16"}, "precision float16 of an ONNX file"),
    ],
)
def test_a_package_that_is_missing_is_named_alone(file, monkeypatch, a_gpu, package, settings, needed_by):
    """The extra would install ONNX Runtime for CPUs over that for GPUs."""
    pytest.importorskip(settings["engine"], reason="its extra is not installed")
    monkeypatch.setitem(sys.modules, package, None)
    name = package.replace("_", "-")
    with pytest.raises(ModelError, match=f"^{needed_by} needs {name}: pip install {name}$"):
        detected(file, [], DetectConfig(**settings))


def test_a_gpu_that_onnx_runtime_cannot_use_has_no_float16(file, a_gpu, monkeypatch):
    """ONNX Runtime would compute float16 on the CPU, slowly, and find other boxes."""
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: PROVIDERS[-1:])
    with pytest.raises(
        ModelError, match=r"^precision float16: engine onnxruntime has float32 on a CPU; this machine's GPU "
    ) as err:
        detected(file, [], DetectConfig(precision="float16"))
    assert "\n" not in str(err.value)


def test_what_to_install_on_a_gpu_has_all_that_the_extra_has(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for engine in ("onnxruntime", "tensorrt"):
        with pytest.raises(ModelError, match=r"on a GPU: onnxruntime-gpu\[cuda,cudnn\], onnx, onnxconverter-common"):
            check_installed(engine)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine": "onnxruntime", "precision": "float16"}, "precision float16: engine onnxruntime has float32 on a CPU"),
        ({"device": "cpu", "precision": "float16"}, "precision float16: engine openvino has float32, bfloat16 and int8 on a CPU"),
        (
            {"engine": "onnxruntime", "precision": "bfloat16"},
            "precision bfloat16: engine onnxruntime has float32 on a CPU; use --engine openvino",
        ),
        (
            {"precision": "int8"},
            "precision int8: expected a version of a SavedModel that detect-objects quantize wrote, got ONNX file; export the "
            "model as a SavedModel, or leave out --precision, also for a file that has been quantized elsewhere",
        ),
    ],
    ids=str,
)
def test_a_precision_that_a_cpu_lacks_is_refused(file, settings, why):
    """ONNX Runtime computes float16 there more slowly, and finds other boxes; int8 is made of SavedModels alone."""
    pytest.importorskip("openvino", reason="its extra is not installed")
    with pytest.raises(ModelError) as err:
        detected(file, [], DetectConfig(**settings))
    assert str(err.value) == why


def test_tensorrt_that_is_not_there_is_one_line(file):
    with pytest.raises(
        ModelError, match=r"^engine tensorrt: ONNX Runtime has .*, this process may use 0 GPUs; install onnxr"
    ) as err:
        detected(file, [], DetectConfig(engine="tensorrt"))
    assert "\n" not in str(err.value)


def test_tensorrt_whose_libraries_cannot_be_loaded_is_one_line(file, tmp_path, monkeypatch, a_gpu):
    """ONNX Runtime would use CUDA without a word. Those that pip has installed are loaded before."""
    (tmp_path / "tensorrt.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'x')\nraise OSError('libnvinfer.so.10')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"^engine tensorrt: ONNX Runtime cannot load TensorRT's libraries; ") as err:
        detected(file, [], DetectConfig(engine="tensorrt"))
    assert "\n" not in str(err.value) and (tmp_path / "loaded").exists()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_tensorrt_keeps_its_engines_and_computes_as_the_file_says(a_gpu, precision):
    """With `trt_fp16_enable` it would decode boxes in float16, too; without, it takes the types of the network."""
    detect = DetectConfig(engine="tensorrt", device="gpu:0", precision=precision, gpu_memory_mb=100)
    device = {"device_id": "0"}
    cache = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": engine_cache(b"network")}
    assert _providers(PROVIDERS, detect, b"network") == [
        (PROVIDERS[0], {**device, **cache}),
        (PROVIDERS[1], {**device, "gpu_mem_limit": "104857600"}),
        PROVIDERS[2],
    ]


def test_tensorrt_gets_the_network_that_decodes_boxes_in_float32(file, tmp_path, monkeypatch, a_gpu):
    with pytest.raises(ModelError, match="engine tensorrt"):
        detected(file, [], DetectConfig(engine="tensorrt", precision="float16"))
    (kept,) = (tmp_path / "cache" / "hybrid-detection-pipeline" / "onnx-float16").iterdir()
    assert {each.data_type for each in onnx.load(str(kept)).graph.initializer if each.name in ("w1", "w2")} == {
        onnx.TensorProto.FLOAT16
    }


def test_tensorrts_engines_of_a_version_are_no_other_versions(file, tmp_path, monkeypatch):
    """Its provider finds them by the names in a graph, which weights trained anew do not change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = file.read_bytes()
    first, other = engine_cache(content), engine_cache(content[:-1] + b"x")
    assert first != other and first == engine_cache(content)
    for number in range(5):
        engine_cache(b"%d" % number)
    assert len([*(tmp_path / "cache" / "hybrid-detection-pipeline" / "tensorrt").iterdir()]) == 4, "newer ones replace them"
