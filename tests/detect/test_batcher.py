"""Batches form across threads, in the allowed sizes, and survive what breaks one of them; each rule on an engine of NumPy."""

import contextlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.errors import DeviceFailedError

HW = (4, 6)
LONG_MS = 300_000.0  # a batch leaves because it is full, never because time is up


class Means:
    """The mean of each image; fails on one value, and runs out of memory in batches above a limit."""

    def __init__(self, batch_sizes, concurrent_batches=2, *, broken=None, limit=99):
        self.batch_sizes, self.concurrent_batches = batch_sizes, concurrent_batches
        self.broken, self.limit, self.ran, self.closed = broken, limit, [], False

    def run(self, pixels):
        assert len(pixels) in self.batch_sizes
        self.ran.append(pixels)
        if len(pixels) > self.limit:
            raise OutOfMemory(f"a batch of {len(pixels)}")
        means = pixels.mean((1, 2, 3))
        if self.broken in means:
            raise ModelFailed("that pixel")
        return {"mean": means}

    def close(self):
        self.closed = True

    @property
    def sizes(self):
        return [len(pixels) for pixels in self.ran]


class BatchMeans(Means):
    """Mixes the images of a batch."""

    def run(self, pixels):
        return {"mean": super().run(pixels)["mean"] - pixels.mean()}


class OneReply(Means):
    """As an ONNX file that was reshaped for batches it does not know: one answer for all images."""

    def run(self, pixels):
        return {"mean": super().run(pixels)["mean"][:1]}


def pixels_of(values):
    return np.array(list(values), np.uint8)[:, None, None, None] * np.ones((1, *HW, 3), np.uint8)


def ask(batcher, values, together=1):
    """Each request from a thread of its own, with `together` images in it; (mean or error, batch size) of each image."""
    requests = [pixels_of(values[start : start + together]) for start in range(0, len(values), together)]

    def run(pixels):
        parts = batcher.run(pixels)
        assert [part.start for part in parts] + [len(pixels)] == [0] + [part.stop for part in parts]
        assert all((part.seconds > 0) == (part.batch_size > 0) for part in parts)
        return [
            (part.error or float(part.arrays["mean"][n]), 0 if n else part.batch_size)
            for part in parts
            for n in range(part.stop - part.start)
        ]

    with ThreadPoolExecutor(len(requests)) as pool:
        return [answer for answers in pool.map(run, requests) for answer in answers]


@pytest.fixture
def batched():
    """Opens a batcher over an engine; closes it after the test."""
    opened = []

    def open_batcher(engine, timeout_ms=1.0, input_hw=HW):
        opened.append(Batcher(engine, input_hw, timeout_ms))
        return opened[-1]

    yield open_batcher
    for batcher in opened:
        batcher.close()
        assert batcher.engine.closed


