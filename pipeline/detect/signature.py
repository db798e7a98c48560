"""What a model takes and returns, whatever runs it: the inputs and outputs that its description is recognised and checked by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from models.metadata import DetectorMetadata

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output.

    Attributes:
      shape: With None for any size; None as a whole: of any shape.
      dtype: NumPy's name of its type.
      is_optional: Whether a call may leave it out.
    """

    shape: tuple[int | None, ...] | None
    dtype: str
    is_optional: bool = False

    @property
    def rank(self) -> int | None:
        """Number of axes; None if unknown."""
        return None if self.shape is None else len(self.shape)

    def fits(self, expected: Sequence[int | None]) -> bool:
        """Whether an array of the expected shape, with None for any size, may have this one."""
        return self.shape is None or (
            len(self.shape) == len(expected)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, expected, strict=True))
        )


@dataclasses.dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs.

    Attributes:
      inputs: By name; images `(N, H, W, 3)`.
      outputs: By name.
      run: Calls the model once.
      has_boolean_mask: Whether it picks rows of a whole batch by their values.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    run: Callable[[Arrays], Arrays]
    has_boolean_mask: bool = False

    def batch_of(self, metadata: DetectorMetadata) -> int | None:
        """Images of each call, of a model of a fixed batch; None for any number. Images of different sizes make no batch."""
        return (self.inputs[metadata.input_name].shape or (None,))[0] or (1 if metadata.resize == "none" else None)


def channels_last(signature: Signature) -> tuple[Signature, frozenset[str]]:
    """The same model with images `(N, H, W, 3)` where it takes `(N, 3, H, W)`, and the names of these inputs."""
    first = frozenset(
        name
        for name, one in signature.inputs.items()
        if one.shape is not None and len(one.shape) == 4 and one.shape[1] == 3 and one.shape[3] != 3
    )

    def moved(name: str, one: Tensor) -> Tensor:
        if name not in first or one.shape is None:
            return one
        n, *sizes = one.shape
        return dataclasses.replace(one, shape=(n, *sizes[1:], sizes[0]))

    def run(feed: Arrays) -> Arrays:
        moved_feed = {name: np.moveaxis(array, -1, 1) if name in first else array for name, array in feed.items()}
        return signature.run({name: np.ascontiguousarray(array) if array.ndim else array for name, array in moved_feed.items()})

    return dataclasses.replace(
        signature, inputs={name: moved(name, one) for name, one in signature.inputs.items()}, run=run
    ), first
