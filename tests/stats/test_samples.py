"""The samples: the same few images whatever the order in which they come, some for each purpose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import DetectedImage, Detections, ImageRef, identity_hash
from pipeline.stats.samples import ANY, MOST_OBJECTS, NOTHING_FOUND, Sampler, chosen, keep, ranks

SIZES = st.integers(0, 40)


def image(name: str, *objects: tuple[str, float]) -> DetectedImage:
    """An image with objects, each a class and a confidence."""
    names, confidences = tuple(name for name, _ in objects), np.array([sure for _, sure in objects], np.float32)
    found = Detections(np.zeros((len(objects), 4), np.float32), np.zeros(len(objects), np.int32), confidences, names)
    return DetectedImage(ImageRef(name), 4, 3, "m", "1", found)


OBJECTS = st.lists(st.tuples(st.sampled_from([f"class {n}" for n in range(40)]), st.floats(0, 1)), max_size=6)
IMAGES = st.dictionaries(st.text(), OBJECTS, max_size=60).map(lambda of: [image(name, *each) for name, each in of.items()])


def kept_of(images, size):
    kept = {}
    for each in images:
        keep(kept, ranks(each), each, size)
    return kept


def shown(kept):
    return {purpose: [(rank, each.ref.uri) for rank, each in best] for purpose, best in kept.items()}


@pytest.mark.slow
@given(IMAGES, SIZES, st.randoms())
def test_the_same_images_are_kept_in_any_order(images, size, random):
    shuffled = random.sample(images, len(images))
    assert shown(kept_of(images, size)) == shown(kept_of(shuffled, size))
    names = [[each.ref.uri for _, each in chosen(kept_of(some, size), size)] for some in (images, shuffled)]
    assert names[0] == names[1]
    assert len(names[0]) == len(set(names[0])) == min(size, len(images))


@pytest.mark.slow
@given(IMAGES, SIZES, st.data())
def test_a_sampler_wants_each_image_that_is_kept_in_the_end_also_if_it_comes_again(images, size, data):
    again = data.draw(st.lists(st.sampled_from(images), max_size=20)) if images else []
    sampler, kept = Sampler(size), kept_of(images, size)
    wanted = {each.ref.uri for each in [*images, *again] if sampler.wants(each)}
    last = {each.ref.uri for best in kept.values() for _, each in best}
    assert last <= wanted
    assert all(sampler.wants(each) for best in kept.values() for _, each in best)


@pytest.mark.slow
@given(IMAGES, SIZES)
def test_an_image_that_is_wanted_whatever_it_shows_is_known_before_it_is_detected(images, size):
    sampler, early = Sampler(size), set()
    for each in images:
        if identity_hash(each.ref.identity) < sampler.below():
            early.add(each.ref.uri)
        sampler.wants(each)
    assert {each.ref.uri for _, each in kept_of(images, size).get(ANY, [])} <= early
    assert not early or size


@pytest.mark.matrix
@pytest.mark.parametrize("levels", [1, 100], ids=["as many objects in each", "more and more objects"])
def test_few_of_many_images_are_wanted_whatever_their_order(levels):
    """Each that is wanted is decoded again. Confidences fall from image to image, which is the worst order of them."""
    sampler, wanted = Sampler(12), 0
    for number in range(20_000):
        count = number * levels // 20_000
        wanted += sampler.wants(image(f"{number}.jpg", *((f"class {n}", 1 - number / 20_000) for n in range(count))))
    assert 12 <= wanted < 300 + 25 * levels


def test_a_purpose_gets_a_share_and_others_fill_up():
    images = [image(f"{number or 'nothing'}.jpg", *[("cat", 0.9)] * number) for number in range(40)]
    found = [(purpose, each.ref.uri) for purpose, each in chosen(kept_of(images, 12), 12)]
    most = [(MOST_OBJECTS, f"{number}.jpg") for number in (39, 38, 37)]
    assert found[:4] == [*most, (NOTHING_FOUND, "nothing.jpg")]
    assert [purpose for purpose, _ in found[4:]] == [ANY] * 8


def test_ranks_are_pinned_since_shards_and_samples_depend_on_them():
    assert identity_hash("gs://bucket/a.jpg#1") == 7248482737417444637
    assert identity_hash("lone \udc80 surrogate") != identity_hash("lone \udc81 surrogate")
