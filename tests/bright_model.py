"""A tiny real detector for tests: one box around all bright pixels of an image, exact to a pixel of its input."""

from pathlib import Path

from models.metadata import DetectorMetadata, write_metadata
from tests.tiny_models import box_around

INPUT_HW = (96, 128)


def export_bright_model(output: Path, resize: str = "stretch", hangs_on_white: bool = False, threshold: float = 127.0) -> str:
    """Writes the SavedModel; returns its base folder (the folder of versions).

    With `hangs_on_white` it never returns from a batch with an image that is white all over: it waits at an empty queue.
    """
    import tensorflow as tf

    class Bright(tf.Module):
        def __init__(self):
            super().__init__()
            self.threshold = tf.Variable(threshold)

        @tf.function(input_signature=[tf.TensorSpec((None, *INPUT_HW, 3), tf.uint8, "images")])
        def detect(self, images):
            bright = tf.cast(images[..., 1], tf.float32) > self.threshold
            if hangs_on_white:
                white = tf.reduce_any(tf.reduce_min(tf.cast(images, tf.int32), [1, 2, 3]) == 255)
                queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.bool])
                hang = lambda: tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.bool])[0]  # noqa: E731
                bright = tf.logical_and(bright, tf.cond(white, hang, lambda: True))
            found = tf.reduce_any(bright, [1, 2])
            return {
                "boxes": tf.cast(box_around(bright), tf.float32)[:, None],
                "scores": tf.where(found, 0.9, 0.0)[:, None],
                "classes": tf.zeros_like(found, tf.int32)[:, None],
                "num_detections": tf.cast(found, tf.int32),
            }

    module = Bright()
    tf.saved_model.save(module, str(output), signatures={"detect": module.detect})
    metadata = DetectorMetadata(
        name="bright",
        input_hw=INPUT_HW,
        resize=resize,
        class_names=("rectangle", "other"),
        letterbox_value=0,
        threshold_inputs=False,
    )
    write_metadata(str(output), metadata)
    return str(output.parent)
