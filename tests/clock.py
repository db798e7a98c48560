"""A clock that a test sets."""

import dataclasses


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now
