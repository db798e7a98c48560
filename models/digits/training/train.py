"""Trains the digit detector on scenes that it composes meanwhile, and writes the folded weights.

    python -m models.digits.training.train --output models/digits/weights.npz

The committed weights took about 30 minutes on one core. The same arguments give the same scenes in the same order.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from models.digits.network import Weights
    from models.digits.training.learning import Targets

    Batch = tuple[NDArray[np.uint8], Targets]  # images (N, 320, 320, 3)

# More than in the test scenes: a scene costs about the same with more digits, and each digit teaches.
_MAX_NUMBERS = 40


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Length and seed of a training; the learning rate falls to zero over `steps` (cosine)."""

    steps: int
    batch_size: int
    learning_rate: float
    seed: int


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.digits.training.train", description="Train the bundled digit detector."
    )
    parser.add_argument("--output", required=True, help="file (.npz) for the folded weights; replaced when the training ends")
    parser.add_argument("--steps", type=int, default=5000, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="scenes a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20, help="seed of weights and scenes (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of TensorFlow (default: %(default)s)")
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
    from models.digits.training.learning import TrainableNetwork, detection_loss

    network = TrainableNetwork(plan.seed)
    variables = list(network.trainable_variables)
    optimiser = tf.keras.optimizers.AdamW(
        plan.learning_rate, weight_decay=0.02, use_ema=True, ema_momentum=0.995, global_clipnorm=5.0
    )
    kernels = {kernel.ref() for kernel in network.kernels.values()}
    optimiser.exclude_from_weight_decay([variable for variable in variables if variable.ref() not in kernels])
    optimiser.build(variables)

    @tf.function
    def step(images: tf.Tensor, classes: tf.Tensor, boxes: tf.Tensor, rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits, distances = forward(tf.cast(images, tf.float32) / 255.0, network.convolve)
            score_loss, box_loss = detection_loss(logits, distances, classes, boxes)
            loss = score_loss + box_loss
        optimiser.learning_rate.assign(rate)
        optimiser.apply(tape.gradient(loss, variables), variables)
        return score_loss, box_loss

    started = time.monotonic()
    recent: list[tuple[float, float]] = []
    for number, (images, targets) in enumerate(batches(plan), start=1):
        rate = plan.learning_rate * min(1.0, number / 100) * 0.5 * (1 + math.cos(math.pi * number / plan.steps))
        losses = step(images, targets.classes, targets.boxes, tf.constant(rate, tf.float32))
        recent.append((float(losses[0]), float(losses[1])))
        if number % 50 == 0 or number == plan.steps:
            seconds = time.monotonic() - started
            score_loss, box_loss = np.mean(recent[-50:], axis=0)
            figures = f"score loss {score_loss:.4f}  box loss {box_loss:.4f}  {number * plan.batch_size / seconds:.1f} scenes/s"
            print(f"step {number}/{plan.steps}  {figures}  {seconds / 60:.1f} min", flush=True)
    optimiser.finalize_variable_values(variables)  # sets them to their averages
    return network.folded()


def batches(plan: TrainingPlan) -> Iterator[Batch]:
    """The batches of a training; a thread composes up to four of them in advance."""
    with ThreadPoolExecutor(1, "compose-scenes") as pool:
        composing = deque(pool.submit(compose_batch, plan, number) for number in range(min(4, plan.steps)))
        for number in range(4, plan.steps + 4):
            yield composing.popleft().result()
            if number < plan.steps:
                composing.append(pool.submit(compose_batch, plan, number))


def compose_batch(plan: TrainingPlan, number: int) -> Batch:
    """Composes the batch of a step: scenes from `number * batch_size` on, letterboxed to the network's input."""
    from models.digits.network import INPUT_HW
    from models.digits.training.learning import Targets, assign_targets
    from models.digits.training.scenes import compose_scene
    from models.geometry import fit_image, resize_plan, to_model

    images, targets = [], []
    for index in range(number * plan.batch_size, (number + 1) * plan.batch_size):
        scene = compose_scene("train", plan.seed, index, max_numbers=_MAX_NUMBERS)
        height, width = scene.image.shape[:2]
        transform = resize_plan((width, height), INPUT_HW, "letterbox")
        targets.append(assign_targets(to_model(scene.boxes_xyxy, transform).astype(np.float32), scene.labels))
        images.append(fit_image(scene.image, transform, INPUT_HW))
    return np.stack(images), Targets(*map(np.stack, zip(*targets, strict=True)))


def save_weights(path: str, weights: Weights) -> None:
    """Writes the weights as float16, which halves the size and does not change the AP."""
    temporary = f"{path}.tmp.npz"
    halves: dict[str, Any] = {key: array.astype(np.float16) for key, array in weights.items()}
    np.savez_compressed(temporary, **halves)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
