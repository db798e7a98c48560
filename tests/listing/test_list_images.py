"""What an input names: each pattern, folder and manifest gives what a user means by it, or one clear error."""

import errno
import gzip
import json
import os
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from requests import Session

from pipeline.errors import InputError
from pipeline.failures import MAY_PASS
from pipeline.listing.list_images import check_inputs, list_images
from pipeline.listing.manifests import is_manifest, read_manifest
from pipeline.records import DeadLetter, ImageRef, dead_letter_row, row_bytes
from tests.memory import less_memory_than

TREE = [
    *("a.jpg", "b.PNG", "photo[1].jpg", "photo1.jpg", "star*.jpg", "ä b,c.jpg", "in/a.jpg", "in/deep/a.jpg"),
    *(".hidden.jpg", ".cache/a.jpg", "set [2]/a.jpg", "out/samples/001-a.jpg", "out/samples/a.jpg", "out/detections/b.jpg"),
    *("out/coco/images.json", "out/report.html", "out/summary.json", "out/.staging-0123456789ab/samples/a.jpg"),
]
SEEN = sorted(name for name in TREE if "/." not in f"/{name}" and name.endswith(("jpg", "PNG")))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def from_here(ref):
    """Its name, without the current folder."""
    return (ref.ref if isinstance(ref, DeadLetter) else ref).uri.removeprefix(f"{os.getcwd()}/")


def listed(pattern, **options):
    return sorted(map(from_here, list_images([pattern], **options)))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.jpg", ["a.jpg"]),
        ("photo[1].jpg", ["photo[1].jpg"]),
        ("star*.jpg", ["star*.jpg"]),
        ("photo[0-9].jpg", ["photo1.jpg"]),
        ("photo*.jpg", ["photo1.jpg", "photo[1].jpg"]),
        ("in", ["in/a.jpg", "in/deep/a.jpg"]),
        ("./in/", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/*", ["in/a.jpg"]),
        ("in/**/a.jpg", ["in/a.jpg", "in/deep/a.jpg"]),
        ("set [2]", ["set [2]/a.jpg"]),
        (".", SEEN),
        ("./", SEEN),
        ("absent.jpg", []),
    ],
)
def test_patterns_mean_what_a_user_means(tree, pattern, names):
    assert listed(pattern) == names
    if pattern not in (".", "./"):
        assert listed(f"{tree}/{pattern}") == names
    if names:
        check_inputs({pattern: [pattern]})


