"""Archives: every image in one is a result or one dead letter, whatever is wrong with it; and no more than one is held."""

import io
import os
import struct
import tarfile
import zipfile

import pytest

from pipeline.limits import MEMORY
from pipeline.listing.archives import images_of_archive
from pipeline.records import EncodedImage, ImageRef
from tests.memory import less_memory_than

LIMIT = 1000
FILES = {"a.jpg": b"a" * 100, "b/c.png": b"c", "b/notes.txt": b"text", ".hidden.jpg": b"h", "__MACOSX/._a.jpg": b"x"}
MODES = ["zip", "tar", "tar.gz", "tar.bz2", "tar.xz", "tgz"]


def write(path, files, compression=zipfile.ZIP_DEFLATED):
    """An archive of the kind that the path's ending names."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    ending = path.name.rpartition(".")[2]
    with tarfile.open(path, {"tar": "w", "tgz": "w:gz"}.get(ending, f"w:{ending}")) as archive:
        for name, content in files.items():
            add(archive, name, content)
    return path


def add(archive, name, content=b"", kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
    archive.addfile(member, io.BytesIO(content))


def images(path, limit=LIMIT):
    """What an archive holds: (name, content) of an image, (name, reason) of a dead letter, the name of anything else."""
    found = []
    for image in images_of_archive(ImageRef(str(path)), limit):
        if isinstance(image, str):
            found.append(image)
            continue
        _, _, name = image.ref.uri.partition("#")
        found.append((name, image.content if isinstance(image, EncodedImage) else image.reason))
        assert isinstance(image, EncodedImage) or ("\n" not in image.message and not image.ref.generation)
    return found


@pytest.mark.parametrize("kind", MODES)
def test_the_images_of_an_archive_are_read_without_the_hidden_and_others_are_named(tmp_path, kind):
    assert images(write(tmp_path / f"a.{kind}", {})) == []
    path = write(tmp_path / f"a.{kind}", FILES)
    assert images(path) == [("a.jpg", b"a" * 100), ("b/c.png", b"c"), "b/notes.txt"]
    assert images(f"{path}#b/c.png") == [("b/c.png", b"c")]
    assert images(f"{path}#gone.png") == [("gone.png", "not_found")]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_generation_is_the_same_until_the_content_changes(tmp_path, kind):
    def generations(content):
        path = write(tmp_path / f"a.{kind}", {"a.jpg": content})
        return [image.ref.generation for image in images_of_archive(ImageRef(str(path)), LIMIT)]

    assert generations(b"one") == generations(b"one") != generations(b"two")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_that_lead_outside_and_nested_archives_and_videos_are_dead_letters(tmp_path, kind):
    names = ["../x.jpg", "/etc/x.jpg", "a/../../x.jpg", "new\nline.jpg", "in.zip", "clip.mp4", "a.tfrecord", "good.jpg"]
    found = images(write(tmp_path / f"a.{kind}", dict.fromkeys(names, b"x")))
    assert [outcome for _, outcome in found] == ["bad_member"] * 7 + [b"x"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_member_above_the_limit_is_not_unpacked(tmp_path, kind):
    """A bomb of 50 MB takes no memory, and its neighbour is read."""
    path = write(tmp_path / f"a.{kind}{'.gz' * (kind == 'tar')}", {"bomb.jpg": bytes(50_000_000), "b.jpg": b"b"})
    with less_memory_than(3_000_000):
        assert images(path) == [("bomb.jpg", "too_large_file"), ("b.jpg", b"b")]


def test_a_bomb_that_lies_about_its_size_is_not_unpacked(tmp_path):
    """Its directory announces ten bytes."""
    path = write(tmp_path / "a.zip", {"bomb.jpg": bytes(50_000_000), "b.jpg": b"b"})
    path.write_bytes(path.read_bytes().replace(struct.pack("<L", 50_000_000), struct.pack("<L", 10)))
    with less_memory_than(3_000_000):
        assert images(path) == [("bomb.jpg", "bad_member"), ("b.jpg", b"b")]


def test_the_headers_of_a_tar_file_may_not_fill_the_memory(tmp_path):
    """A long name of 60 MB, gzipped to a few kB."""
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "a.jpg", b"a")
        add(archive, "long", bytes(60_000_000), tarfile.GNUTYPE_LONGNAME)
    with less_memory_than(5_000_000):
        assert images(path) == [("a.jpg", b"a"), ("", "broken_file")]


@pytest.mark.parametrize(("kind", "count", "left"), [("zip", 3000, 0), ("tar.gz", 12_000, 6250)])
def test_the_members_of_an_archive_may_not_fill_the_memory(tmp_path, monkeypatch, kind, count, left):
    """Each takes 500 bytes of memory in a zip file's directory, and gzipped less than a byte of a tar file."""
    path = write(tmp_path / f"a.{kind}", {f"{number}.txt": b"" for number in range(count)})
    assert len(images(path)) == count
    monkeypatch.setattr(MEMORY, "limit_bytes", 1)
    found = images(path)
    assert (len(found), found[-1]) == (left + 1, ("", "broken_file"))


