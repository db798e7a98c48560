"""Weights files are read to the byte, batch normalisation is folded, and other files are refused with figures."""

import numpy as np
import pytest

from models.darknet.cfg import DarknetError
from models.darknet.network import parse_network
from models.darknet.weights import read_weights
from tests.models.darknet_cases import conv, net, write_weights, yolo

CFG = net(32, 32) + conv(2, 1, 1, extra="batch_normalize=1", activation="linear")
CFG += conv(6, 2, 2, extra="", activation="linear") + yolo("0", classes=1)
NETWORK = parse_network(CFG)
VALUES = np.arange(1, NETWORK.value_count + 1, dtype=np.float32)


@pytest.mark.parametrize("version", [(0, 2, 5), (0, 1, 0), (1, 0, 0), (0, 0, 0)], ids=str)
def test_values_follow_a_header_whose_length_depends_on_its_version(tmp_path, version):
    write_weights(tmp_path / "net.weights", VALUES, version)
    first, second = read_weights(str(tmp_path / "net.weights"), NETWORK)
    # biases 1, 2; scales 3, 4; means 5, 6; variances 7, 8; kernel 9 to 14
    factor = np.array([3 / np.sqrt(7), 4 / np.sqrt(8)])
    np.testing.assert_allclose(first.kernel[0, 0], np.array([[9, 12], [10, 13], [11, 14]]) * factor, rtol=1e-6)
    np.testing.assert_allclose(first.bias, np.array([1, 2]) - np.array([5, 6]) * factor, rtol=1e-6)
    # biases 15 to 20, then for each filter, input channel, row and column
    assert second.bias.tolist() == [15, 16, 17, 18, 19, 20]
    assert second.kernel[:, :, 0, 0].tolist() == [[21, 22], [23, 24]] and second.kernel[0, 0, 1, 5] == 21 + 5 * 8 + 4
    assert first.is_finite and first.kernel.dtype == first.bias.dtype == np.float32


def test_a_negative_variance_makes_weights_that_are_no_numbers(tmp_path):
    values = VALUES.copy()
    values[6] = -7
    write_weights(tmp_path / "net.weights", values)
    first, second = read_weights(str(tmp_path / "net.weights"), NETWORK)
    assert not first.is_finite and second.is_finite


HEADER = np.array([0, 2, 5, 0, 0], "<i4").tobytes()
BODY = VALUES.astype("<f4").tobytes()
EXPECTED = "expected 292 bytes (20 of header and the cfg's 68 float32 values), got"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f"{EXPECTED} 0: too short, cut off or of another cfg"),
        (HEADER + BODY[:-1], f"{EXPECTED} 291: too short, cut off or of another cfg"),
        (HEADER + BODY + b"\0", f"{EXPECTED} 293: too long, of another cfg"),
        (b"<html>Quota exceeded</html>", "is a text file that begins '<html>Quota exceeded</html>', expected binary weights"),
    ],
    ids=["empty", "a byte short", "a byte long", "text"],
)
def test_another_file_is_refused_with_expected_and_actual_figures(tmp_path, content, message):
    path = tmp_path / "net.weights"
    path.write_bytes(content)
    with pytest.raises(DarknetError) as caught:
        read_weights(str(path), NETWORK)
    assert str(caught.value) == f"{path}: {message}"
