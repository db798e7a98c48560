"""Listing finds what a pattern means, however folders are divided, as it comes, in little memory; local or on Cloud Storage."""

import os
import stat
import tracemalloc
import uuid

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.storage.listing import divided, files_in, files_in_all, location_of
from pipeline.storage.store import FoundFile

NAMES = ["a", "b.jpg", ".h", "x[1]", "ä b"]
PARTS = ["*", "?", "**", "a", "b.jpg", "*.jpg", "[ab]*", "[!a]*", "a**", "**.jpg", "x[[]1]", ".h", "ä b", "[", "[b-a]", "?[!.]*"]

trees = st.sets(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join), max_size=12)
patterns = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join)


def means(pattern, path, at_start=True):
    """What a pattern means, character by character."""
    if not pattern:
        return not path
    if at_start and pattern.startswith("**/"):
        ends = [n + 1 for n, character in enumerate(path) if character == "/"]
        return any(means(pattern[3:], path[end:]) for end in [0, *ends])
    if pattern.startswith("**"):
        return any(means(pattern[2:], path[end:], False) for end in range(len(path) + 1))
    if pattern[0] == "*":
        length = len(path.partition("/")[0])
        return any(means(pattern[1:], path[end:], False) for end in range(length + 1))
    end = pattern.find("]", 3 if pattern.startswith("[!") else 2)
    if pattern[0] == "[" and end > 0 and "/" not in pattern[:end]:
        inside, negated = pattern[1:end].removeprefix("!"), pattern[1] == "!"
        among = set() if inside == "b-a" else set(inside)
        return path[:1] not in ("", "/") and (path[0] in among) is not negated and means(pattern[end + 1 :], path[1:], False)
    same = path[:1] not in ("", "/") if pattern[0] == "?" else path[:1] == pattern[0]
    return same and means(pattern[1:], path[1:], pattern[0] == "/")


def without_folders(paths):
    """Of some paths those that can be files together."""
    return {path for path in paths if not any(other.startswith(path + "/") for other in paths)}


def found_by(pattern, files, is_folder):
    """The paths of files that a pattern, or a folder of its name, stands for."""
    if is_folder:
        return sorted(path for path in files if path.startswith(pattern + "/") and "/." not in path[len(pattern) :])
    return sorted(path for path in files if means(pattern, path))


@hypothesis_settings(deadline=None)
@given(tree=trees, pattern=patterns, wanted=st.sampled_from([1, 2, 5, 64]))
def test_all_files_that_match_are_found_once_however_the_folder_is_divided(tmp_path_factory, tree, pattern, wanted):
    root = tmp_path_factory.mktemp("tree")
    files = without_folders(tree)
    for path in files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    place = location_of(f"{root}/{pattern}")
    assert location_of(place.pattern) == place
    for found in (files_in(place), files_in_all(divided([place], wanted))):
        paths = sorted(os.path.relpath(file.path, root) for file in found)
        assert paths == found_by(pattern, files, (root / pattern).is_dir())


@hypothesis_settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(tree={"a/a/a"}, pattern="*/a", wanted=1)
@example(tree={"b.jpg/a"}, pattern="**.jpg/*", wanted=2)
@given(tree=trees, pattern=patterns, wanted=st.sampled_from([1, 2, 64]))
def test_all_objects_that_match_are_found_once_however_the_bucket_is_divided(gcs_bucket, tree, pattern, wanted):
    root = uuid.uuid4().hex
    files = without_folders(tree)
    for path in files:
        gcs_bucket.blob(f"{root}/{path}").upload_from_string(path)
    is_folder = not {*"*?["} & {*pattern} and pattern not in files
    place = location_of(f"gs://{gcs_bucket.name}/{root}/{pattern}")
    for found in (files_in(place), files_in_all(divided([place], wanted))):
        paths = sorted(file.path.removeprefix(f"gs://{gcs_bucket.name}/{root}/") for file in found)
        assert paths == found_by(pattern, files, is_folder)


def test_a_file_is_found_with_size_and_version(tmp_path, gcs_bucket):
    (tmp_path / "a.jpg").write_bytes(b"12345")
    status = os.stat(tmp_path / "a.jpg")
    (found,) = files_in(location_of(f"{tmp_path}/*"))
    assert found == FoundFile(f"{tmp_path}/a.jpg", 5, f"5-{status.st_mtime_ns}")
    blob = gcs_bucket.blob("sized/a.jpg")
    blob.upload_from_string(b"12345")
    for pattern in ("*", "a.jpg", "**", ""):
        (found,) = files_in(location_of(f"gs://{gcs_bucket.name}/sized/{pattern}"))
        assert found == FoundFile(f"gs://{gcs_bucket.name}/sized/a.jpg", 5, str(blob.generation))