def test_encrypted_members_links_and_unknown_methods_in_a_zip_file_are_dead_letters(tmp_path):
    path = write(tmp_path / "a.zip", {"secret.jpg": b"s", "good.jpg": b"g"})
    content = bytearray(path.read_bytes())
    for head, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(head) + at] |= 1
    path.write_bytes(content)
    link = zipfile.ZipInfo("link.jpg")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
        archive.writestr("bz.jpg", b"x", zipfile.ZIP_BZIP2)
    bad = "bad_member"
    assert images(path) == [("secret.jpg", bad), ("good.jpg", b"g"), ("link.jpg", bad), ("bz.jpg", bad)]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_file_are_dead_letters(tmp_path, kind):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "a.jpg", kind=kind)
        add(archive, "b.jpg", b"b")
    assert images(path) == [("a.jpg", "bad_member"), ("b.jpg", b"b")]


def test_a_damaged_member_of_a_zip_file_costs_itself(tmp_path):
    path = write(tmp_path / "a.zip", {f"{name}.jpg": name.encode() * 100 for name in "abc"}, zipfile.ZIP_STORED)
    content = path.read_bytes().replace(b"a" * 100, b"a" * 99 + b"x")
    path.write_bytes(content.replace(b"PK\3\4", b"PK\3\5").replace(b"PK\3\5", b"PK\3\4", 2))  # and the third header
    assert images(path) == [("a.jpg", "bad_member"), ("b.jpg", b"b" * 100), ("c.jpg", "bad_member")]


def test_a_damaged_image_without_an_ending_is_a_dead_letter_too(tmp_path):
    files = {"camera": b"\x89PNG\r\n\x1a\n" + b"good" * 2000, "notes.txt": b"good" * 2000}
    path = write(tmp_path / "a.zip", files, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"goodPK", b"evilPK"))
    assert images(path, 10_000) == [("camera", "bad_member"), "notes.txt"]


def test_places_before_the_beginning_of_a_zip_file_cost_their_members_alone(tmp_path):
    """Its directory says that it lies behind where it is, so the places of all members are wrong."""
    path = write(tmp_path / "a.zip", {"a.jpg": b"a", "b.jpg": b"b"})
    content = bytearray(path.read_bytes())
    content[-6:-2] = (int.from_bytes(content[-6:-2], "little") + 10).to_bytes(4, "little")
    path.write_bytes(content)
    assert images(path) == [("a.jpg", "bad_member"), ("b.jpg", "bad_member")]


