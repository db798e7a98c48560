"""The sample: the same few images whatever the order in which they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import identity_hash
from pipeline.stats.samples import Sampler

IDENTITIES = st.lists(st.text(), unique=True, max_size=60)


@pytest.mark.slow
@given(IDENTITIES, st.integers(0, 8))
def test_what_it_wants_includes_exactly_the_smallest_ranks(identities, size):
    sampler = Sampler(size)
    wanted = [identity for identity in identities if sampler.wants(identity)]
    smallest = sorted(identities, key=identity_hash)[:size]
    assert set(smallest) <= set(wanted)
    assert sorted(wanted, key=identity_hash)[:size] == smallest
    for number, identity in enumerate(identities):  # and nothing that was not among the smallest when it came
        assert (identity in wanted) == (identity in sorted(identities[: number + 1], key=identity_hash)[:size])


def test_ranks_are_pinned_since_shards_and_samples_depend_on_them():
    assert identity_hash("gs://bucket/a.jpg#1") == 7248482737417444637
    assert identity_hash("lone \udc80 surrogate") != identity_hash("lone \udc81 surrogate")


@given(IDENTITIES, st.integers(0, 8), st.data())
def test_an_image_that_is_asked_for_again_takes_no_other_s_place(identities, size, data):
    again = data.draw(st.lists(st.sampled_from(identities), max_size=20)) if identities else []
    sampler = Sampler(size)
    for identity in [*identities, *again]:
        sampler.wants(identity)
    smallest = sorted(identities, key=identity_hash)[:size]
    assert all(sampler.wants(identity) for identity in smallest)
