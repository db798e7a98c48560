"""Batches form across threads, on the batch_sizes_used of the batch_sizes, and survive what breaks one of them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.detect.batching import BatchedModel
from pipeline.detect.loaded_model import ModelFailed, OutOfMemory

HW = (4, 6)
LONG_MS = 5000.0  # a batch leaves because it is full, never because time is up


def image(value):
    return np.full((*HW, 3), value, np.uint8)


def model(predict, batch_sizes, concurrent_batches=2, timeout_ms=1.0):
    return BatchedModel(predict, HW, batch_sizes, concurrent_batches, timeout_ms)


def means(images):
    import tensorflow as tf

    return {
        "mean": tf.reduce_mean(tf.cast(images, tf.float32), [1, 2, 3]),
        "batch_size": tf.fill([tf.shape(images)[0]], tf.shape(images)[0]),
    }


def ask(batched, values, together=1):
    """Each call from a thread of its own, with `together` images in it (the last with what is left)."""
    calls = [[image(value) for value in values[start : start + together]] for start in range(0, len(values), together)]
    with ThreadPoolExecutor(len(calls)) as pool:
        return [output for outputs in pool.map(batched, calls) for output in outputs]


@pytest.mark.parametrize("together", [1, 3, 4, 20])
@pytest.mark.parametrize("images", [8, 16, 40])
def test_images_of_many_threads_travel_in_full_batches(images, together):
    outputs = ask(model(means, (1, 2, 4, 8), timeout_ms=LONG_MS), range(images), together)
    assert [output.arrays["mean"] for output in outputs] == list(range(images))
    assert sorted(output.led_batch for output in outputs) == (images - images // 8) * [0] + images // 8 * [8]
    assert all((output.model_seconds > 0) == (output.led_batch > 0) for output in outputs)


@pytest.mark.parametrize(("batch_sizes", "batch_size"), [((1, 2, 4), 1), ((2, 4), 2), ((8,), 8)])
def test_a_lone_image_travels_on_the_smallest_rung(batch_sizes, batch_size):
    output = model(means, batch_sizes)([image(7)])[0]
    assert (output.arrays["mean"], output.arrays["batch_size"], output.led_batch) == (7, batch_size, batch_size)


def test_led_batches_count_every_batch_once_whatever_their_sizes():
    outputs = ask(model(means, (1, 2, 4)), [n % 200 for n in range(150)])
    ran = {}  # batch_size -> images that travelled on it
    for output in outputs:
        ran[int(output.arrays["batch_size"])] = ran.get(int(output.arrays["batch_size"]), 0) + 1
    for batch_size, count in ran.items():
        batches = sum(output.led_batch == batch_size for output in outputs)
        assert -(-count // batch_size) <= batches <= count


def test_two_models_in_one_process_share_no_batch():
    """Both wait for two images of the same shape; neither may take the other's."""
    import tensorflow as tf

    first = model(lambda images: {"n": tf.ones([tf.shape(images)[0]])}, (2,), timeout_ms=LONG_MS)
    second = model(lambda images: {"n": 2 * tf.ones([tf.shape(images)[0]])}, (2,), timeout_ms=LONG_MS)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda batched: batched([image(0)])[0].arrays["n"], [first, second, first, second]))
    assert outputs == [1, 2, 1, 2]


@pytest.mark.parametrize(("batch_sizes", "concurrent_batches"), [((1, 2, 4), 2), ((3,), 1), ((1, 8), 3)])
@pytest.mark.parametrize("at_once", [True, False])
def test_every_rung_is_warmed_and_the_largest_on_every_stream_unless_another_model_is_at_work(
    batch_sizes, concurrent_batches, at_once
):
    import tensorflow as tf

    seen = []

    def predict(images):
        noted = tf.numpy_function(lambda batch_size: seen.append(int(batch_size)) or np.int32(0), [tf.shape(images)[0]], tf.int32)
        with tf.control_dependencies([noted]):
            return means(tf.identity(images))

    model(predict, batch_sizes, concurrent_batches).warm_up(at_once=at_once)
    assert seen == [*batch_sizes, *[batch_sizes[-1]] * (concurrent_batches if at_once else 0)]


def out_of_memory_above(limit):
    """A model that runs out of memory in larger batches: TensorFlow makes ResourceExhaustedError of Python's MemoryError."""
    import tensorflow as tf

    def check(batch):
        if batch > limit:
            raise MemoryError(f"a batch of {batch}")
        return np.float32(0)

    def predict(images):
        nothing = tf.numpy_function(check, [tf.shape(images)[0]], tf.float32)
        outputs = means(images)
        return {**outputs, "mean": outputs["mean"] + tf.ensure_shape(nothing, ())}

    return tf.function(predict, autograph=False)


@pytest.mark.parametrize("together", [1, 3, 40])
@pytest.mark.parametrize(("limit", "batch_sizes"), [(1, (1,)), (3, (1, 2)), (4, (1, 2, 4))])
def test_out_of_memory_shortens_the_ladder_for_good_and_loses_no_image(limit, batch_sizes, together):
    batched = model(out_of_memory_above(limit), (1, 2, 4, 8), timeout_ms=20.0)
    outputs = ask(batched, range(40), together)
    assert [output.arrays["mean"] for output in outputs] == list(range(40))
    assert max(output.arrays["batch_size"] for output in outputs) <= limit
    assert batched.batch_sizes == batch_sizes
    assert ask(batched, range(8))[0].arrays["batch_size"] <= limit
    assert batched.batch_sizes == batch_sizes


def test_out_of_memory_while_warming_shortens_the_ladder_before_any_image(capfd):
    batched = model(out_of_memory_above(2), (1, 2, 4, 8))
    batched.warm_up()
    assert batched.batch_sizes == (1, 2)
    assert batched.images_in_flight == 2 * 2 * 2
    assert "Traceback" not in capfd.readouterr().err


def test_out_of_memory_on_the_last_rung_is_an_error():
    with pytest.raises(OutOfMemory):
        model(out_of_memory_above(0), (1, 2)).warm_up()
    with pytest.raises(OutOfMemory):
        model(out_of_memory_above(0), (1, 2))([image(0)])


@pytest.mark.parametrize("broken", [0, 5, 13, 15])
@pytest.mark.parametrize("together", [1, 4, 6, 16])
def test_an_image_that_breaks_the_model_breaks_no_other(together, broken):
    """Also where the images of one call are divided among several model calls, the first or the last of which fails."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def predict(images):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(images[:, 0, 0, 0] != broken), ["that pixel"])]):
            return means(tf.identity(images))

    batched = model(predict, (1, 2, 4, 8), timeout_ms=50.0)

    outputs = ask(batched, range(16), together)
    failed = outputs.pop(broken)
    assert isinstance(failed, ModelFailed)
    assert "that pixel" in str(failed)
    assert [output.arrays["mean"] for output in outputs] == [n for n in range(16) if n != broken]
    assert batched.batch_sizes == (1, 2, 4, 8)
