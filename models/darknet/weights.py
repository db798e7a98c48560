"""Reads the weights file of a Darknet network and folds batch normalisation into kernels and biases. Needs no TensorFlow.

The file is a header (int32 major, minor, revision; images seen, int64 from version 0.2 on, int32 before) and then float32 values,
little-endian: for each convolution its biases, its scales, means and variances (with batch normalisation only), and its kernel.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import numpy.typing as npt

from models.darknet.cfg import DarknetError
from models.darknet.network import Convolution, Network

# Added to the variance, as in OpenCV's importer. Darknet versions differ (1e-6 beside the root, 1e-5 below it), which changes
# the confidences of trained models by less than 0.001.
_EPSILON = 1e-6
_TEXT = frozenset(range(32, 127)) | frozenset(b"\t\n\r")


@dataclasses.dataclass(frozen=True, eq=False)
class ConvolutionWeights:
    """The weights of one convolution.

    Attributes:
      kernel: `(size, size, in_channels / groups, filters) float32`.
      bias: `(filters,) float32`.
    """

    kernel: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return bool(np.isfinite(self.kernel).all() and np.isfinite(self.bias).all())


def read_weights(path: str, network: Network) -> list[ConvolutionWeights]:
    """Reads the weights of all convolutions of `network`, in order.

    Raises:
      DarknetError: The file is no weights file, or its number of values is not that of the network.
    """
    header_bytes = _check_file(path, network.value_count)
    values = np.fromfile(path, "<f4", offset=header_bytes)
    parts = np.split(values, np.cumsum([layer.value_count for layer in network.convolutions]))
    return [_fold(layer, part) for layer, part in zip(network.convolutions, parts, strict=False)]  # the last part is empty


def _check_file(path: str, value_count: int) -> int:
    """Checks the size of the file and returns the length of its header."""
    with open(path, "rb") as file:
        head = file.read(512)
    actual = os.path.getsize(path)
    if head and set(head) <= _TEXT:
        raise DarknetError(f"{path}: is a text file that begins {head[:40].decode()!r}, expected binary weights")
    major, minor = np.frombuffer(head, "<i4", count=2).tolist() if len(head) >= 8 else (0, 2)
    header_bytes = 20 if major * 10 + minor >= 2 else 16
    expected = header_bytes + 4 * value_count
    if actual != expected:
        reason = "too short, cut off or of another cfg" if actual < expected else "too long, of another cfg"
        raise DarknetError(
            f"{path}: expected {expected:,} bytes ({header_bytes} of header and the cfg's {value_count:,} float32 values), "
            f"got {actual:,}: {reason}"
        )
    return header_bytes


def _fold(layer: Convolution, values: npt.NDArray[np.float32]) -> ConvolutionWeights:
    """Splits the values of one convolution, in the order of the file, into kernel and bias."""
    vectors, kernel = np.split(values, [layer.value_count - layer.kernel_count])
    # (filters, in_channels / groups, rows, columns) in the file
    kernel = kernel.reshape(layer.filters, -1, layer.size, layer.size).transpose(2, 3, 1, 0)
    if not layer.batch_normalize:
        return ConvolutionWeights(np.ascontiguousarray(kernel), vectors.copy())
    bias, scale, mean, variance = vectors.astype(np.float64).reshape(4, layer.filters)
    with np.errstate(all="ignore"):  # a negative variance gives NaN, as in Darknet; see `is_finite`
        factor = scale / np.sqrt(variance + _EPSILON)
        folded = kernel * factor.astype(np.float32)
        return ConvolutionWeights(np.ascontiguousarray(folded), (bias - mean * factor).astype(np.float32))
