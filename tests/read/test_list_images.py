"""What an input names: each pattern, folder and manifest gives what a user means by it, or one clear error."""

import json
import os

import pytest

from pipeline.errors import InputError
from pipeline.read.list_images import check_inputs, list_images
from pipeline.read.manifests import is_manifest
from pipeline.records import DeadLetter, ImageRef, dead_letter_row

TREE = [
    "a.jpg",
    "b.PNG",
    "photo[1].jpg",
    "photo1.jpg",
    "star*.jpg",
    "ä b,c.jpg",
    "in/a.jpg",
    "in/deep/a.jpg",
    ".hidden.jpg",
    ".cache/a.jpg",
    "set [2]/a.jpg",
    "out/samples/a.jpg",
]
SEEN = sorted(name for name in TREE if not name.startswith("."))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(pattern, **options):
    return [os.path.relpath(ref.uri) for ref in list_images(pattern, **options)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.jpg", ["a.jpg"]),
        ("photo[1].jpg", ["photo[1].jpg"]),
        ("star*.jpg", ["star*.jpg"]),
        ("photo[0-9].jpg", ["photo1.jpg"]),
        ("photo*.jpg", ["photo1.jpg", "photo[1].jpg"]),
        ("?.jpg", ["a.jpg"]),
        ("in", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/", ["in/a.jpg", "in/deep/a.jpg"]),
        ("./in/", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/*", ["in/a.jpg"]),
        ("in/**", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/**/a.jpg", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/**/deep/**/*.jpg", ["in/deep/a.jpg"]),
        ("**/deep/*.jpg", ["in/deep/a.jpg"]),
        ("set [2]", ["set [2]/a.jpg"]),
        (".", SEEN),
        ("./", SEEN),
        ("*.gif", []),
        ("absent.jpg", []),
    ],
)
def test_patterns_mean_what_a_user_means(tree, pattern, names):
    assert listed(pattern) == names
    if pattern not in (".", "./"):
        assert listed(f"{tree}/{pattern}") == names
    if names:
        check_inputs({pattern: [pattern]})


def test_the_size_is_known_from_listing(tree):
    assert [ref.size_bytes for ref in list_images("in")] == [8, 13]


@pytest.mark.parametrize("exclude", ["out", "./out", "out/", "absolute"])
@pytest.mark.parametrize("pattern", [".", "**/*.jpg", "absolute"])
def test_the_jobs_own_output_is_no_input_however_it_is_written(tree, pattern, exclude):
    names = listed(
        str(tree) if pattern == "absolute" else pattern, exclude=str(tree / "out") if exclude == "absolute" else exclude
    )
    assert "out/samples/a.jpg" not in names
    assert "in/deep/a.jpg" in names


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        pytest.param("m.txt", "", [], id="empty"),
        pytest.param("m.txt", "a.jpg\n\n# no.jpg\n  in/a.jpg  \r\nabsent.jpg", ["a.jpg", "in/a.jpg", "absent.jpg"], id="txt"),
        pytest.param("m.txt", "\ufeffa.jpg\n", ["a.jpg"], id="byte order mark"),
        pytest.param(
            "M.TXT", "photo[1].jpg\nstar*.jpg\nä b,c.jpg\n", ["photo[1].jpg", "star*.jpg", "ä b,c.jpg"], id="names are no globs"
        ),
        pytest.param("m[1].txt", "a.jpg\n", ["a.jpg"], id="manifest whose name looks like a glob"),
        pytest.param("m?.txt", "a.jpg\n", ["a.jpg"], id="so too"),
        pytest.param("m.csv", "a.jpg,1\n\nin/a.jpg,2\n", ["a.jpg", "in/a.jpg"], id="csv without a header"),
        pytest.param("m.csv", '\ufeffid, URI \n1,"ä b,c.jpg"\n2\n3,\n', ["ä b,c.jpg"], id="csv with a header"),
        pytest.param("m.csv", "path,uri\nno,a.jpg\n", ["a.jpg"], id="csv prefers uri"),
        pytest.param(
            "m.jsonl", '"a.jpg"\n\n{"uri": "in/a.jpg"}\n{"path": "b.PNG"}\n', ["a.jpg", "in/a.jpg", "b.PNG"], id="jsonl"
        ),
        pytest.param(
            "dead.jsonl",
            '{"image": {"uri": "a.jpg", "generation": "1"}, "stage": "read", "reason": "x", "message": "y"}\n',
            ["a.jpg"],
            id="dead letters to try again",
        ),
        pytest.param("deep.txt", "gs://b/x.jpg\n/abs/y.jpg\n", ["gs://b/x.jpg", "/abs/y.jpg"], id="uris and absolute paths"),
    ],
)
def test_manifests_are_lists_of_images(tree, name, text, names):
    (tree / name).write_text(text, encoding="utf-8")
    assert is_manifest(name)
    assert [ref.uri for ref in list_images(name)] == names
    check_inputs({name: [name]})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        pytest.param("m.txt", "a.jpg\n", [{}], id="txt"),
        pytest.param("m.csv", "a.jpg,7\n", [{}], id="csv without a header"),
        pytest.param(
            "m.csv",
            'Camera, uri ,path,,empty\n7,a.jpg,p,x,\n"8, rear",b.PNG\n9,star*.jpg,,,,much,more\n',
            [{"Camera": "7", "path": "p"}, {"Camera": "8, rear"}, {"Camera": "9"}],
            id="csv",
        ),
        pytest.param(
            "m.jsonl",
            '{"uri": "a.jpg", "generation": "1", "camera": 7, "tags": ["x"], "message": "m"}\n"a.jpg"\n'
            '{"image": "b.PNG", "camera": 8, "extra": "more"}\n{"path": "a.jpg", "camera": 9, "extra": {"camera": 10}}\n',
            [{"camera": 7, "tags": ["x"], "message": "m"}, {}, {"camera": 8, "extra": "more"}, {"camera": 10}],
            id="jsonl",
        ),
        pytest.param(
            "dead.jsonl",
            '{"image": {"uri": "a.jpg"}, "stage": "read", "reason": "x", "message": "y", "extra": {"camera": 7, "...": 2}}\n',
            [{"camera": 7, "...": 2}],
            id="rows of an earlier run",
        ),
        pytest.param("m.jsonl", json.dumps({"uri": "a.jpg", "notes": "x" * 5000}), [{"...": 1}], id="too large"),
    ],
)
def test_what_a_manifest_says_beyond_names_travels_with_the_image(tree, name, text, said):
    (tree / name).write_text(text, encoding="utf-8")
    assert [json.loads(ref.extra or "{}") for ref in list_images(name)] == said


