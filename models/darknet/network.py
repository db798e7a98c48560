"""The layers of a Darknet network and their output shapes, from a cfg. Needs no TensorFlow.

Layers are numbered from 0, `[net]` not counted; negative numbers count back from the layer that names them. Shapes follow
Darknet's `make_*_layer` functions (github.com/AlexeyAB/darknet).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from models.darknet.cfg import DarknetError, Section, read_sections

Hwc = tuple[int, int, int]

ACTIVATIONS = ("linear", "leaky", "relu", "relu6", "logistic", "mish", "swish")
INPUT_MULTIPLE = 32  # the stride of the coarsest head


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of the network; `[dropout]`, which does nothing outside training, is no more.

    Attributes:
      line: Line of its section in the cfg.
      out_hwc: Height, width and channels of its output.
    """

    line: int
    out_hwc: Hwc


@dataclasses.dataclass(frozen=True)
class Convolution(Layer):
    """`[convolutional]`: `padding` pixels on all four sides, batch normalisation or a bias, the activation."""

    in_channels: int
    size: int
    stride_hw: tuple[int, int]
    padding: int
    groups: int
    batch_normalize: bool
    activation: str

    @property
    def filters(self) -> int:
        """Number of output channels."""
        return self.out_hwc[2]

    @property
    def kernel_count(self) -> int:
        """Number of kernel values."""
        return self.filters * (self.in_channels // self.groups) * self.size**2

    @property
    def value_count(self) -> int:
        """Number of float32 values in the weights file: bias, three vectors of batch normalisation, kernel."""
        return self.filters * (4 if self.batch_normalize else 1) + self.kernel_count


@dataclasses.dataclass(frozen=True)
class MaxPool(Layer):
    """`[maxpool]`: `padding` pixels in total, of which `padding // 2` are left and above."""

    size: int
    stride_hw: tuple[int, int]
    padding: int


@dataclasses.dataclass(frozen=True)
class Upsample(Layer):
    """`[upsample]`: repeats each pixel to its output size."""


@dataclasses.dataclass(frozen=True)
class Route(Layer):
    """`[route]`: joins the channels of `layers`; takes of each only the part `group_id` out of `groups`."""

    layers: tuple[int, ...]
    groups: int
    group_id: int


@dataclasses.dataclass(frozen=True)
class Shortcut(Layer):
    """`[shortcut]`: adds `layers` to the layer before, whose number of channels stays."""

    layers: tuple[int, ...]
    activation: str


@dataclasses.dataclass(frozen=True)
class Yolo(Layer):
    """`[yolo]`: a head that predicts boxes.

    Attributes:
      anchors_wh: Anchors of this head, pixels of the model's input.
      classes: Number of classes.
      scale_x_y: How far the centre of a box may leave its cell; 1: not at all.
      new_coords: Whether the layer before has already applied the logistic function, and sizes are squared.
    """

    anchors_wh: tuple[tuple[float, float], ...]
    classes: int
    scale_x_y: float
    new_coords: bool


@dataclasses.dataclass(frozen=True)
class Network:
    """A network as a cfg describes it, at one input size.

    Attributes:
      input_hw: Height and width of the input, pixels; it has three channels, RGB in 0..1.
      letter_box: Whether the cfg asks for letterboxed images.
      layers: The layers, in order.
    """

    input_hw: tuple[int, int]
    letter_box: bool
    layers: tuple[Layer, ...]

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The layers that have weights, in the order of the weights file."""
        return tuple(layer for layer in self.layers if isinstance(layer, Convolution))

    @property
    def heads(self) -> tuple[Yolo, ...]:
        """The layers that predict boxes."""
        return tuple(layer for layer in self.layers if isinstance(layer, Yolo))

    @property
    def classes(self) -> int:
        """Number of classes, the same for all heads."""
        return self.heads[0].classes

    @property
    def value_count(self) -> int:
        """Number of float32 values that the weights file holds."""
        return sum(layer.value_count for layer in self.convolutions)


def parse_network(text: str, input_hw: tuple[int, int] | None = None) -> Network:
    """Reads a cfg.

    Args:
      text: Content of the cfg.
      input_hw: Height and width of the input; None: the size in the cfg.

    Raises:
      DarknetError: The cfg is malformed or not supported; the message begins with the line.
    """
    sections = read_sections(text)
    if not sections:
        raise DarknetError("no sections: the file is empty or no Darknet cfg")
    net, *rest = sections
    if net.kind != "net":
        raise net.error(f"the first section must be [net], not [{net.kind}]")
    if second := next((section for section in rest if section.kind == "net"), None):
        raise second.error("only the first section may be [net]")
    if (channels := net.integer("channels", 3)) != 3:
        raise net.error(f"channels={channels}: only 3 (RGB) is supported", "channels")
    height, width = input_hw or (net.integer("height"), net.integer("width"))
    if min(height, width) < 1 or height % INPUT_MULTIPLE or width % INPUT_MULTIPLE:
        raise DarknetError(f"input size {height}x{width} (height x width): both must be multiples of {INPUT_MULTIPLE}")
    layers: list[Layer] = []
    for section in rest:
        layers.append(_READERS[section.kind](section, layers, layers[-1].out_hwc if layers else (height, width, 3)))
    network = Network((height, width), bool(net.integer("letter_box", 0)), tuple(layers))
    if not network.heads:
        raise DarknetError("no [yolo] section: the network predicts no boxes")
    if other := next((head for head in network.heads if head.classes != network.classes), None):
        raise DarknetError(f"line {other.line}: classes={other.classes}, but the first [yolo] has {network.classes}")
    return network


def _read_convolutional(section: Section, before: Sequence[Layer], in_hwc: Hwc) -> Convolution:
    size = section.integer("size", 1, minimum=1)
    padding = size // 2 if section.integer("pad", 0) else section.integer("padding", 0)
    groups = section.integer("groups", 1, minimum=1)
    filters = section.integer("filters", 1, minimum=1)
    if in_hwc[2] % groups or filters % groups:
        raise section.error(f"groups={groups} do not divide {in_hwc[2]} channels and {filters} filters", "groups")
    stride_hw = _stride_hw(section)
    return Convolution(
        line=section.line,
        out_hwc=(*_slide(section, in_hwc, size, stride_hw, 2 * padding), filters),
        in_channels=in_hwc[2],
        size=size,
        stride_hw=stride_hw,
        padding=padding,
        groups=groups,
        batch_normalize=bool(section.integer("batch_normalize", 0)),
        activation=_activation(section, "logistic"),
    )


def _read_maxpool(section: Section, before: Sequence[Layer], in_hwc: Hwc) -> MaxPool:
    stride_hw = _stride_hw(section)
    size = section.integer("size", stride_hw[0], minimum=1)
    padding = section.integer("padding", size - 1)
    out_hwc = (*_slide(section, in_hwc, size, stride_hw, padding), in_hwc[2])
    return MaxPool(section.line, out_hwc, size, stride_hw, padding)


def _read_upsample(section: Section, before: Sequence[Layer], in_hwc: Hwc) -> Upsample:
    stride = section.integer("stride", 2, minimum=1)
    return Upsample(section.line, (in_hwc[0] * stride, in_hwc[1] * stride, in_hwc[2]))


def _read_route(section: Section, before: Sequence[Layer], in_hwc: Hwc) -> Route:
    layers = _sources(section, "layers", before)
    groups, group_id = section.integer("groups", 1, minimum=1), section.integer("group_id", 0)
    shapes = [before[layer].out_hwc for layer in layers]
    if len({shape[:2] for shape in shapes}) > 1:
        raise section.error(f"[route] joins layers of different sizes: {_shapes(shapes)}")
    if group_id >= groups or any(shape[2] % groups for shape in shapes):
        raise section.error(f"[route] has no group {group_id} of {groups} in {_shapes(shapes)}")
    return Route(section.line, (*shapes[0][:2], sum(shape[2] for shape in shapes) // groups), layers, groups, group_id)


def _read_shortcut(section: Section, before: Sequence[Layer], in_hwc: Hwc) -> Shortcut:
    layers = _sources(section, "from", before)
    shapes = [before[layer].out_hwc for layer in layers]
    if any(shape[:2] != in_hwc[:2] for shape in shapes):
        raise section.error(f"[shortcut] adds layers of different sizes: {_shapes([in_hwc, *shapes])}")
    return Shortcut(section.line, in_hwc, layers, _activation(section, "linear"))


def _read_yolo(section: Section, before: Sequence[Layer], in_hwc: Hwc) -> Yolo:
    sizes = section.numbers("anchors")
    anchors = list(zip(sizes[::2], sizes[1::2], strict=False))
    mask = section.integers("mask", ",".join(map(str, range(section.integer("num", 1)))))
    if len(sizes) % 2 or not all(0 <= index < len(anchors) for index in mask):
        raise section.error(f"mask={section.text('mask', '')} does not fit {len(sizes)} numbers in anchors=", "mask")
    classes = section.integer("classes", 20, minimum=1)
    if in_hwc[2] != (filters := len(mask) * (classes + 5)):
        needed = f"needs filters={filters} before it, got {in_hwc[2]}"
        raise section.error(f"[yolo] with {len(mask)} anchors and {classes} classes {needed}")
    return Yolo(
        line=section.line,
        out_hwc=in_hwc,
        anchors_wh=tuple(anchors[index] for index in mask),
        classes=classes,
        scale_x_y=section.numbers("scale_x_y", "1")[0],
        new_coords=bool(section.integer("new_coords", 0)),
    )


_READERS: dict[str, Callable[[Section, Sequence[Layer], Hwc], Layer]] = {
    "convolutional": _read_convolutional,
    "maxpool": _read_maxpool,
    "upsample": _read_upsample,
    "route": _read_route,
    "shortcut": _read_shortcut,
    "dropout": lambda section, before, in_hwc: Layer(section.line, in_hwc),
    "yolo": _read_yolo,
}


def _stride_hw(section: Section) -> tuple[int, int]:
    stride = section.text("stride", "1")
    return section.integer("stride_y", stride, minimum=1), section.integer("stride_x", stride, minimum=1)


def _slide(section: Section, in_hwc: Hwc, size: int, stride_hw: tuple[int, int], padding: int) -> tuple[int, int]:
    """Height and width after a window of `size`, with `padding` pixels in total added to each side."""
    out_h, out_w = ((side + padding - size) // stride + 1 for side, stride in zip(in_hwc[:2], stride_hw, strict=True))
    if min(out_h, out_w) < 1:
        raise section.error(f"size={size} is larger than its input, {in_hwc[0]}x{in_hwc[1]} and {padding} of padding")
    return out_h, out_w


def _activation(section: Section, default: str) -> str:
    activation = section.text("activation", default)
    if activation not in ACTIVATIONS:
        raise section.error(f"activation={activation} is not supported, only {', '.join(ACTIVATIONS)}", "activation")
    return activation


def _sources(section: Section, option: str, before: Sequence[Layer]) -> tuple[int, ...]:
    named = section.integers(option)
    layers = tuple(number + len(before) if number < 0 else number for number in named)
    for number, layer in zip(named, layers, strict=True):
        if not 0 <= layer < len(before):
            raise section.error(f"{option}={number}: there are {len(before)} layers before this one", option)
    return layers


def _shapes(shapes: Sequence[Hwc]) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in shapes)
