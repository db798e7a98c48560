"""Ranges of names: listed side by side, they give each name once, in the order of object storage, UTF-8 bytes."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.listing.list_images import list_images
from pipeline.storage import listing
from pipeline.storage.listing import divided, files_in_all, location_of
from pipeline.storage.name_ranges import NameRange, split_points
from pipeline.storage.store import EVERY_NAME, FoundFile
from pipeline.storage.stores import store_of

# as UTF-16, by which some languages compare, the last three have another order
ODD = ["!", "0", "IMG 1.jpg", "IMG_1.jpg", "IMG_1.jpg!", "IMG_10.jpg", "Z", "~", "\x80", "é", "\ue000", "\uff5e", "\U0001f600"]


@pytest.fixture(params=[pytest.param("Cloud Storage", marks=pytest.mark.slow), pytest.param("S3", marks=pytest.mark.matrix)])
def folder(request):
    """The URI of an empty folder, and what writes an object."""
    if request.param == "S3":
        bucket = request.getfixturevalue("s3_bucket")
        return f"s3://{bucket.name}/in/", lambda name: bucket.put_object(Key=f"in/{name}", Body=b"x")
    bucket = request.getfixturevalue("strict_gcs_bucket")
    return f"gs://{bucket.name}/in/", lambda name: bucket.blob(f"in/{name}").upload_from_string(b"x")


def listed(folder, names=EVERY_NAME, at_once=None):
    return [found.path for found in store_of(folder).list_folder(folder, "", False, names, at_once)]


def test_two_ranges_give_each_name_once_wherever_they_meet(folder):
    uri, put = folder
    for name in ODD:
        put(name)
    paths = [f"{uri}{name}" for name in ODD]
    assert listed(uri) == listed(uri, at_once=3) == paths == sorted(paths)
    for point in [*paths, f"{uri}IMG_", f"{uri}\ufffd", f"{uri}\U0010fffd"]:
        before, behind = NameRange(until=point), NameRange(after=point)
        of_ranges = [[path for path in listed(uri, names) if names.holds(path)] for names in (before, behind)]
        assert of_ranges[0] + of_ranges[1] == paths
        assert len(listed(uri, behind)) <= len(of_ranges[1]) + 1, "the store lists no names before the range"


@pytest.mark.parametrize("pattern", ["", "*.jpg", "**/*.jpg"])
def test_a_folder_of_many_objects_is_listed_in_ranges_that_give_each_once(folder, pattern, monkeypatch):
    uri, put = folder
    names = [*(f"IMG_{number:04}.jpg" for number in range(90, 390)), "IMG_0100/deep.jpg", "zebra.jpg", "notes.txt"]
    for name in names:
        put(name)
    monkeypatch.setattr(listing, "_LOOKED_AT", 40)
    (whole,) = [location_of(uri + pattern)]
    ranges = divided([whole], 2)
    files = [[file.path for file in files_in_all([each])] for each in ranges]
    wanted = [
        f"{uri}{name}" for name in names if (name.endswith(".jpg") or not pattern) and ("/" not in name or pattern != "*.jpg")
    ]
    assert len(ranges) == 16 and sorted(path for of_range in files for path in of_range) == sorted(wanted)
    assert max(map(len, files)) < 80, "no range holds a quarter of all"
    assert len(list(list_images([uri + pattern]))) == sum(path.endswith(".jpg") for path in wanted)


def test_a_store_that_ignores_ranges_still_gives_each_name_once(gcs_bucket, monkeypatch):
    """As this emulator does."""
    for number in range(60):
        gcs_bucket.blob(f"in/{number:03}.jpg").upload_from_string(b"x")
    monkeypatch.setattr(listing, "_LOOKED_AT", 20)
    assert len({ref.uri for ref in list_images([f"gs://{gcs_bucket.name}/in/"])}) == 60
    uri = f"gs://{gcs_bucket.name}/in/"
    whole = location_of(uri)
    parts = [
        listing.dataclasses.replace(whole, names=NameRange(*ends)) for ends in pairwise(["", f"{uri}010.jpg", f"{uri}03", ""])
    ]
    assert [len(list(files_in_all([part]))) for part in parts] == [11, 19, 30]


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=60), st.data())
@example({"a", "b"}, None)
@example({"\U0010ffff", "\U0010fffe"}, None)
def test_points_divide_any_names(names, data):
    names = sorted(names)
    first = data.draw(st.integers(1, len(names))) if data else 1
    points = split_points(names[:first], lambda text: next((name for name in names if name > text), None), 8)
    assert points == sorted({*points}) and len(points) < 8
    ranges = [NameRange(*ends) for ends in pairwise(["", *points, ""])]
    assert [name for each in ranges for name in names if each.holds(name)] == names
    assert all(any(each.holds(name) for name in names) for each in ranges), "no range is empty"


def test_a_local_disk_is_not_asked_for_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "_LOOKED_AT", 2)
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
    (only,) = divided([location_of(str(tmp_path))], 16)
    assert [type(found) for found in files_in_all([only])] == [FoundFile] * 5
