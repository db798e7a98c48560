"""The sample: the same few images whatever the order in which they come."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.figures.sampling import Sampler, sample_rank

IDENTITIES = st.lists(st.text(), unique=True, max_size=60)


@given(IDENTITIES, st.integers(0, 8))
def test_what_it_wants_includes_exactly_the_smallest_ranks(identities, size):
    sampler = Sampler(size)
    wanted = [identity for identity in identities if sampler.wants(identity)]
    smallest = sorted(identities, key=sample_rank)[:size]
    assert set(smallest) <= set(wanted)
    assert sorted(wanted, key=sample_rank)[:size] == smallest
    for number, identity in enumerate(identities):  # and nothing that was not among the smallest when it came
        assert (identity in wanted) == (identity in sorted(identities[: number + 1], key=sample_rank)[:size])


def test_ranks_are_pinned_since_shards_and_samples_depend_on_them():
    assert sample_rank("gs://bucket/a.jpg#1") == 7248482737417444637
    assert sample_rank("lone \udc80 surrogate") != sample_rank("lone \udc81 surrogate")
