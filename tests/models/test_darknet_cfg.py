"""A cfg is read as Darknet reads it, and what is not understood is refused by its line."""

import pytest

from models.darknet.cfg import DarknetError
from models.darknet.network import Convolution, MaxPool, Route, Shortcut, Yolo, parse_network
from tests.fixtures import fixtures_dir
from tests.models.darknet_cases import HEAD, STEM, conv, net, yolo


@pytest.mark.parametrize(
    ("name", "layers", "heads", "value_count"),
    [
        ("cfg/yolov3", 107, 3, 62_001_757),
        ("cfg/yolov3-tiny", 24, 2, 8_858_734),
        ("cfg/yolov3-spp", 114, 3, 63_052_381),
        ("cfg/yolov4", 162, 3, 64_429_405),
        ("cfg/yolov4-tiny", 38, 2, 6_062_814),
        ("cfg/yolov4-csp", 175, 3, 52_986_205),
        ("yolo-fastest-1.1", 131, 2, 346_062),
        ("mobilenetv2-yolov3-nano", 80, 2, 891_070),
    ],
)
def test_published_networks_need_as_many_values_as_their_weights_files_hold(name, layers, heads, value_count):
    network = parse_network((fixtures_dir() / "darknet" / f"{name}.cfg").read_text())
    assert (len(network.layers), len(network.heads), network.classes, network.value_count) == (layers, heads, 80, value_count)


def test_layers_are_read_with_their_shapes_and_sources():
    cfg = net(96, 64) + conv(8, 3, 2) + "[maxpool]\nstride=2\n[route]\nlayers=-1,1\n[shortcut]\nfrom=-1\nactivation=linear\n"
    cfg += conv(16, extra="", activation="linear") + yolo("1, 3", extra="scale_x_y = 1.05\nnms_kind=diounms")
    network = parse_network(cfg)
    assert network.layers == (
        Convolution(8, (32, 48, 8), 3, 3, (2, 2), 1, 1, True, "leaky"),
        MaxPool(15, (16, 24, 8), 2, (2, 2), 1),
        Route(17, (16, 24, 16), (1, 1), 1, 0),
        Shortcut(19, (16, 24, 16), (2,), "linear"),
        Convolution(22, (16, 24, 16), 16, 1, (1, 1), 0, 1, False, "linear"),
        Yolo(28, (16, 24, 16), ((23, 27), (81, 82)), 3, 1.05, False),
    )
    assert (network.input_hw, network.letter_box, network.value_count) == ((64, 96), False, 8 * 4 + 8 * 27 + 16 + 256)


def test_white_space_comments_case_of_sections_and_repeated_options_are_read_as_darknet_does():
    loose = "# first\n[NET]\r\n  width = 96 # wide\nheight=64\nheight=32\n; note\n\n[conv]\nfilters=1 6\nactivation = linear\n\t"
    loose += yolo("0,1")
    clean_up = "[net]\nwidth=96\nheight=64\n[convolutional]\nfilters=16\nactivation=linear\n" + yolo("0,1")
    assert [layer.out_hwc for layer in parse_network(loose).layers] == [layer.out_hwc for layer in parse_network(clean_up).layers]


PLAIN = "[net]\nwidth=32\nheight=32\n"


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ("# only\n\n", "no sections: the file is empty or no Darknet cfg"),
        ("width=3\n", "line 1: expected [section] or option=value, got 'width=3'"),
        ("[net]\nwidth 3\n", "line 2: expected [section] or option=value, got 'width 3'"),
        (conv(3), "line 1: the first section must be [net], not [convolutional]"),
        (PLAIN + "[network]\n", "line 4: only the first section may be [net]"),
        ("[net]\nheight=32\n", "line 1: [net] needs the option width="),
        (net(96, 100) + HEAD, "input size 100x96 (height x width): both must be multiples of 32"),
        (PLAIN + "channels=1\n", "line 4: channels=1: only 3 (RGB) is supported"),
        (net() + conv(8), "no [yolo] section: the network predicts no boxes"),
        (PLAIN + "[gru]\n", "line 4: section [gru] is not supported, only [net], [convolutional], "),
        (PLAIN + "[conv]\nfilter=3\n", "line 5: option filter= in [convolutional] is not known"),
        (PLAIN + "[conv]\ndilation=2\n", "line 5: dilation=2 in [convolutional] is not supported, only dilation=1"),
        (PLAIN + "[conv]\nactivation=elu\n", "line 5: activation=elu is not supported, only linear, leaky, "),
        (PLAIN + "[conv]\nfilters=x\n", "line 5: filters=x: expected a number, or numbers with commas between"),
        (PLAIN + "[conv]\nfilters=0\n", "line 5: filters=0: expected one integer from 1"),
        (PLAIN + "[conv]\nfilters=1.5\n", "line 5: filters=1.5: expected integers"),
        (PLAIN + "[conv]\nfilters=8\ngroups=2\n", "line 6: groups=2 do not divide 3 channels and 8 filters"),
        (PLAIN + "[conv]\nsize=40\n", "line 4: size=40 is larger than its input, 32x32 and 0 of padding"),
        (PLAIN + "[route]\nlayers=-1\n", "line 5: layers=-1: there are 0 layers before this one"),
        (STEM + "[route]\nlayers=4\n", "line 37: layers=4: there are 4 layers before this one"),
        (STEM + "[route]\nlayers=-1,-2\n", "line 36: [route] joins layers of different sizes: 4x6x12, 8x12x12"),
        (STEM + "[route]\nlayers=-1\ngroups=5\n", "line 36: [route] has no group 0 of 5 in 4x6x12"),
        (STEM + "[route]\nlayers=-1\ngroups=2\ngroup_id=2\n", "line 36: [route] has no group 2 of 2 in 4x6x12"),
        (STEM + "[shortcut]\nfrom=-2\n", "line 36: [shortcut] adds layers of different sizes: 4x6x12, 8x12x12"),
        (STEM + "[shortcut]\nfrom=-2\nweights_type=per_channel\n", "line 38: weights_type=per_channel in [shortcut] is not supp"),
        (STEM + "[upsample]\nscale=2\n", "line 37: scale=2 in [upsample] is not supported, only scale=1"),
        (STEM + yolo("0"), "line 36: [yolo] with 1 anchors and 3 classes needs filters=8 before it, got 12"),
        (STEM + yolo("4"), "line 37: mask=4 does not fit 8 numbers in anchors="),
        (STEM + HEAD + conv(7) + yolo("0", 2), "line 57: classes=2, but the first [yolo] has 3"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_line(cfg, message):
    with pytest.raises(DarknetError) as caught:
        parse_network(cfg)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
