"""Writes small ONNX models with the heads of YOLOv8 and YOLOX; it runs in the converter's environment, which has onnx."""

import json
import sys

import numpy as np

CLASSES = ("cat", "dog", "potted plant")
STRIDES = (16, 32)


class Graph:
    """Nodes and weights, as they are added."""

    def __init__(self, seed):
        self.nodes, self.weights, self.draw = [], [], np.random.default_rng(seed)

    def constant(self, value):
        from onnx import numpy_helper

        self.weights.append(numpy_helper.from_array(value, f"c{len(self.weights)}"))
        return self.weights[-1].name

    def add(self, kind, *inputs, outputs=1, **attributes):
        from onnx import helper

        names = [f"{kind.lower()}{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, [*inputs], names, **attributes))
        return names[0] if outputs == 1 else names

    def convolve(self, inputs, channels, out, size=3, stride=2):
        kernel = self.draw.normal(0, 1.5 / (size * channels**0.5), (out, channels, size, size)).astype(np.float32)
        bias = self.draw.normal(0, 0.5, out).astype(np.float32)
        pads = [size // 2] * 4
        return self.add("Conv", inputs, self.constant(kernel), self.constant(bias), strides=[stride] * 2, pads=pads)

    def silu(self, inputs):
        return self.add("Mul", inputs, self.add("Sigmoid", inputs))

    def levels(self, images):
        """Feature maps at strides 16 and 32: with a split, a pooling and an enlarged map joined, as YOLO has them."""
        features = images
        for channels in (3, 8, 8, 8):
            features = self.silu(self.convolve(features, channels, 8))
        first, second = self.add("Split", features, self.constant(np.array([4, 4])), outputs=2, axis=1)
        fine = self.add("Concat", first, self.convolve(second, 4, 4, stride=1), axis=1)
        coarse = self.silu(self.convolve(fine, 8, 8))
        pooled = self.add("MaxPool", coarse, kernel_shape=[5, 5], pads=[2] * 4, strides=[1, 1])
        coarse = self.add("Concat", coarse, pooled, axis=1)
        scales = self.constant(np.array([1, 1, 2, 2], np.float32))
        larger = self.add(
            "Resize", coarse, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )
        return [self.add("Concat", fine, larger, axis=1), coarse], [24, 16]


def cells(side):
    """Centres `(M, 2)` and strides `(M, 1)` of the cells of a square input, in pixels."""
    grids = [np.stack(np.meshgrid(*[np.arange(side // stride)] * 2), -1).reshape(-1, 2) for stride in STRIDES]
    return np.concatenate([(grid + 0.5) * s for grid, s in zip(grids, STRIDES, strict=True)]), np.concatenate(
        [np.full((len(grid), 1), s) for grid, s in zip(grids, STRIDES, strict=True)]
    )


def yolov8(graph, images, side, batch):
    """`(1, 4 + C, M)`: centre and size in pixels, then confidences, as Ultralytics exports them."""
    centres, strides = cells(side)
    width = 4 + len(CLASSES)
    maps = [graph.convolve(each, channels, width, 1, 1) for each, channels in zip(*graph.levels(images), strict=True)]
    flat = [graph.add("Reshape", each, graph.constant(np.array([batch, width, -1]))) for each in maps]
    boxes, scores = graph.add(
        "Split", graph.add("Concat", *flat, axis=2), graph.constant(np.array([4, len(CLASSES)])), outputs=2, axis=1
    )
    near, far = graph.add("Split", graph.add("Softplus", boxes), graph.constant(np.array([2, 2])), outputs=2, axis=1)
    middle = graph.constant((centres / strides).T[None].astype(np.float32))
    low, high = graph.add("Sub", middle, near), graph.add("Add", middle, far)
    centre = graph.add("Mul", graph.add("Add", low, high), graph.constant(np.float32(0.5)))
    joined = graph.add("Concat", centre, graph.add("Sub", high, low), axis=1)
    pixels = graph.add("Mul", joined, graph.constant(strides.T[None].astype(np.float32)))
    return graph.add("Concat", pixels, graph.add("Sigmoid", scores), axis=1)


def yolox(graph, images, side, batch):
    """`(1, M, 5 + C)`: offsets in the cells and logarithms of sizes, objectness and confidences, as YOLOX exports them."""
    flat = []
    for each, channels in zip(*graph.levels(images), strict=True):
        shares = graph.add("Sigmoid", graph.convolve(each, channels, 1 + len(CLASSES), 1, 1))
        joined = graph.add("Concat", graph.convolve(each, channels, 4, 1, 1), shares, axis=1)
        flat.append(graph.add("Reshape", joined, graph.constant(np.array([batch, 5 + len(CLASSES), -1]))))
    return graph.add("Transpose", graph.add("Concat", *flat, axis=2), perm=[0, 2, 1])


HEADS = {"yolov8": yolov8, "yolox": yolox}


def write(kind, path, side, shape, dtype="FLOAT"):
    """Writes a model; `shape` of its input, with names for sizes that may be any."""
    import onnx
    from onnx import TensorProto, helper

    graph = Graph(len(kind))
    images = "images"
    if dtype != "FLOAT":
        images = graph.add("Cast", images, to=TensorProto.FLOAT)
    if shape[-1] == 3:
        images = graph.add("Transpose", images, perm=[0, 3, 1, 2])
    out = HEADS[kind](graph, images, side, shape[0] if isinstance(shape[0], int) else 1)
    inputs = [helper.make_tensor_value_info("images", getattr(TensorProto, dtype), shape)]
    outputs = [helper.make_tensor_value_info(out, TensorProto.FLOAT, ["N", "A", "B"])]
    made = helper.make_graph(graph.nodes, kind, inputs, outputs, graph.weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    names = repr(dict(enumerate(CLASSES)))
    helper.set_model_props(model, {"names": names, "task": "detect"} if kind == "yolov8" else {})
    onnx.checker.check_model(model)
    onnx.save(model, path)


if __name__ == "__main__":
    write(*json.loads(sys.argv[1]))
