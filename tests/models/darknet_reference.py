"""Darknet once more, slowly: its own cfg reader and forward passes in NumPy, `(channels, rows, columns)`, one image at a time.

Written from Darknet's C code (`parser.c`, `*_layer.c`), sharing nothing with `models`; what the tests compare against.
"""

import numpy as np


def read_cfg(text):
    """List of (kind, options)."""
    sections = []
    for line in text.replace(" ", "").splitlines():
        if line.startswith("["):
            sections.append((line[1:-1], {}))
        elif "=" in line and line[0] not in "#;":
            key, value = line.split("=")
            sections[-1][1][key] = value
    return sections


def activate(x, kind):
    """Activations as `activations.h` has them."""
    with np.errstate(over="ignore"):
        return {
            "linear": lambda: x,
            "leaky": lambda: np.where(x > 0, x, 0.1 * x),
            "relu": lambda: np.maximum(x, 0),
            "relu6": lambda: np.minimum(np.maximum(x, 0), 6),
            "logistic": lambda: 1 / (1 + np.exp(-x)),
            "swish": lambda: x / (1 + np.exp(-x)),
            "mish": lambda: x * np.tanh(np.log1p(np.exp(x))),
        }[kind]()


def convolve(x, kernel, stride_y, stride_x, pad, groups):
    """`kernel` is (filters, channels / groups, rows, columns)."""
    filters, per_group, size, _ = kernel.shape
    x = np.pad(x, [(0, 0), (pad, pad), (pad, pad)])
    rows, columns = (x.shape[1] - size) // stride_y + 1, (x.shape[2] - size) // stride_x + 1
    out = np.zeros((filters, rows, columns))
    for f in range(filters):
        first = f // (filters // groups) * per_group
        for i in range(rows):
            for j in range(columns):
                window = x[first : first + per_group, i * stride_y : i * stride_y + size, j * stride_x : j * stride_x + size]
                out[f, i, j] = (window * kernel[f]).sum()
    return out


def max_pool(x, size, stride, padding):
    """Windows begin at -padding / 2; what lies outside does not count."""
    channels, height, width = x.shape
    rows, columns = (height + padding - size) // stride + 1, (width + padding - size) // stride + 1
    out = np.zeros((channels, rows, columns))
    for i in range(rows):
        for j in range(columns):
            top, left = i * stride - padding // 2, j * stride - padding // 2
            window = x[:, max(top, 0) : top + size, max(left, 0) : left + size]
            out[:, i, j] = window.reshape(channels, -1).max(axis=1)
    return out


def decode(x, options, net_w, net_h):
    """Boxes (M, 4) as centre and size in 0..1, confidences (M, C); a list of cells, anchors within."""
    anchors = [float(v) for v in options["anchors"].split(",")]
    mask = [int(v) for v in options["mask"].split(",")]
    classes, scale = int(options["classes"]), float(options.get("scale_x_y", 1))
    new_coords = options.get("new_coords") == "1"
    _, rows, columns = x.shape
    boxes, scores = [], []
    for row in range(rows):
        for column in range(columns):
            for k, anchor in enumerate(mask):
                entry = x[k * (classes + 5) : (k + 1) * (classes + 5), row, column].astype(np.float64)
                if not new_coords:
                    entry[[0, 1, *range(4, classes + 5)]] = activate(entry[[0, 1, *range(4, classes + 5)]], "logistic")
                centre = entry[:2] * scale - 0.5 * (scale - 1)
                size = 4 * entry[2:4] ** 2 if new_coords else np.exp(entry[2:4])
                boxes.append(
                    [
                        (column + centre[0]) / columns,
                        (row + centre[1]) / rows,
                        size[0] * anchors[2 * anchor] / net_w,
                        size[1] * anchors[2 * anchor + 1] / net_h,
                    ]
                )
                scores.append(entry[4] * entry[5:])
    return np.array(boxes), np.array(scores)


def detect(cfg, values, image):
    """Run one image, (3, rows, columns) in 0..1: boxes (M, 4) as centre and size, confidences (M, C), values left over."""
    net, *sections = read_cfg(cfg)
    values = np.asarray(values, np.float64)
    outputs, boxes, scores = [], [], []
    x = image.astype(np.float64)
    for kind, options in sections:
        number = {key: int(value) for key, value in options.items() if value.lstrip("-").isdecimal()}
        if kind == "convolutional":
            filters, size, groups = number["filters"], number.get("size", 1), number.get("groups", 1)
            normalize = number.get("batch_normalize", 0)
            shape = (filters, x.shape[0] // groups, size, size)
            counts = [filters] * (4 if normalize else 1) + [int(np.prod(shape))]
            *vectors, kernel, values = np.split(values, np.cumsum(counts))
            stride = number.get("stride", 1)
            pad = size // 2 if number.get("pad") else number.get("padding", 0)
            x = convolve(x, kernel.reshape(shape), number.get("stride_y", stride), number.get("stride_x", stride), pad, groups)
            bias, *normalization = (vector[:, None, None] for vector in vectors)
            if normalize:
                scale, mean, variance = normalization
                x = (x - mean) / (np.sqrt(variance) + 0.000001) * scale
            x = activate(x + bias, options["activation"])
        elif kind == "maxpool":
            x = max_pool(x, number["size"], number["stride"], number.get("padding", number["size"] - 1))
        elif kind == "upsample":
            x = x.repeat(number["stride"], axis=1).repeat(number["stride"], axis=2)
        elif kind == "route":
            groups, group = number.get("groups", 1), number.get("group_id", 0)
            named = [outputs[int(v)] for v in options["layers"].split(",")]
            x = np.concatenate([np.split(source, groups)[group] for source in named])
        elif kind == "shortcut":
            total = x.copy()
            for v in options["from"].split(","):
                shared = min(len(x), len(outputs[int(v)]))
                total[:shared] += outputs[int(v)][:shared]
            x = activate(total, options["activation"])
        elif kind == "yolo":
            head_boxes, head_scores = decode(x, options, int(net[1]["width"]), int(net[1]["height"]))
            boxes.append(head_boxes)
            scores.append(head_scores)
        outputs.append(x)
    return np.concatenate(boxes), np.concatenate(scores), values
