"""Small cfgs that together use the layers and options that OpenCV reads, weights for them, and what OpenCV makes of them."""

import cv2
import numpy as np

from models.darknet.network import parse_network
from models.geometry import boxes_to_xyxy

CONV = "[convolutional]\nfilters={filters}\nsize={size}\nstride={stride}\n{extra}\nactivation={activation}\n"


def conv(filters, size=1, stride=1, extra="batch_normalize=1\npad=1", activation="leaky"):
    return CONV.format(filters=filters, size=size, stride=stride, extra=extra, activation=activation)


def net(width=96, height=64, extra=""):
    return f"[net]\nbatch=64\nwidth={width}\nheight={height}\nchannels=3\nlearning_rate=0.001\n{extra}\n"


def yolo(mask, classes=3, extra=""):
    return f"[yolo]\nmask={mask}\nanchors=10,14, 23,27, 37,58, 81,82\nclasses={classes}\nnum=4\njitter=.3\nrandom=1\n{extra}\n"


STEM = net() + conv(8, 3, 2) + conv(8, 3, 2, activation="mish") + conv(12, 3, 2) + conv(12, 3, 2)
EVEN = net() + conv(8, 3, 2)
HEAD = conv(16, extra="pad=1", activation="linear") + yolo("0,1")

SMALL = {  # name -> cfg
    "plain": STEM + HEAD,
    "no padding": STEM + conv(6, 3, extra="batch_normalize=1\npad=0") + HEAD,
    "padding in pixels": STEM + conv(6, 3, extra="padding=2") + HEAD,
    "even kernel": STEM + conv(6, 2) + conv(6, 4) + HEAD,
    "grouped": STEM + conv(8, 3, 1, extra="pad=1\ngroups=4\nbatch_normalize=1") + HEAD,
    "grouped pointwise": STEM + conv(24, 1, 1, extra="pad=1\ngroups=3\nbatch_normalize=1", activation="relu") + HEAD,
    "depthwise": STEM + conv(12, 3, 1, extra="pad=1\ngroups=12\nbatch_normalize=1", activation="relu") + HEAD,
    "depthwise stride 2": STEM + conv(12, 5, 2, extra="pad=1\ngroups=12\nbatch_normalize=1") + HEAD,
    "depthwise multiplier": STEM + conv(36, 3, 1, extra="pad=1\ngroups=12", activation="swish") + HEAD,
    "depthwise stride 2 even": EVEN + conv(8, 3, 2, extra="pad=1\ngroups=8\nbatch_normalize=1") + conv(8, 3, 8) + HEAD,
    **{f"activation {a}": STEM + conv(6, 3, activation=a) + HEAD for a in ("linear", "relu", "logistic", "mish", "swish")},
    **{
        f"maxpool {size}/{stride}": STEM + f"[maxpool]\nsize={size}\nstride={stride}\n" + HEAD
        for size, stride in ((2, 1), (2, 2), (3, 1), (3, 2), (5, 1), (4, 2), (13, 1))
    },
    "maxpool padding": STEM + "[maxpool]\nsize=3\nstride=1\npadding=0\n" + HEAD,
    "maxpool of negatives": STEM + conv(6, 1, extra="", activation="linear") + "[maxpool]\nsize=3\nstride=2\n" + HEAD,
    "upsample": STEM + "[upsample]\nstride=2\n" + HEAD,
    "upsample 3": STEM + "[upsample]\nstride=3\n" + HEAD,
    "route": STEM + conv(6) + "[route]\nlayers=-1, 3,-2\n" + HEAD,
    "route one group": STEM + "[route]\nlayers=-1\ngroups=3\ngroup_id=0\n" + HEAD,
    "shortcut": STEM + conv(12, 3) + "[shortcut]\nfrom=-2\nactivation=linear\n" + HEAD,
    "shortcut of fewer channels": STEM + conv(20) + "[shortcut]\nfrom=-2\nactivation=mish\n" + HEAD,
    "shortcut of more channels": STEM + conv(5) + "[shortcut]\nfrom=-2\nactivation=relu\n" + HEAD,
    "dropout": STEM + "[dropout]\nprobability=.5\n" + conv(12) + "[shortcut]\nfrom=-3\nactivation=linear\n" + HEAD,
    "scale_x_y": STEM + conv(16, extra="pad=1", activation="linear") + yolo("1,3", extra="scale_x_y=1.2"),
    "new_coords": STEM + conv(16, extra="pad=1", activation="logistic") + yolo("0,2", extra="scale_x_y=2.0\nnew_coords=1"),
    "three heads": STEM
    + conv(24, extra="pad=1", activation="linear")
    + yolo("1,2,3", extra="scale_x_y=1.05")
    + "[route]\nlayers=-3\n"
    + conv(8, extra="pad=1", activation="linear")
    + yolo("0")
    + "[route]\nlayers=-6\n[upsample]\nstride=2\n[route]\nlayers=-1, 2\n"
    + HEAD,
    "tall input": STEM.replace("width=96", "width=32").replace("height=64", "height=128") + HEAD,
}


def random_values(cfg, seed=0, spread=1.0):
    """Values for a network's weights file that keep its activations near 1."""
    rng = np.random.default_rng(seed)
    values = []
    for layer in parse_network(cfg).convolutions:
        n = layer.filters
        values.append(rng.normal(0, 0.3, n))
        if layer.batch_normalize:
            values += [rng.uniform(0.7, 1.3, n), rng.normal(0, 0.2, n), rng.uniform(0.5, 1.5, n)]
        values.append(rng.normal(0, spread * (n / layer.kernel_count) ** 0.5, layer.kernel_count))
    return np.concatenate(values).astype(np.float32)


def write_weights(path, values, version=(0, 2, 5)):
    """Write a weights file; versions before 0.2 count the images seen in four bytes."""
    major, minor, _ = version
    seen = np.array([32013312], "<i8" if major * 10 + minor >= 2 else "<i4")
    path.write_bytes(np.array(version, "<i4").tobytes() + seen.tobytes() + np.asarray(values, "<f4").tobytes())


def by_opencv(cfg, weights, image):
    """What OpenCV finds in an image `(H, W, 3) uint8`: boxes `(M, 4)`, and classes' confidences `(M, C)`, 0 if they are low."""
    network = cv2.dnn.readNetFromDarknet(np.frombuffer(cfg.encode(), np.uint8), np.fromfile(weights, np.uint8))
    network.setInput(cv2.dnn.blobFromImage(image, 1 / 255, image.shape[1::-1], swapRB=False))
    rows = np.concatenate(network.forward(network.getUnconnectedOutLayersNames()))
    return boxes_to_xyxy(rows[:, :4], "cxcywh"), rows[:, 5:]