def test_a_manifests_relative_paths_may_be_relative_to_itself(tree, monkeypatch):
    (tree / "in" / "m.txt").write_text("deep/a.jpg\nabsent.jpg\n")
    assert [ref.uri for ref in list_images("in/m.txt")] == ["in/deep/a.jpg", "absent.jpg"]
    (tree / "deep").mkdir()
    (tree / "deep" / "a.jpg").touch()  # the current folder comes first
    assert [ref.uri for ref in list_images("in/m.txt")] == ["deep/a.jpg", "absent.jpg"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.txt", b"\xff\xfe", "manifest m.txt: expected UTF-8 text with one URI a line"),
        ("m.csv", b"x" * 200_000, "manifest m.csv: expected UTF-8 text with one URI a line"),
        ("m.jsonl", b'"a.jpg"\nb.jpg\n', "manifest m.jsonl, line 2: expected JSON, got 'b.jpg'"),
        ("m.jsonl", b"{}", "manifest m.jsonl, line 1: expected a URI as a text"),
        ("m.jsonl", b'{"image": {"uri": 5}}', "manifest m.jsonl, line 1: expected a URI as a text"),
        ("m.jsonl", b"[" * 100_000, "manifest m.jsonl, line 1: expected JSON"),
        ("m.jsonl", b"[1]", "manifest m.jsonl, line 1: expected a URI as a text"),
    ],
)
def test_a_manifest_that_is_none_is_one_clear_error(tree, name, content, message):
    (tree / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(list_images(name))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([], "no input: expected --input"),
        (["a.jpg", "absent/*.jpg"], "input absent/*.jpg: no file matches"),
        (["empty"], "input empty: no file matches"),
        (["absent.txt"], "input absent.txt: no file matches"),
        (["nosuchscheme://x/y"], "input nosuchscheme://x/y: cannot be listed"),
    ],
)
def test_an_input_that_names_nothing_is_one_clear_error(tree, patterns, message):
    (tree / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        check_inputs({pattern: [pattern] for pattern in patterns})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 500])
def test_of_an_inputs_days_one_must_have_an_image(tree, number):
    patterns = [f"in/{day}/**" for day in range(number)]
    with pytest.raises(InputError) as caught:
        check_inputs({"a.jpg": ["a.jpg"], "in/{date:%d}/**": patterns})
    of_days = "" if number == 1 else f" on any of {number} days or hours"
    assert str(caught.value).startswith(f"input in/{{date:%d}}/**: no file matches{of_days}; check the path")
    check_inputs({"in/{date:%d}/**": patterns}, allow_empty=True)
    (tree / "in" / str(number // 2)).mkdir()
    (tree / "in" / str(number // 2) / "a.jpg").touch()
    check_inputs({"in/{date:%d}/**": patterns})


def test_dead_letters_written_as_rows_are_a_manifest(tree):
    letters = [
        DeadLetter(ImageRef("a.jpg", "1"), "read", "not_found", "x"),
        DeadLetter(ImageRef("ä b,c.jpg", extra='{"camera": "ä"}'), "decode", "empty", "y"),
    ]
    (tree / "dead.jsonl").write_text("".join(json.dumps(dead_letter_row(letter)) + "\n" for letter in letters))
    assert list(list_images("dead.jsonl")) == [ImageRef("a.jpg"), ImageRef("ä b,c.jpg", extra='{"camera": "ä"}')]