@pytest.mark.parametrize("pattern", ["", "**/*.jpg", "*/*/*.jpg"])
@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EIO, "unreadable"), (errno.ESTALE, "storage_unavailable"), (errno.EACCES, "permission_denied")],
    ids=["EIO", "ESTALE", "EACCES"],
)
def test_a_folder_that_cannot_be_listed_may_be_another_time_and_the_others_are(tmp_path, pattern, number, reason, monkeypatch):
    for name in ("bad/in/a.jpg", "good/in/a.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    scandir = os.scandir

    def failing(folder):
        if str(folder).rstrip("/") == f"{tmp_path}/bad":
            raise OSError(number, os.strerror(number))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    bad, good = sorted(list_images([f"{tmp_path}/{pattern}"]), key=lambda ref: isinstance(ref, ImageRef))
    assert (bad.ref.uri, bad.reason, bad.reason in MAY_PASS) == (f"{tmp_path}/bad", reason, True)
    assert good.uri == f"{tmp_path}/good/in/a.jpg"


def test_a_local_image_has_one_name_however_it_is_written(tree):
    """Else a manifest's row of it and a folder's would be of two images."""
    (tree / "link").symlink_to("in/deep")
    ways = ["in/deep/a.jpg", "./in//deep/a.jpg", "in/x/../deep/a.jpg", "link/a.jpg", f"{tree}/link/../deep/a.jpg", "link/*"]
    ways += [f"{tree}/in/deep/a.jpg", "in/deep", "link", "**/deep/a.jpg"]
    (tree / "in" / "x").mkdir()
    lines = [*(way for way in ways if way.endswith(".jpg") and "*" not in way), f"file://{tree}/in/deep/a.jpg"]
    (tree / "list.txt").write_text("\n".join(lines))
    names = [ref.uri for pattern in (*ways, "list.txt") for ref in list_images([pattern])]
    assert names == [f"{tree}/in/deep/a.jpg"] * (len(ways) + len(lines))


def test_a_link_to_an_image_keeps_its_own_name(tree):
    """As data version control makes them: what it leads to is named by a hash."""
    (tree / "in" / "photo.jpg").symlink_to("../.cache/a.jpg")
    assert listed("in/photo.jpg") == ["in/photo.jpg"]
    assert "in/photo.jpg" in listed("in")


@pytest.mark.parametrize("exclude", ["out", "./out", "out/", "absolute"])
@pytest.mark.parametrize("pattern", [".", "**/*.jpg", "absolute"])
def test_the_jobs_own_output_is_no_input_however_it_is_written(tree, pattern, exclude):
    exclude = str(tree / "out") if exclude == "absolute" else exclude
    names = listed(str(tree) if pattern == "absolute" else pattern, exclude=exclude)
    assert [name for name in names if name.startswith("out/")] == ["out/detections/b.jpg", "out/samples/a.jpg"]
    assert "in/deep/a.jpg" in names


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        pytest.param("m.txt", "", [], id="empty"),
        pytest.param("m.txt", "a.jpg\n\n# no.jpg\n  in/a.jpg  \r\nabsent.jpg", ["a.jpg", "in/a.jpg", "absent.jpg"], id="txt"),
        pytest.param("m.txt", "\ufeffa.jpg\n", ["a.jpg"], id="byte order mark"),
        pytest.param("M.TXT", "photo[1].jpg\nstar*.jpg\n", ["photo[1].jpg", "star*.jpg"], id="names are no globs"),
        pytest.param("m[1]?.txt", "a.jpg\n", ["a.jpg"], id="manifest whose name looks like a glob"),
        pytest.param("m.csv", "a.jpg,1\n\nin/a.jpg,2\n", ["a.jpg", "in/a.jpg"], id="csv without a header"),
        pytest.param("m.csv", '\ufeffid, URI \n1,"ä b,c.jpg"\n', [("ä b,c.jpg", {"id": "1"})], id="csv with a header"),
        pytest.param("m.csv", "path,uri\nno,a.jpg\n", [("a.jpg", {"path": "no"})], id="csv prefers uri"),
        pytest.param("m.csv", "Photo,Label\na.jpg,cat\n", [("a.jpg", {"Label": "cat"})], id="csv with a header of other names"),
        pytest.param("m.csv", "id;no,where\n1,gs://b/x\n", [("gs://b/x", {"id;no": "1"})], id="so too, in another column"),
        pytest.param("m.csv", "id,where\n1,in\n2,m.csv\n", ["id", "1", "2"], id="csv where nothing looks like an image"),
        pytest.param("m.csv", "1,a.jpg\n2,b.PNG\n", ["a.jpg", "b.PNG"], id="csv without a header, in the second column"),
        pytest.param("m.csv", "set/one\na.jpg\n", ["set/one", "a.jpg"], id="a path without an ending is no header"),
        pytest.param("m.csv", "uri\n", [], id="csv of a header alone"),
        pytest.param("m.csv", "\n,\n\n a.jpg ,1\n", ["a.jpg"], id="csv that begins with empty rows"),
        pytest.param("m.jsonl", '"a.jpg"\n\n{"uri": "in/a.jpg"}\n{"path": "x"}\n', ["a.jpg", "in/a.jpg", "x"], id="jsonl"),
        pytest.param(
            "m.csv",
            'Camera, uri ,path,,empty\n7,a.jpg,p,x,\n"8, rear",b.PNG\n9,star*.jpg,,,,much,more\n',
            [("a.jpg", {"Camera": "7", "path": "p"}), ("b.PNG", {"Camera": "8, rear"}), ("star*.jpg", {"Camera": "9"})],
            id="what a csv says beyond names travels with the image",
        ),
        pytest.param(
            "m.jsonl",
            '{"uri": "a.jpg", "generation": "1", "camera": 7, "tags": ["x"]}\n'
            '{"image": "b.PNG", "camera": 8, "extra": "more"}\n{"path": "c.jpg", "camera": 9, "extra": {"camera": 10}}\n',
            [("a.jpg", {"camera": 7, "tags": ["x"]}), ("b.PNG", {"camera": 8, "extra": "more"}), ("c.jpg", {"camera": 10})],
            id="as does what a jsonl says",
        ),
        pytest.param("m.jsonl", json.dumps({"uri": "x", "n": "x" * 5000}), [("x", {"...": 1})], id="unless it is too large"),
        pytest.param("deep.txt", "gs://b/x.jpg\n/abs/y.jpg\n", ["gs://b/x.jpg", "/abs/y.jpg"], id="uris and absolute paths"),
    ],
)
def test_manifests_are_lists_of_images(tree, name, text, names):
    (tree / "m.txt").touch()
    (tree / name).write_text(text, encoding="utf-8")
    assert is_manifest(name)
    known = [each if isinstance(each, tuple) else (each, {}) for each in names]
    assert [(from_here(ref), json.loads(ref.extra or "{}")) for ref in list_images([name])] == known
    check_inputs({name: [name]})


