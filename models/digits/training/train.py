"""Trains the digit detector on scenes composed as it goes, and writes the folded weights.

    python -m models.digits.training.train --output models/digits/weights.npz

One core is enough: the committed weights took about 30 minutes on one. The same arguments give the same scenes in the same order.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from models.digits.network import Weights

_LETTERBOX_VALUE = 128
# more than in the scenes for measuring: a scene's cost is mostly its background and the network, and each digit teaches
_MAX_NUMBERS = 40


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What is trained, and for how long; the learning rate falls to zero over `steps` (cosine)."""

    steps: int
    batch_size: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Scenes as the network sees them: images (N, 320, 320, 3) uint8 and, for each cell of the grid, its class and box."""

    images: NDArray[np.uint8]
    classes: NDArray[np.int32]
    boxes: NDArray[np.float32]


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(
        prog="python -m models.digits.training.train", description="Train the bundled digit detector."
    )
    parser.add_argument("--output", required=True, help="the .npz to write the folded weights to; replaced when training ends")
    parser.add_argument("--steps", type=int, default=5000, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="scenes a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20, help="seed of weights and scenes (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="TensorFlow's intra-op threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    plan = TrainingPlan(options.steps, options.batch_size, options.learning_rate, options.seed)
    save_weights(options.output, train(plan))
    return 0


def train(plan: TrainingPlan) -> Weights:
    """Trains from scratch and returns the folded, averaged weights; prints a line every 50 steps."""
    import tensorflow as tf

    from models.digits.network import forward
    from models.digits.training.learning import AdamW, TrainableNetwork, detection_loss

    network = TrainableNetwork(plan.seed)
    variables = network.named_variables()
    optimiser = AdamW(variables, weight_decay=0.02, average=0.995)

    @tf.function
    def step(
        images: tf.Tensor, classes: tf.Tensor, boxes: tf.Tensor, rate: tf.Tensor, number: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits, distances = forward(tf.cast(images, tf.float32) / 255.0, network.convolve)
            score_loss, box_loss = detection_loss(logits, distances, classes, boxes)
            loss = score_loss + box_loss
        names = list(variables)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, [variables[name] for name in names]), 5.0)
        optimiser.apply(dict(zip(names, gradients, strict=True)), rate, number)
        return score_loss, box_loss

    started = time.monotonic()
    recent: list[tuple[float, float]] = []
    for number, batch in enumerate(batches(plan), start=1):
        rate = plan.learning_rate * min(1.0, number / 100) * 0.5 * (1 + math.cos(math.pi * number / plan.steps))
        losses = step(batch.images, batch.classes, batch.boxes, tf.constant(rate, tf.float32), tf.constant(number, tf.float32))
        recent.append((float(losses[0]), float(losses[1])))
        if number % 50 == 0 or number == plan.steps:
            minutes = (time.monotonic() - started) / 60
            score_loss, box_loss = np.mean(recent[-50:], axis=0)
            speed = number * plan.batch_size / (60 * minutes + 1e-9)
            print(
                f"step {number}/{plan.steps}  score loss {score_loss:.4f}  box loss {box_loss:.4f}  "
                f"{speed:.1f} scenes/s  {minutes:.1f} min",
                flush=True,
            )
    return network.folded(optimiser.averaged())


def batches(plan: TrainingPlan) -> Iterator[Batch]:
    """The training batches, composed ahead on a thread of their own."""
    ready: queue.Queue[Batch] = queue.Queue(maxsize=4)
    ended = threading.Event()

    def compose() -> None:
        for number in range(plan.steps):
            batch = compose_batch(plan, number)
            while not ended.is_set():
                try:
                    ready.put(batch, timeout=1.0)
                    break
                except queue.Full:
                    continue
            if ended.is_set():
                return

    threading.Thread(target=compose, name="compose-scenes", daemon=True).start()
    try:
        for _ in range(plan.steps):
            yield ready.get()
    finally:
        ended.set()


def compose_batch(plan: TrainingPlan, number: int) -> Batch:
    """The batch of a step: scenes `number * batch_size` onwards, letterboxed to the network's input."""
    from models.digits.network import INPUT_HW
    from models.digits.training.learning import assign_targets
    from models.digits.training.scenes import compose_scene
    from models.geometry import fit_image, resize_plan, to_model

    images, classes, boxes = [], [], []
    for index in range(number * plan.batch_size, (number + 1) * plan.batch_size):
        scene = compose_scene("train", plan.seed, index, max_numbers=_MAX_NUMBERS)
        height, width = scene.image.shape[:2]
        transform = resize_plan((width, height), INPUT_HW, "letterbox")
        targets = assign_targets(to_model(scene.boxes_xyxy, transform).astype(np.float32), scene.labels)
        images.append(fit_image(scene.image, transform, INPUT_HW, _LETTERBOX_VALUE))
        classes.append(targets.classes)
        boxes.append(targets.boxes)
    return Batch(np.stack(images), np.stack(classes), np.stack(boxes))


def save_weights(path: str, weights: Weights) -> None:
    """Writes the weights as float16: half the size, and no difference in AP."""
    temporary = f"{path}.tmp.npz"
    halves: dict[str, Any] = {key: array.astype(np.float16) for key, array in weights.items()}
    np.savez_compressed(temporary, **halves)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
