"""Who works at what: two claims on the same images are always seen to be so, and a process that ended to have ended."""

import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.results.claims import EVERYTHING, Claim
from pipeline.storage.globs import to_regex


def claim(*patterns: str, run: str = "a") -> Claim:
    return Claim.of_this_process(run, patterns)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param("gs://b/raw/2026/11/20/**", "gs://b/raw/2026/11/20/**", True, id="the same day"),
        pytest.param("gs://b/raw/2026/11/20/**", "gs://b/raw/2026/11/21/**", False, id="two days"),
        pytest.param("gs://b/raw/2026/11/2/**", "gs://b/raw/2026/11/20/**", False, id="a day whose name begins as another's"),
        pytest.param("gs://b/raw/2026/**", "gs://b/raw/2026/11/20/**", True, id="a day of the year"),
        pytest.param("gs://b/raw/", "gs://b/raw/2026/**", True, id="a folder, with its slash"),
        pytest.param("gs://b/raw", "gs://b/raw/2026/**", True, id="a folder, without"),
        pytest.param("gs://b", "gs://b/raw/2026/**", True, id="a bucket"),
        pytest.param("gs://b", "gs://bb/**", False, id="two buckets"),
        pytest.param("gs://b/*.jpg", "gs://b/*.png", False, id="two endings"),
        pytest.param("gs://b/*.jpg", "gs://b/*a.jpg", True, id="an ending of an ending"),
        pytest.param("gs://b/x[ab].jpg", "gs://b/xa.jpg", True, id="a set"),
        pytest.param("gs://b/1", "gs://b/10", False, id="a name that begins as another one"),
        pytest.param("gs://b/1.jpg", "gs://b/*.jpg", True, id="a name and a pattern"),
        pytest.param("gs://b/1.png", "gs://b/*.jpg", True, id="a name, which may be a folder's"),
        pytest.param("gs://b/*/cam1", "gs://b/x/cam1/2.jpg", True, id="folders by a pattern"),
        pytest.param("list.txt", "./list.txt", True, id="the same file, written in two ways"),
        pytest.param("tests/", f"{os.getcwd()}/tests/storage/*", True, id="a local folder"),
        pytest.param("tests", "models", False, id="two local folders"),
        pytest.param(EVERYTHING, "gs://b/raw/2026/**", True, id="everything"),
        pytest.param(EVERYTHING, "/a.jpg", True, id="everything, local"),
        pytest.param("/", "//tmp/**", True, id="the root, and two slashes"),
    ],
)
def test_two_patterns_share_images_or_not(one, other, expected):
    assert claim(one).shares(claim(other)) is expected
    assert claim(other).shares(claim(one)) is expected


def test_ranges_of_days_share_images_where_they_share_a_day():
    days = [f"gs://b/{day:02d}/**" for day in range(1, 31)]
    assert claim(*days[:7]).shares(claim(*days[6:13]))
    assert not claim(*days[:7]).shares(claim(*days[7:14]))


def test_of_many_patterns_the_claim_is_short_and_on_no_less():
    many = claim(*(f"gs://b/2026/{number:04d}/**" for number in range(5000)))
    assert many.patterns == ("gs://b/2026/**",)
    assert many.shares(claim("gs://b/2026/4999/1.jpg"))


PARTS = st.sampled_from(["a", "b", "ab", "1", "*", "**", "?", "[ab]", "[!a]", ".jpg", "/", "/"])
NAMES = st.text(alphabet="ab1./jpg", min_size=1, max_size=8)


def names(pattern: str, name: str) -> bool:
    return to_regex(pattern).fullmatch(name) is not None or name.startswith(f"{pattern}/")


@given(st.lists(PARTS, min_size=1, max_size=5), st.lists(PARTS, min_size=1, max_size=5), NAMES)
def test_no_image_is_named_by_two_claims_that_share_none(one, other, name):
    """Whatever the patterns are, and where one names a folder also what lies in it."""
    patterns = [f"gs://b/x{''.join(parts)}".rstrip("/") for parts in (one, other)]
    if all(names(pattern, f"gs://b/x{name}") for pattern in patterns):
        assert claim(patterns[0]).shares(claim(patterns[1]))


@given(st.text(alphabet=string.ascii_letters + "é/*\udcff", min_size=1, max_size=9))
def test_a_claim_is_the_same_after_it_was_written(pattern):
    made = claim(pattern)
    assert Claim.from_json(made.to_json()) == made


def test_a_process_is_known_dead_once_it_ended_and_only_on_its_own_machine():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, claim("x").to_json())
        os._exit(0)
    os.waitpid(child, 0)
    dead = Claim.from_json(os.read(reading, 65536))
    os.close(reading)
    os.close(writing)
    assert dead.is_known_dead()
    assert not claim("x").is_known_dead()
    elsewhere = Claim(**{**vars_of(dead), "life": f"x{dead.life}"})
    assert not elsewhere.is_known_dead()
    assert not Claim(**{**vars_of(dead), "life": ""}).is_known_dead()


def vars_of(made: Claim) -> dict:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}
