"""Rows become spills; where checkpoints are made, none waits for the next row."""

import dataclasses
import resource
import threading

import pytest
from apache_beam.pvalue import TaggedOutput

from pipeline.records import detection_row, identity_hash
from pipeline.results.resume_points import rows_in
from pipeline.stats.samples import ANY, Sampler
from pipeline.stats.summary import JobStats, merge_stats
from pipeline.write.spill_rows import SpillRows, _SpillRows
from tests.write.test_write_files import detected


@pytest.fixture
def spilling(tmp_path):
    """A bundle that has begun."""

    def begin(resume_point_s):
        spilling = _SpillRows(SpillRows(str(tmp_path), "detections", detection_row, resume_point_s=resume_point_s))
        spilling.start_bundle()
        return spilling

    return begin


def passed_on(results):
    """How many rows in each spill, and how many images in each stats."""
    results = [getattr(result, "value", result) for result in results]
    results = [getattr(result, "value", result) for result in results]  # windowed
    return [result[1].lines if isinstance(result, tuple) else result.detected for result in results]


def wait_until(condition):
    waiting = threading.Event()
    for _ in range(6000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come to that in a minute")


def test_rows_after_which_none_comes_are_a_checkpoint_too(tmp_path, spilling):
    """Results come in bursts, of a request each: its last one must not wait for the next request."""
    bundle = spilling(0.05)
    given = [result for name in "abc" for result in bundle.process(detected(name))]
    wait_until(lambda: rows_in(str(tmp_path)) == 3)
    given += bundle.finish_bundle()
    numbers = passed_on(given)
    assert sum(numbers[0::2]) == sum(numbers[1::2]) == 3
    assert not [thread.name for thread in threading.enumerate() if thread.name == "resume-point"]


@pytest.mark.parametrize(("resume_point_s", "spills", "made"), [(0, [1, 1] * 3, 3), (3600, [3, 3], 1), (None, [3, 3], 0)])
def test_the_longer_between_checkpoints_the_fewer(resume_point_s, spills, made, tmp_path, spilling):
    bundle = spilling(resume_point_s)
    given = [result for name in "abc" for result in bundle.process(detected(name))]
    assert passed_on([*given, *bundle.finish_bundle()]) == spills
    assert len(list(tmp_path.glob("spill/*.resume"))) == made
    assert all(isinstance(result, (tuple, TaggedOutput)) for result in given)


def test_a_checkpoint_that_cannot_be_written_fails_the_bundle(spilling):
    bundle, before = spilling(0.05), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file may grow
    try:
        assert list(bundle.process(detected("a"))) == []
        wait_until(lambda: bundle._failed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(OSError, match="File too large"):
        bundle.process(detected("b"))
    with pytest.raises(OSError, match="File too large"):
        list(bundle.finish_bundle())


def test_the_samples_of_a_job_hardly_grow_with_the_number_of_its_bundles(tmp_path):
    """All of them go to one worker. As in a job, the images that `Sampler` wants have thumbnails."""
    sampler, job_stats, images = Sampler(3), [], [detected(f"{n}.jpg") for n in range(3000)]
    images = [dataclasses.replace(image, thumbnail=b"jpeg" if sampler.wants(image) else b"") for image in images]
    for start in range(0, len(images), 10):
        bundle = _SpillRows(SpillRows(str(tmp_path), "detections", detection_row, samples=3))
        bundle.start_bundle()
        given = [result for image in images[start : start + 10] for result in bundle.process(image)]
        results = [getattr(getattr(result, "value", result), "value", result) for result in [*given, *bundle.finish_bundle()]]
        job_stats += [getattr(result, "value", result) for result in results]
    job_stats = [stats for stats in job_stats if isinstance(stats, JobStats)]
    smallest = sorted(identity_hash(image.ref.identity) for image in images)[:3]
    assert [rank for rank, _ in merge_stats(job_stats, 3).pictures[ANY]] == smallest
    assert 3 <= sum(len(kept) for stats in job_stats for kept in stats.pictures.values()) <= 90
    assert sum(stats.detected for stats in job_stats) == 3000


def test_many_checkpoints_have_hardly_more_samples_than_one_and_the_same_in_the_end(tmp_path):
    """Else those of a job of hours would not fit into memory when it sums up."""
    sampler, images = Sampler(3), [detected(f"{n}.jpg") for n in range(400)]
    images = [dataclasses.replace(image, thumbnail=b"jpeg" if sampler.wants(image) else b"") for image in images]

    def samples(resume_point_s):
        bundle = _SpillRows(SpillRows(str(tmp_path), "detections", detection_row, samples=3, resume_point_s=resume_point_s))
        bundle.start_bundle()
        given = [result for image in images for result in bundle.process(image)]
        results = [getattr(result, "value", result) for result in [*given, *bundle.finish_bundle()]]
        job_stats = [stats for stats in (getattr(result, "value", result) for result in results) if isinstance(stats, JobStats)]
        ranks = [rank for rank, _ in merge_stats(job_stats, 3).pictures[ANY]]
        return ranks, sum(len(stats.pictures.get(ANY, ())) for stats in job_stats)

    (one, in_one), (many, in_many) = samples(3600), samples(0)
    assert (one, in_one) == (many, 3)
    assert in_many < 40
