"""Names: whatever Unicode a disk takes names an image in every container, list, export and page."""

import io
import json
import os
import posixpath
import tarfile
import zipfile
from xml.etree import ElementTree

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example as always
from hypothesis import given
from hypothesis import strategies as st

from pipeline.exports.exports import FORMATS
from pipeline.listing.archives import images_of_archive
from pipeline.listing.list_images import list_images
from pipeline.listing.manifests import named_images, read_manifest
from pipeline.listing.tfrecords import images_of_file
from pipeline.records import EncodedImage, ImageRef, path_bytes
from pipeline.report.texts import breakable, link
from tests.shard_rows import detected, json_row, write_rows
from tests.tfrecord_files import example, write

MACOS = "Screenshot 2026-11-27 at 9.41.00\u202fAM"
ODD = [
    MACOS,
    "\u3000写真",
    "a\u00a0b",
    "\U0001f469\u200d\U0001f680",
    "soft\u00adhyphen",
    "e\u0301",
    "\u2028line",
    "\x85next",
    "\ufeffmark",
    "b.zip#c",
    "d\\e",
]
UNKNOWN_BYTES = "\udc80\udcff"  # a name of bytes that are no UTF-8, as Python holds it
CAT = ([10.0, 20.0, 40.0, 30.0], 0, "cat", 0.9)

# C0 controls, delete, the slash and code points that no file system takes are left out, and so is what a name alone decides
stems = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[*map(chr, range(32)), "\x7f", "/"]), min_size=1)
names = st.lists(
    stems.filter(lambda stem: not stem.startswith(".") and ".." not in stem).map("{}.jpg".format), unique=True, max_size=6
)
every_odd = always([f"{stem}.jpg" for stem in ODD])


def members(path):
    """The names of the images that an archive's reader gives, or the reason of each dead letter."""
    found = images_of_archive(ImageRef(path), 1000)
    return [image.ref.uri.partition("#")[2] if isinstance(image, EncodedImage) else image.message for image in found]


@given(names)
@every_odd
def test_any_name_is_read_from_a_zip_and_a_tar_file(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("archives")
    with zipfile.ZipFile(folder / "a.zip", "w") as packed:
        for name in names:
            packed.writestr(name, b"x")
    assert members(f"{folder}/a.zip") == names
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(folder / "a.tar", "w", format=format, encoding="utf-8") as packed:
            for name in names:
                packed.addfile(member := tarfile.TarInfo(name), io.BytesIO())
                assert member.size == 0
        assert members(f"{folder}/a.tar") == names


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_name_of_bytes_that_are_no_utf8_is_read_from_a_tar_file(tmp_path, format):
    with tarfile.open(tmp_path / "a.tar", "w", format=format, encoding="utf-8", errors="surrogateescape") as packed:
        for name in (long := UNKNOWN_BYTES * 90 + ".jpg", f"{UNKNOWN_BYTES}.jpg"):
            packed.addfile(tarfile.TarInfo(name))
    assert members(f"{tmp_path}/a.tar") == [long, f"{UNKNOWN_BYTES}.jpg"]


@pytest.mark.parametrize("name", ["new\nline.jpg", "\x1b[31m.jpg", "del\x7f.jpg"])
def test_control_characters_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr(name, b"x")
    (message,) = members(f"{tmp_path}/a.zip")
    assert message.endswith("has a name with control characters, or of no file below a folder")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"x")
    (listed,) = list_images([f"{tmp_path}/in"])
    assert (listed.reason, listed.ref.uri, listed.ref.generation[:2]) == ("bad_name", f"{tmp_path}/in/{name}", "1-")
    (named,) = list_images([f"{tmp_path}/in/{name}"])
    assert named == listed
    record = write(tmp_path / "a.tfrecord", example(image_encoded=b"x", image_source_id=name.encode()))
    (image,) = images_of_file(ImageRef(str(record)), 1000)
    assert (image.reason, image.ref.uri.partition("@")[0]) == ("bad_name", str(record))