def test_a_manifests_relative_paths_may_be_relative_to_itself(tree, monkeypatch):
    for name in ("a.zip", "clip.mp4"):
        (tree / "in" / name).touch()
    (tree / "in" / "m.txt").write_text("deep/a.jpg\nabsent.jpg\na.zip#b.png\nclip.mp4#t=0.48\n")
    parts = ["in/a.zip#b.png", "in/clip.mp4#t=0.48"]
    assert [from_here(ref) for ref in list_images(["in/m.txt"])] == ["in/deep/a.jpg", "absent.jpg", *parts]
    (tree / "deep").mkdir()
    (tree / "deep" / "a.jpg").touch()  # the current folder comes first
    assert [from_here(ref) for ref in list_images(["in/m.txt"])] == ["deep/a.jpg", "absent.jpg", *parts]


@pytest.mark.parametrize(
    ("name", "content", "images", "bad"),
    [
        ("m.txt", b"\xff\xfe", [], {1: r"expected UTF-8 text, got b'\xff\xfe'"}),
        ("m.txt", b"a.jpg\n\xff.jpg\n\nin/a.jpg", ["a.jpg", "in/a.jpg"], {2: r"expected UTF-8 text, got b'\xff.jpg\n'"}),
        ("m.txt", b"a.jpg\n" + b"x" * 5_000_000 + b"\nb.PNG", ["a.jpg", "b.PNG"], {2: "expected at most 1048576 characters"}),
        ("m.csv", b"uri,n\n\xff.jpg,1\na.jpg,2\n", ["a.jpg"], {2: r"expected UTF-8 text, got b'\xff.jpg,1\n'"}),
        ("m.csv", b"uri,n\na.jpg," + b"x" * 200_000 + b"\nb.PNG,2\n", ["b.PNG"], {2: "expected CSV: field larger"}),
        ("m.csv", b"uri\n" + b"x" * 5_000_000 + b"\nb.PNG\n", ["b.PNG"], {2: "expected at most 1048576 characters"}),
        ("m.jsonl", b'"a.jpg"\nb.jpg\n"b.PNG"', ["a.jpg", "b.PNG"], {2: "expected JSON, got 'b.jpg'"}),
        ("m.jsonl", b'{"image": {"uri": 5}}', [], {1: "expected a URI as a text"}),
        ("m.jsonl", b'{"image": {}, "payload_base64": "e30="}', [], {1: "a dead letter that carries its message"}),
        ("m.jsonl", b"[" * 100_000, [], {1: "expected JSON"}),
        ("m.jsonl", b"[1]", [], {1: "expected a URI as a text"}),
    ],
)
def test_a_line_that_names_no_image_is_one_dead_letter_and_the_others_are_read(tree, name, content, images, bad):
    """It is the same each time, so that it is known when it is met again."""
    (tree / name).write_bytes(content)
    found = list(list_images([name]))
    assert [from_here(ref) for ref in found if isinstance(ref, ImageRef)] == images
    letters = [letter for letter in found if isinstance(letter, DeadLetter)]
    assert [letter.ref.uri for letter in letters] == [f"{tree}/{name}:{number}" for number in bad]
    for letter, said in zip(letters, bad.values(), strict=True):
        assert letter.message.startswith(f"{letter.ref.uri}: {said}")
        assert len(letter.message) < 500 and len(letter.message.splitlines()) == 1
        assert json.loads(row_bytes(dead_letter_row(letter)))["reason"] == "bad_line"
    assert found == list(list_images([name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("m.jsonl", b"[" + b"[]," * 4_000_000 + b"[]]\n", id="one line of many parts"),
        pytest.param("m.jsonl", b'"' + b"x" * 30_000_000, id="one long text"),
        pytest.param("m.csv", b"x" * 30_000_000, id="one long cell"),
        pytest.param("m.txt", b'"\xff\n' * 50_000, id="many lines that are no text", marks=pytest.mark.matrix),
    ],
)
def test_no_manifest_takes_more_memory_than_a_line_of_it(tree, name, content):
    """Named, or found in a folder and perhaps none at all."""
    (tree / "set").mkdir()
    (tree / "set" / name).write_bytes(content)
    for pattern in (f"set/{name}", "set"):
        with less_memory_than(60_000_000):
            assert sum(1 for _ in list_images([pattern])) <= 50_000


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([], "no input: expected --input"),
        (["a.jpg", "absent/*.jpg"], "input absent/*.jpg: no file matches"),
        (["empty"], "input empty: no file matches"),
        (["absent.txt"], "input absent.txt: no file matches"),
        (["projects/p/subscriptions/s"], "input projects/p/subscriptions/s: no file; a subscription is read in --mode streaming"),
        (["rtsp://camera/1"], "input rtsp://camera/1: cannot be listed"),
        (["hdfs://b/*.jpg"], "input hdfs://b/*.jpg: cannot be listed: expected files on this machine, gs://bucket/name, s3:"),
    ],
)
def test_an_input_that_names_nothing_is_one_clear_error(tree, patterns, message):
    (tree / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        check_inputs({pattern: [pattern] for pattern in patterns})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_of_an_inputs_days_one_must_have_an_image(tree):
    days = {"in/{date:%d}/**": [f"in/{day}/**" for day in range(500)]}
    with pytest.raises(InputError, match=r"^input in/\{date:%d\}/\*\*: no file matches on any of 500 days; check the path"):
        check_inputs({"a.jpg": ["a.jpg"], **days})
    check_inputs(days, allow_empty=True)
    (tree / "in" / "250").mkdir()
    (tree / "in" / "250" / "a.jpg").touch()
    check_inputs(days)


def test_dead_letters_written_as_rows_are_a_manifest(tree):
    letters = [
        DeadLetter(ImageRef("a.jpg", "1"), "read", "not_found", "x"),
        DeadLetter(ImageRef("ä b,\udcff.jpg", extra='{"camera": "ä"}'), "decode", "empty", "y"),
        DeadLetter(ImageRef("x.png", "2", record="a.tfrecord@0-10"), "decode", "empty", "z"),
    ]
    (tree / "dead.jsonl").write_text("".join(json.dumps(dead_letter_row(letter)) + "\n" for letter in letters))
    assert list(list_images(["dead.jsonl"])) == [
        ImageRef(f"{tree}/a.jpg"),
        ImageRef(f"{tree}/ä b,\udcff.jpg", extra='{"camera": "ä"}'),
        ImageRef(f"{tree}/a.tfrecord@0-10"),
    ]


def test_what_begins_like_an_image_is_one_whatever_its_name(tree):
    heads = [b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"II*\0", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x20ftypavif", b"P6\n"]
    heads += [b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", b"\0\0\0\x0cjP  \r\n\x87\n"]
    (tree / "set").mkdir()
    for number, head in enumerate(heads):
        (tree / "set" / f"{number}").write_bytes(head + bytes(50))
    assert listed("set") == [f"set/{number}" for number in range(len(heads))]


@pytest.mark.parametrize(
    "content", [b"", b'{"uri": "a.jpg"}', b"\0\0\0\x18ftypmp42\0\0\0\0isomavc1", b"RIFF\0\0\0\0WAVE", b"P", b"B"]
)
def test_what_neither_ends_nor_begins_like_an_image_is_left_out_unless_it_is_named(tree, content):
    """A movie is told from a photo of the same container; a list in a folder is not read."""
    (tree / "set").mkdir()
    (tree / "set" / "a[1].3gp").write_bytes(content)
    left_out = []
    assert list(list_images(["set"], leave_out=left_out.append)) == list(list_images(["set/*.3gp"])) == []
    assert left_out == [".3gp"]
    assert listed("set/a[1].3gp") == listed(f"{tree}/set/a[1].3gp") == ["set/a[1].3gp"]


def test_of_a_large_object_that_is_no_image_just_a_few_bytes_are_read(gcs_bucket, monkeypatch):
    """On object storage a read is a request, and what it fetches is paid for."""
    gcs_bucket.blob("in/a.3gp").upload_from_string(b"\0\0\0\x14ftypqt  " + b"x" * 1000)
    gcs_bucket.blob("in/photo").upload_from_string(b"\xff\xd8\xff" + b"x" * 1000)
    gcs_bucket.blob("in/empty").upload_from_string(b"")
    gcs_bucket.blob("in/a.jpg").upload_from_string(b"x")
    read, send = [], Session.send

    def note(self, request, **how):
        if "alt=media" in request.url:
            read.append((urlsplit(request.url).path.rpartition("/")[2], request.headers["range"]))
        return send(self, request, **how)

    monkeypatch.setattr(Session, "send", note)
    names = [ref.uri for ref in list_images([f"gs://{gcs_bucket.name}/in/"])]
    assert sorted(names) == [f"gs://{gcs_bucket.name}/in/a.jpg", f"gs://{gcs_bucket.name}/in/photo"]
    assert sorted(read) == [("in%2Fa.3gp", "bytes=0-31"), ("in%2Fphoto", "bytes=0-31")]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        pytest.param("**/*.jpg", ["set/a.jpg"], id="a glob"),
        pytest.param("set", ["set/a.jpg"], id="the folder above"),
        pytest.param("set/run1", [], id="the results themselves"),
        pytest.param("set/run1/samples", ["set/run1/samples/001-a.jpg"], id="a part of them"),
        pytest.param("set/run1/*/001-*.jpg", [], id="a part of them, by a pattern"),
        pytest.param("set/run1/samples/001-a.jpg", ["set/run1/samples/001-a.jpg"], id="one of them"),
        pytest.param("link", ["set/a.jpg"], id="by a link"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_a_run_wrote_below_an_input_is_none_of_it(tmp_path, monkeypatch, pattern, names, ending):
    """Unless it is named on purpose."""
    monkeypatch.chdir(tmp_path)
    shard = f"20261121T020000Z-3f2a9c01-{1:032x}"
    own = [f"dead_letters/{shard}.jsonl", f"detections/{shard}.{ending}", "samples/001-a.jpg", "summary.json"]
    own += ["runs/1/samples/001-b.jpg", "exports/crops/c.jpg", ".staging-0123456789ab/d.jpg"]
    for name in ["set/a.jpg", *(f"set/run1/{name}" for name in own)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b'{"uri": "again.jpg"}')
    (tmp_path / "link").symlink_to("set")
    assert listed(pattern) == names


def test_relative_names_of_a_manifest_below_an_empty_folder_keep_its_name(gcs_bucket):
    """`a//b` and `a/b` are two objects."""
    gcs_bucket.blob("a//list.txt").upload_from_string("b.jpg\n")
    assert [ref.uri for ref in list_images([f"gs://{gcs_bucket.name}/a//list.txt"])] == [f"gs://{gcs_bucket.name}/a//b.jpg"]


def test_a_folder_of_object_storage_needs_no_slash(gcs_bucket):
    """It is taken for one where there is no object of that name; one that there is comes first."""
    for name in ("folder/a.jpg", "folder/.hidden.jpg", "folder2/c.jpg", "object", "object/d.jpg"):
        gcs_bucket.blob(name).upload_from_string(b"x")
    bucket = f"gs://{gcs_bucket.name}"
    for place, names in {"folder": ["folder/a.jpg"], "folder/": ["folder/a.jpg"], "object": ["object"]}.items():
        assert [ref.uri for ref in list_images([f"{bucket}/{place}"])] == [f"{bucket}/{name}" for name in names]
        check_inputs({place: (f"{bucket}/{place}",)})
    with pytest.raises(InputError, match="no file matches"):
        check_inputs({"f": (f"{bucket}/fol",)})


def test_what_cannot_be_read_in_the_middle_of_a_job_is_one_clear_error(tree):
    with pytest.raises(InputError, match=r"^input nosuchscheme://x/y: cannot be listed: "):
        list(list_images(["nosuchscheme://x/y"]))
    (tree / "m.txt").symlink_to("m.txt")
    with pytest.raises(InputError, match=r"^manifest m.txt cannot be read: "):
        list(read_manifest("m.txt"))


def test_every_link_is_an_image_a_dead_letter_or_is_counted(tmp_path):
    """Dangling (an unmounted disk, git-annex, DVC), in a circle, back to a folder above; a sidecar that dangles is none."""
    folder = tmp_path / "above" / "in"
    folder.mkdir(parents=True)
    (folder / "a.jpg").write_bytes(b"x")
    (folder.parent / "not-asked-for.jpg").write_bytes(b"x")
    for name, target in (("gone.jpg", "/no/disk/b.jpg"), ("gone.txt", "/no/disk/b.txt"), ("x.jpg", "y.jpg"), ("y.jpg", "x.jpg")):
        (folder / name).symlink_to(target)
    (folder / "loop").symlink_to(".")
    (folder / "up").symlink_to("..")
    for pattern in (folder, f"{folder}/**", f"{folder}/*"):
        kinds = []
        found = [ref.uri for ref in list_images([str(pattern)], leave_out=kinds.append)]
        assert sorted(found) == [f"{folder}/{name}" for name in ("a.jpg", "gone.jpg", "x.jpg", "y.jpg")]
        assert sorted(kinds) == ([".txt"] if str(pattern).endswith("/*") else [".txt", "link to a folder above"])


@pytest.mark.parametrize(
    ("text", "images", "bad"),
    [
        ("uri,n\na.jpg,1\n,2\n\n,,\nb.jpg\n", ["a.jpg", "b.jpg"], {3: "expected a URI in column 1 (uri)"}),
        ("n,uri\n1,a.jpg\n2\n3,b.jpg\n", ["a.jpg", "b.jpg"], {3: "expected a URI in column 2 (uri)"}),
        (
            'uri,n\na.jpg,"5 inch\nb.jpg,2\nc.jpg,"3"\nd.jpg,4\n',
            ["b.jpg", "c.jpg", "d.jpg"],
            {2: "expected the end of a quoted cell"},
        ),
        ('uri,n\na.jpg,1\n"b.jpg,2\nc.jpg,3\nd.jpg,4\n', ["a.jpg", "c.jpg", "d.jpg"], {3: "expected the end of a quoted cell"}),
        ('uri\n"a.jpg\nb\nc\n', ["b", "c"], {2: "expected the end of a quoted cell"}),
        ('uri,said\na.jpg,"two\nlines, of b.jpg"\nb.jpg,"x\n\ny"\n', ["a.jpg", "b.jpg"], {}),
        ('uri,n\na.jpg,"' + "x.jpg,1\n" * 30_000, ["x.jpg"] * 29_999, {2: "expected"}),
        ("uri,n\n" + 'x/b.jpg","\n' * 40_000, ['b.jpg"'] * 39_999, {2: "expected the end of a quoted cell"}),
    ],
    ids=["no uri", "short", "a stray quote", "before the uri", "of one column", "of several lines", "to the end", "each"],
)
def test_each_row_of_a_csv_file_is_an_image_or_one_dead_letter(tmp_path, text, images, bad):
    (tmp_path / "m.csv").write_text(text)
    found = list(read_manifest(f"{tmp_path}/m.csv"))
    assert [os.path.basename(ref.uri) for ref in found if isinstance(ref, ImageRef)] == images
    letters = {int(each.ref.uri.rpartition(":")[2]): each.message for each in found if isinstance(each, DeadLetter)}
    assert {*letters} == {*bad}
    for number, said in bad.items():
        assert letters[number].startswith(f"{tmp_path}/m.csv:{number}: {said}")


INSIGHTS = "project,bucket,name,size,etag,generation\np,b,in/ä b.jpg,12,CJ=,171\np,b,c.jpg,13,CK=,172\n"
INVENTORY = {
    "bucket": ["b", "b"],
    "key": ["in/ä b.jpg", "c.jpg"],
    "size": [12, 13],
    "e_tag": ["171", '"172"'],
    "is_latest": [True, True],
}


@pytest.mark.parametrize(
    ("name", "content", "scheme", "extra"),
    [
        ("m.csv", INSIGHTS.encode(), "gs://", ""),
        (
            "m.csv",
            "uri,generation,size,camera\ns3://b/in/ä b.jpg,171,12,7\ns3://b/c.jpg,172,13,7\n".encode(),
            "s3://",
            '{"camera": "7"}',
        ),
        ("m.csv", "uri,ETag\nabfs://b/in/ä b.jpg,171\nabfs://b/c.jpg,172\n".encode(), "abfs://", ""),
        (
            "m.jsonl",
            '{"uri": "gs://b/in/ä b.jpg", "generation": "171"}\n{"uri": "gs://b/c.jpg", "generation": 172}'.encode(),
            "gs://",
            "",
        ),
        ("m.parquet", INVENTORY, "s3://", ""),
        ("m.parquet", {"uri": ["gs://b/in/ä b.jpg", "gs://b/c.jpg"], "generation": [171, 172]}, "gs://", ""),
    ],
    ids=["Storage Insights", "csv", "csv with etags", "jsonl", "S3 Inventory", "parquet"],
)
def test_the_generations_of_an_inventory_are_believed(tmp_path, name, content, scheme, extra):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(pa.table(content), path)
    found = list(list_images([str(path)]))
    assert [(ref.uri, ref.generation) for ref in found] == [(f"{scheme}b/in/ä b.jpg", "171"), (f"{scheme}b/c.jpg", "172")]
    assert {ref.extra for ref in found} == {extra}
    assert [ref.size_bytes for ref in found] in ([12, 13], [0, 0])
    assert bool(found[0].size_bytes) == ("size" in str(content))


@pytest.fixture
def s3_inventory(tmp_path, s3_bucket):
    """Makes an S3 Inventory as S3 writes it, in a bucket or a copy of it; gives its `manifest.json`."""

    def make(where, kind, schema, content, **more):
        ending = {"CSV": "csv.gz", "Parquet": "parquet"}.get(kind, "orc")
        files = [{"key": f"pre/b/all/data/0f-1.{ending}", "size": len(content), "MD5checksum": "0"}]
        described = {"sourceBucket": "b", "destinationBucket": "arn:aws:s3:::elsewhere", "fileFormat": kind, "fileSchema": schema}
        written = {
            f"pre/b/all/data/0f-1.{ending}": content,
            "pre/b/all/2026-11-28T01-00Z/manifest.json": json.dumps({**described, "files": files, **more}).encode(),
        }
        for name, each in written.items():
            if where == "bucket":
                s3_bucket.put_object(Key=name, Body=each)
            else:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes(each)
        return f"{f's3://{s3_bucket.name}' if where == 'bucket' else tmp_path}/pre/b/all/2026-11-28T01-00Z/manifest.json"

    return make


SCHEMA = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate, ETag"
OF_S3 = (
    b'"b","in/%C3%A4+b%2B.jpg","v1","true","false","12","2026-11-27T00:00:00.000Z","171"\n'
    b'"b","in/old.jpg","v1","false","false","12","2026-11-27T00:00:00.000Z","170"\n'
    b'"b","in/gone.jpg","v2","true","true","","2026-11-27T00:00:00.000Z",""\n'
    b'"b","a%0Ab.jpg","v1","true","false","1","2026-11-27T00:00:00.000Z","1"\n'
    b'"b","c.jpg","v1","true","false","13","2026-11-27T00:00:00.000Z","172"\n'
)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["bucket", "copy"])
def test_an_s3_inventory_as_csv_is_read_by_its_manifest(s3_inventory, where):
    """Its files have no header, and their keys are URL-encoded; older and deleted versions are left out."""
    manifest = s3_inventory(where, "CSV", SCHEMA, gzip.compress(OF_S3))
    first, bad, last = list_images([manifest])
    found = [(ref.uri, ref.generation, ref.size_bytes, ref.extra) for ref in (first, last)]
    assert found == [("s3://b/in/ä b+.jpg", "171", 12, ""), ("s3://b/c.jpg", "172", 13, "")]
    assert (bad.reason, bad.ref.uri.rpartition("/")[2]) == ("bad_line", "0f-1.csv.gz:4")
    with pytest.raises(InputError, match="is damaged"):
        list(list_images([s3_inventory(where, "CSV", SCHEMA, gzip.compress(OF_S3)[:-9])]))


@pytest.mark.slow
def test_an_s3_inventory_of_parquet_files_is_read_by_its_manifest_and_another_one_is_one_clear_error(s3_inventory, tmp_path):
    pq.write_table(pa.table(INVENTORY | {"is_latest": [True, False]}), tmp_path / "made.parquet")
    content = (tmp_path / "made.parquet").read_bytes()
    (ref,) = list_images([s3_inventory("copy", "Parquet", "message s3.inventory {}", content)])
    assert (ref.uri, ref.generation) == ("s3://b/in/ä b.jpg", "171")
    for wrong, said in [(("ORC", "struct<>", b""), "as CSV or Parquet, got 'ORC'"), (("CSV", 7, b""), "that of an S3 Inventory")]:
        with pytest.raises(InputError, match=said):
            list(list_images([s3_inventory("copy", *wrong)]))


def test_of_an_inventory_what_is_no_image_is_skipped_as_in_a_listing(tmp_path, s3_bucket):
    """It has all objects of its bucket, also folders and those that this program wrote."""
    bucket, run = s3_bucket.name, f"20261121T020000Z-0a1b-{'0' * 32}"
    s3_bucket.put_object(Key="seven", Body=b"\xff\xd8\xff\xe0")
    s3_bucket.put_object(Key="list.csv", Body=b"uri")
    keys = ["a.jpg", "d/", "seven", "list.csv", "empty.txt", f"out/detections/{run}.parquet"]
    lines = [f"{key},{bucket},e,{0 if 'empty' in key or key == 'd/' else 4}" for key in keys]
    (tmp_path / "m.csv").write_text("\n".join(["key,bucket,etag,size", *lines, "short.jpg", "b.jpg,,e,1"]))
    skipped = []
    found = list(list_images([f"{tmp_path}/m.csv"], leave_out=skipped.append))
    assert sorted(ref.uri for ref in found if isinstance(ref, ImageRef)) == [f"s3://{bucket}/a.jpg", f"s3://{bucket}/seven"]
    assert [letter.ref.uri for letter in found if isinstance(letter, DeadLetter)] == [f"{tmp_path}/m.csv:{n}" for n in (8, 9)]
    assert sorted(skipped) == [".csv", ".txt", "this program's own"]


def test_texts_of_a_parquet_file_may_be_bytes(tmp_path):
    pq.write_table(pa.table({"uri": [b"gs://b/\xc3\xa4.jpg"], "camera": [b"7"]}), tmp_path / "m.parquet")
    (ref,) = list_images([f"{tmp_path}/m.parquet"])
    assert (ref.uri, ref.extra) == ("gs://b/ä.jpg", '{"camera": "7"}')


def test_what_an_inventory_cannot_tell_is_a_dead_letter_or_one_clear_error(tmp_path):
    (tmp_path / "local.csv").write_text("uri,generation\na.jpg,171\n")
    (ref,) = list_images([f"{tmp_path}/local.csv"])
    assert (ref.generation, json.loads(ref.extra)) == ("", {"generation": "171"}), "of a file on a disk it would be another one"
    pq.write_table(pa.table({"bucket": ["b", "b"], "name": ["a.jpg", None]}), tmp_path / "m.parquet")
    ref, letter = list_images([f"{tmp_path}/m.parquet"])
    assert (ref.uri, letter.ref.uri, letter.reason) == ("gs://b/a.jpg", f"{tmp_path}/m.parquet:2", "bad_line")
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet")
    with pytest.raises(InputError, match=r"damaged behind row 0, or no Parquet file"):
        list(list_images([f"{tmp_path}/bad.parquet"]))