@pytest.mark.parametrize("pattern", ["gs://", "gs:///a", "gs://*/a", "gs://b*"])
def test_a_pattern_must_name_its_bucket(pattern):
    with pytest.raises(InputError, match=r"^input gs:.*: cannot be listed: expected gs://<bucket>/<name>"):
        location_of(pattern)


@pytest.mark.parametrize("wanted", [1, 64])
@pytest.mark.parametrize("pattern", ["in", "in/**", "in/**/*.jpg", "link/"])
def test_a_folder_that_links_lead_to_is_listed_once_by_its_real_name(tmp_path, pattern, wanted):
    """Also a hidden one, one elsewhere, and one from which links lead back. Links to files are files."""
    names = ["in/a/1.jpg", "in/.store/2.jpg", "elsewhere/3.jpg", "elsewhere/deep/4.jpg", "third/5.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    links = [("in/again", "a"), ("in/a/circle", ".."), ("in/shown", ".store"), ("in/one", "../elsewhere"), ("in/two", "one")]
    links += [("in/deep", "../elsewhere/deep"), ("elsewhere/third", "../third"), ("third/back", "../elsewhere"), ("link", "in")]
    links += [("third/home", "../in"), ("in/gone.jpg", "absent.jpg"), ("in/file.jpg", "a/1.jpg")]
    links += [("in/itself.jpg", "itself.jpg")]  # which, like that to nothing, is for its reader to complain of
    links += [("third/all", "../..")]  # and one above all of them, likewise
    names += ["in/file.jpg", "in/itself.jpg", "in/gone.jpg", "third/all"]
    for link, target in links:
        (tmp_path / link).symlink_to(target)
    found = files_in_all(divided([location_of(f"{tmp_path}/{pattern}")], wanted))
    assert sorted(file.path for file in found) == sorted(f"{tmp_path}/{name}" for name in names)


def test_a_linked_folder_that_a_pattern_names_has_its_real_name(tmp_path):
    (tmp_path / "elsewhere" / "x").mkdir(parents=True)
    (tmp_path / "elsewhere" / "x" / "a.jpg").touch()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("../elsewhere")
    for pattern in ("in/*/x/a.jpg", "in/l*/*/*.jpg", "in/**/link/**/a.jpg", "in/link/x", "in/link/x/a.jpg"):
        assert [file.path for file in files_in(location_of(f"{tmp_path}/{pattern}"))] == [f"{tmp_path}/elsewhere/x/a.jpg"]


def test_a_folder_that_cannot_be_listed_is_given_with_its_fault(tmp_path):
    name = "d" * 250
    path = f"{tmp_path}/" + f"{name}/" * 20  # longer than the system takes; also for root, who may look into everything
    for pattern in (f"{path}*", f"{path}**", f"{path}a.jpg"):
        (found,) = files_in(location_of(pattern))
        assert found[:3] == FoundFile(path.rstrip("/") if "*" in pattern else pattern)[:3]
        assert (found.fault is None) == ("*" not in pattern)  # a name is for its reader to complain of


def test_files_come_while_others_are_still_to_be_found(tmp_path):
    """So what goes meanwhile is no longer found, and is no error."""
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.jpg").touch()
    files = files_in(location_of(str(tmp_path)))
    first = next(files).path
    for folder in tmp_path.iterdir():
        if not first.startswith(f"{folder}/"):
            (folder / "a.jpg").unlink()
            folder.rmdir()
    assert [file.path for file in files] == []


@pytest.mark.matrix
@pytest.mark.slow
def test_memory_stays_flat_however_many_files_there_are(tmp_path):
    """Half of them in one folder, the others in folders of folders."""
    peaks, made = [], 0
    for total in (2_000, 40_000):
        for number in range(made, total):
            folder = tmp_path / ("flat" if number % 2 else f"{number % 50}/{number % 350}")
            folder.mkdir(parents=True, exist_ok=True)
            os.mknod(folder / f"{number:06d}.jpg", stat.S_IFREG | 0o600)
        made = total
        tracemalloc.start()
        assert sum(1 for _ in files_in_all(divided([location_of(str(tmp_path))], 64))) == total
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2_000_000  # up to 4,000 are under way at once; all together take 10 MB