@pytest.mark.parametrize("name", ["a\tb.jpg", "\x1b[31m.jpg", "del\x7f.jpg", "file:///in/a%0Ab.jpg"])
@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl", "parquet"])
def test_a_manifest_names_the_place_of_a_name_with_control_characters(tmp_path, name, ending):
    path, names = tmp_path / f"list.{ending}", ["gs://b/a.jpg", name, "gs://b/c.jpg"]
    if ending == "parquet":
        pd.DataFrame({"uri": names}).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(each) if ending == 'jsonl' else each}\n" for each in names))
    first, bad, last = read_manifest(str(path))
    assert (first.uri, bad.reason, bad.ref.uri, last.uri) == (names[0], "bad_line", f"{path}:2", names[2])
    assert "control characters" in bad.message


@given(names)
@every_odd
def test_any_name_comes_back_from_each_kind_of_manifest(names):
    def read(lines, path):
        return [uri for uri, _ in named_images(io.BytesIO("\n".join(lines).encode("utf-8", "surrogatepass")), path)]

    names = [name.strip(" ") for name in names]  # a line and a cell end at spaces
    assert read([json.dumps({"uri": name}) for name in names], "list.jsonl") == names
    pq.write_table(pa.table({"uri": names}), parquet := io.BytesIO())
    assert [uri for uri, _ in named_images(parquet, "list.parquet")] == names
    assert read(["uri", *('"' + name.replace('"', '""') + '"' for name in names)], "list.csv") == names
    plain = [name for name in names if not name.startswith(("#", "\ufeff"))]
    assert read(plain, "list.txt") == plain


@given(names)
@every_odd
@always([f"{UNKNOWN_BYTES}.jpg"])
def test_any_name_is_in_each_export_and_in_links_of_pages(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("exports")
    rows = [json_row(f"/photos/{name}", CAT) for name in names]
    written = {name: folder / name for name in FORMATS if len(FORMATS[name].files) == 1}
    for name, path in written.items():
        with open(path, "wb") as file:
            FORMATS[name].write(rows, file)
    shown = [row["image"]["uri"].encode("utf-8", "backslashreplace").decode() for row in rows]
    if rows:
        table = pd.read_csv(written["csv"], keep_default_na=False)
        assert [*table["uri"]] == shown
    letters = images_of_file(ImageRef(f"{written['tfrecord']}"), 1 << 20)
    assert [letter.ref.uri for letter in letters] == [row["image"]["uri"] for row in rows]
    for name in ("yolo", "voc"):
        with zipfile.ZipFile(written[name]) as labels:
            texts = [each for each in labels.namelist() if "/" in each]
        assert len({*texts}) == len(names)
        assert not any(set(each.split("/")) & {"", "..", "."} for each in texts)
    ElementTree.parse(written["cvat"])
    assert len(json.loads(written["label-studio"].read_bytes())) == len(names)
    for row in rows:
        str(breakable(row["image"]["uri"])).encode()
        link(row["image"]["uri"]).encode()


@given(names)
@every_odd
@always([f"{UNKNOWN_BYTES}.jpg"])
def test_any_name_on_a_disk_is_listed_and_kept_in_rows(tmp_path_factory, names):
    folder = str(tmp_path_factory.mktemp("disk"))
    names = [name for name in names if len(path_bytes(name)) < 256]
    for name in names:
        with open(os.fsencode(f"{folder}/{name}"), "wb") as file:
            file.write(b"x")
    uris = sorted(ref.uri for ref in list_images([folder]))
    assert sorted(map(posixpath.basename, uris)) == sorted(names)
    if uris:
        from pipeline.results.current import read_rows

        write_rows(f"{folder}/out", [detected(uri) for uri in uris])
        assert sorted(row.uri for row in read_rows(f"{folder}/out")) == uris


@pytest.mark.parametrize("pattern", ["*.jpg", "**", "._*", "*"])
def test_what_macos_adds_beside_a_file_is_no_image_under_any_pattern(tmp_path, pattern):
    """An AppleDouble file, `._<name>`, has the attributes of the file beside it."""
    for name in ("a.jpg", "._a.jpg", "._b.zip", "c/._d.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    kinds = []
    found = [posixpath.basename(ref.uri) for ref in list_images([f"{tmp_path}/{pattern}"], leave_out=kinds.append)]
    assert found == ([] if pattern == "._*" else ["a.jpg"])
    assert {*kinds} == {"._* of macOS"}