@pytest.mark.parametrize("together", [1, 3, 4, 20])
@pytest.mark.parametrize("images", [8, 16, 40])
def test_images_of_many_threads_travel_in_full_batches(batched, images, together):
    answers = ask(batched(engine := Means((1, 2, 4, 8)), LONG_MS), range(images), together)
    assert [mean for mean, _ in answers] == list(range(images))
    assert engine.sizes == [8] * (images // 8)
    assert sorted(size for _, size in answers) == (images - images // 8) * [0] + images // 8 * [8]


@pytest.mark.parametrize(
    ("batch_sizes", "images", "ran"),
    [((1, 2, 4), 1, [1]), ((2, 4), 1, [2]), ((8,), 3, [8]), ((1, 2, 4), 3, [4]), ((1, 2, 4), 9, [4, 4, 1])],
)
def test_few_images_travel_in_the_smallest_size_that_holds_them_with_copies_of_the_last(batched, batch_sizes, images, ran):
    answers = ask(batched(engine := Means(batch_sizes)), range(images), images)
    assert ([mean for mean, _ in answers], sorted(engine.sizes)) == (list(range(images)), sorted(ran))
    (last,) = [pixels for pixels in engine.ran if images - 1 in pixels]
    assert (last[(images - 1) % batch_sizes[-1] :] == images - 1).all()


@pytest.mark.parametrize("images", [0, 1, 4])
def test_as_many_images_as_an_allowed_size_reach_the_engine_without_a_copy(batched, images):
    pixels = pixels_of(range(images))
    batched(engine := Means((1, 2, 4))).run(pixels)
    assert [np.shares_memory(ran, pixels) for ran in engine.ran] == [True] * (images > 0)


@pytest.mark.parametrize(("batch_sizes", "concurrent_batches"), [((1, 2, 4), 2), ((3,), 1), ((1, 8), 3)])
@pytest.mark.parametrize("at_once", [True, False])
def test_every_size_is_warmed_and_the_largest_in_each_concurrent_batch_unless_another_model_is_in_use(
    batched, batch_sizes, concurrent_batches, at_once
):
    batched(engine := Means(batch_sizes, concurrent_batches)).warm_up(at_once=at_once)
    assert engine.sizes == [*batch_sizes, *[batch_sizes[-1]] * (concurrent_batches if at_once else 0)]


@pytest.mark.parametrize("together", [1, 3, 40])
@pytest.mark.parametrize(("limit", "batch_sizes"), [(1, (1,)), (3, (1, 2)), (4, (1, 2, 4))])
def test_out_of_memory_drops_the_larger_sizes_for_good_and_loses_no_image(batched, limit, batch_sizes, together):
    batcher = batched(engine := Means((1, 2, 4, 8), limit=limit), LONG_MS)
    assert [mean for mean, _ in ask(batcher, range(40), together)] == list(range(40))
    assert batcher.batch_sizes == batch_sizes
    engine.ran.clear()
    assert [mean for mean, _ in ask(batcher, range(8))] == list(range(8))
    assert max(engine.sizes) <= limit


def test_out_of_memory_while_warming_drops_sizes_before_any_image(batched):
    batcher = batched(Means((1, 2, 4, 8), limit=2))
    batcher.warm_up()
    assert (batcher.batch_sizes, batcher.images_in_flight) == ((1, 2), 2 * 2 * 2)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OutOfMemory("a batch of 1"), DeviceFailedError),
        (MemoryError("of NumPy"), DeviceFailedError),
        (ModelFailed("CUDA_ERROR_ILLEGAL_ADDRESS"), DeviceFailedError),
        (ZeroDivisionError("by zero"), ZeroDivisionError),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_no_image_is_to_blame_for_is_for_those_who_wait_and_later_images_are_found(batched, error, raised):
    """As of a device that is broken, or of a model server that is away."""

    def fail(pixels):
        raise error

    batcher = batched(engine := Means((1, 2)))
    engine.run = fail
    with pytest.raises(raised):
        batcher.warm_up()
    with pytest.raises(raised, match=str(error)):
        batcher.run(pixels_of([1, 2, 3]))
    del engine.run
    assert [mean for mean, _ in ask(batcher, [3, 4])] == [3, 4]


@pytest.mark.parametrize("failures", [1, 2])
def test_an_image_that_fails_only_while_the_device_does_is_found(batched, failures):
    """Alone, too: the batch fails, then the image."""
    batcher, left = batched(engine := Means((1, 2))), iter(range(failures))

    def run(pixels):
        if next(left, None) is not None:
            raise ModelFailed("for a moment")
        return Means.run(engine, pixels)

    engine.run = run
    assert [mean for mean, _ in ask(batcher, [3, 4], 2)] == [3, 4]


@pytest.mark.parametrize(("recovers_s", "raised"), [(300.0, ()), (0.0, DeviceFailedError)])
def test_a_device_that_may_come_back_is_waited_for(batched, recovers_s, raised):
    batcher, left = batched(engine := Means((1,))), iter(range(4))
    engine.recovers_s = recovers_s

    def run(pixels):
        if next(left, None) is not None:
            raise ModelFailed("starts")
        return Means.run(engine, pixels)

    engine.run = run
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        assert [mean for mean, _ in ask(batcher, [3])] == [3]


@pytest.mark.parametrize("together", [1, 8])
def test_all_that_waits_for_a_device_that_stays_away_waits_once_and_a_later_call_finds_it_back(batched, together, monkeypatch):
    """Images of one batch, and batches of other threads. A model server may be away for ten minutes."""
    waited, now = [], [0.0]

    def sleep(seconds):
        waited.append(seconds)
        now[0] += seconds

    def fail(pixels):
        raise ModelFailed("INTERNAL")

    batcher = batched(engine := Means((1, 8), 1), 0.0)
    engine.recovers_s, engine.run = 600.0, fail
    with monkeypatch.context() as clock, ThreadPoolExecutor(8 // together) as pool:
        clock.setattr("pipeline.detect.batcher.time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        asked = [pool.submit(batcher.run, pixels_of(range(together))) for _ in range(8 // together)]
        assert {type(call.exception()) for call in asked} == {DeviceFailedError}
    assert 600.0 <= sum(waited) < 602.0
    del engine.run
    assert [mean for mean, _ in ask(batcher, [3, 4])] == [3, 4]
    failures = iter(range(4))

    def fail_for_a_while(pixels):
        if next(failures, None) is not None:
            raise ModelFailed("INTERNAL")
        return Means.run(engine, pixels)

    engine.run = fail_for_a_while
    assert [mean for mean, _ in ask(batcher, [3, 4])] == [3, 4]  # it is waited for again


def test_an_image_for_which_alone_memory_does_not_suffice_is_not_the_models(batched):
    """As a large one of a model that takes any size; a blank one fits."""

    def run(pixels):
        if pixels.max() == 7:
            raise OutOfMemory("7")
        return Means.run(engine, pixels)

    batcher = batched(engine := Means((1, 2)))
    engine.run = run
    small, large = (mean for mean, _ in ask(batcher, [3, 7], 2))
    assert (small, type(large), batcher.batch_sizes) == (3, OutOfMemory, (1,))


@pytest.mark.parametrize("broken", [1, 6, 14, 16])
@pytest.mark.parametrize("together", [1, 4, 6, 16])
def test_an_image_that_breaks_the_model_breaks_no_other(batched, together, broken):
    """Also where the images of one request are divided among several batches, the first or the last of which fails."""
    batcher = batched(Means((1, 2, 4, 8), broken=broken), 50.0)
    means = [mean for mean, _ in ask(batcher, range(1, 17), together)]
    failed = means.pop(broken - 1)
    assert isinstance(failed, ModelFailed) and str(failed) == "that pixel"
    assert means == [n for n in range(1, 17) if n != broken]
    assert batcher.batch_sizes == (1, 2, 4, 8)


class Sick(Means):
    """Fails on everything after the first batch."""

    def run(self, pixels):
        found = super().run(pixels)
        if len(self.ran) > 1:
            raise ModelFailed("CUDA_ERROR_ILLEGAL_ADDRESS")
        return found


@pytest.mark.parametrize("limit", [99, 2], ids=["all sizes", "no memory for the largest"])
@pytest.mark.parametrize(("kind", "mixes"), [(Means, False), (BatchMeans, True), (OneReply, True)])
def test_a_model_that_mixes_the_images_of_a_batch_gets_them_alone(batched, kind, mixes, limit):
    batcher = batched(engine := kind((1, 2, 4), limit=limit))
    assert batcher.mixes_images() == mixes
    batcher.isolate()
    engine.ran.clear()
    ask(batcher, range(7), 7)
    assert (batcher.batch_sizes, batcher.images_in_flight, engine.sizes) == ((1,), 3, [1] * 7)


def test_a_device_that_fails_on_everything_is_not_a_model_that_mixes_images(batched):
    assert not batched(Sick((1, 2, 4))).mixes_images()


def test_a_model_of_a_fixed_batch_that_mixes_images_gets_each_with_copies_of_itself(batched):
    batcher = batched(engine := BatchMeans((3,)))
    assert batcher.mixes_images()
    batcher.isolate()
    engine.ran.clear()
    assert [mean for mean, _ in ask(batcher, [5, 9], 2)] == [0, 0]
    assert sorted(sorted({*pixels.ravel()}) for pixels in engine.ran) == [[5], [9]]


def test_images_of_different_sizes_make_no_batch(batched):
    batcher = batched(engine := Means((1,)), LONG_MS, input_hw=(None, None))
    images = [pixels_of([n])[:, : n + 1] for n in range(3)]
    assert [part.arrays["mean"].item() for image in images for part in batcher.run(image)] == [0, 1, 2]
    assert [pixels.shape[1] for pixels in engine.ran] == [1, 2, 3]


def test_closing_ends_the_threads_and_the_engine():
    before = set(threading.enumerate())
    batcher = Batcher(engine := Means((1, 2), 3), HW)
    batcher.close()
    assert engine.closed and set(threading.enumerate()) <= before  # those of other tests may end