def test_a_zip_file_without_its_directory_is_one_dead_letter(tmp_path):
    path = write(tmp_path / "a.zip", FILES)
    content = path.read_bytes()
    for cut in (0, 10, content.index(b"PK\1\2"), len(content) - 30):
        path.write_bytes(content[:cut])
        assert images(path) == [("", "broken_file")]
    path.write_bytes(content.replace(b"PK\1\2", b"PK\1\0"))
    assert images(path) == [("", "broken_file")]


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_a_tar_file_that_ends_anywhere_never_loses_an_image_without_a_dead_letter(tmp_path, kind):
    path = write(tmp_path / f"a.{kind}", {f"{n}.jpg": os.urandom(600) for n in range(5)})
    content = path.read_bytes()
    for cut in range(0, len(content) - 30 if kind == "tar.gz" else 5 * 1536, 97):
        path.write_bytes(content[:cut])
        *good, rest = images(path)
        assert rest == ("", "broken_file")
        assert [name for name, _ in good] == [f"{n}.jpg" for n in range(len(good))]


def test_behind_a_damaged_header_of_a_tar_file_the_rest_is_one_dead_letter(tmp_path):
    path = write(tmp_path / "a.tar", {f"{n}.jpg": b"x" for n in range(4)})
    content = bytearray(path.read_bytes())
    content[2048] ^= 1
    path.write_bytes(content)
    assert images(path) == [("0.jpg", b"x"), ("1.jpg", b"x"), ("", "broken_file")]


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_a_tar_file_that_was_appended_to_another_is_one_dead_letter(tmp_path, kind):
    first, second = (write(tmp_path / f"{name}.{kind}", {f"{name}.jpg": name.encode()}) for name in "ab")
    both = tmp_path / f"both.{kind}"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    assert images(both) == [("a.jpg", b"a"), ("", "broken_file")]
    assert images(f"{both}#a.jpg") == [("a.jpg", b"a")]
    first.write_bytes(first.read_bytes() + bytes(20_000))
    assert images(first) == [("a.jpg", b"a")]


def test_a_name_in_utf8_without_the_flag_of_it_is_read_from_a_zip_file_as_macos_writes_it(tmp_path):
    for name, told in (("Bild ä\u202fö.jpg", "Bild ä\u202fö.jpg".encode()), ("é.jpg", "é.jpg".encode("cp437"))):
        path = write(tmp_path / "a.zip", {"x" * len(told): b"a"})
        path.write_bytes(path.read_bytes().replace(b"x" * len(told), told))
        assert images(path) == [(name, b"a")] and images(f"{path}#{name}") == [(name, b"a")]


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_images_with_one_name_the_first_is_read_others_are_dead_letters_and_copies_are_skipped(tmp_path, kind):
    """`tar -r` adds the same files again: a job over them ended with exit code 4. A list has no such letter."""
    path, jpeg = tmp_path / f"a.{kind}", b"\xff\xd8\xff\xe0"
    contents = {"a.jpg": [b"one", b"two", b"one"], "photo": [jpeg, jpeg + b"two"], "a.txt": [b"one", b"two"]}
    with zipfile.ZipFile(path, "w") if kind == "zip" else tarfile.open(path, "w") as archive:
        for name, content in ((name, content) for name, some in contents.items() for content in some):
            archive.writestr(name, content) if kind == "zip" else add(archive, name, content)
    of_photo = [("photo", jpeg), ("photo", "bad_member")]
    assert images(path) == [("a.jpg", b"one"), ("a.jpg", "bad_member"), "a.jpg", *of_photo, "a.txt", "a.txt"]
    assert images(f"{path}#a.jpg") == [("a.jpg", b"one")]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_read_member_by_member(tmp_path, kind):
    """Sixty images of 1 MB, of which one is held."""
    path = write(tmp_path / f"a.{kind}", {f"{n}.jpg": bytes(1_000_000) for n in range(60)}, zipfile.ZIP_STORED)
    with less_memory_than(10_000_000):
        assert sum(1 for _ in images_of_archive(ImageRef(str(path)), 2_000_000)) == 60
