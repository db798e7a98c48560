"""Pictures of a finished run: images with their objects drawn, and objects cut out."""

import errno
import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

from pipeline.commands import pictures
from pipeline.exports.pictures import AHEAD, picture_names
from pipeline.feed import read_again as again
from pipeline.feed.decode import decode_image
from tests.forked_jobs import Moment, run_forked
from tests.listing.test_archives import write
from tests.listing.test_videos import write_video
from tests.listing.test_web import Server, server  # noqa: F401  a fixture
from tests.models.test_evaluate import found, row, write_lines

COLOURS = np.stack([*np.meshgrid(np.linspace(0, 255, 120), np.linspace(0, 255, 80)), np.full((80, 120), 128)], -1)


def write_photo(path, turn=1, size_wh=(120, 80)):
    """A smooth picture whose colour tells its place, with an EXIF orientation; returns its upright pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = turn
    picture = Image.fromarray(COLOURS.astype(np.uint8)).resize(size_wh)
    picture.save(path, quality=100, subsampling=0, exif=exif)
    return decode_image(path.read_bytes(), 1e7).pixels


def rows_of(folder, *rows):
    return write_lines(folder / "rows.jsonl", rows)


def photo_row(uri, *detections, width=120, height=80):
    return row(str(uri), *detections, width=width, height=height)


def made(*args):
    """The exit code of the command."""
    try:
        return pictures.main([*map(str, args)])
    except SystemExit as end:
        return end.code


def files_of(folder):
    """The files below a folder, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def pixels_of(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def assert_alike(picture, pixels):
    """A JPEG of these pixels."""
    assert picture.shape == pixels.shape
    assert np.abs(picture - pixels.astype(int)).max() <= 12


@pytest.fixture
def photo(tmp_path):
    """One photo, stored turned with an orientation, its upright pixels, and rows with a cat in it."""
    pixels = write_photo(tmp_path / "in" / "a.jpg", turn=6, size_wh=(80, 120))
    return tmp_path, pixels, rows_of(tmp_path, photo_row(tmp_path / "in" / "a.jpg", found(box=(20, 10, 60, 50))))


def test_frames_of_a_video_are_read_again_and_named_by_their_time(tmp_path, capsys):
    """A white square walks to the right, so a crop that is not white is of another frame."""

    def draw(number, wh):
        pixels = np.zeros((wh[1], wh[0], 3), np.uint8)
        pixels[16:64, 16 + number : 64 + number] = 255
        return pixels

    write_video(tmp_path / "walk.mp4", frames=60, wh=(128, 96), draw=draw)
    frames = {"0.000": 0, "0.520": 13, "1.000": 25, "2.000": 50}
    boxes = {time: (16 + number, 16, 64 + number, 64) for time, number in frames.items()}
    rows = rows_of(
        tmp_path, *(photo_row(f"/gone/walk.mp4#t={time}", found(box=box), width=128, height=96) for time, box in boxes.items())
    )
    assert made(rows, "--crops", tmp_path / "cut", "--images", tmp_path) == 0, capsys.readouterr()
    assert files_of(tmp_path / "cut") == [f"cat/walk-{time}-1-0.90.jpg" for time in frames]
    for name in files_of(tmp_path / "cut"):
        assert pixels_of(tmp_path / "cut" / name)[4:-4, 4:-4].min() > 200
    (tmp_path / "walk.mp4").unlink()
    assert made(rows, "--crops", tmp_path / "cut", "--images", tmp_path) == 1
    said = capsys.readouterr()
    assert "4 could not be read (not_found 4)" in said.out and "is not in the folder of --images" in said.err


def test_a_drawn_image_has_its_full_size_and_only_its_boxes_differ(tmp_path):
    pixels = write_photo(tmp_path / "a.jpg", size_wh=(1600, 1200))
    rows = rows_of(tmp_path, photo_row(tmp_path / "a.jpg", found(box=(400, 300, 1200, 900)), width=1600, height=1200))
    assert made(rows, "--annotate", tmp_path / "drawn") == 0
    differs = np.abs(pixels_of(tmp_path / "drawn/a.jpg") - pixels).max(axis=-1) > 40
    assert differs.shape == (1200, 1600)
    assert differs[300:900, 400:404].mean() > 0.9 and not differs[320:880, 420:1180].any() and not differs[910:].any()


@pytest.mark.parametrize(
    ("box", "margin", "region"),
    [
        pytest.param((20, 10, 60, 50), 0.1, (16, 6, 64, 54), id="margin"),
        pytest.param((20.4, 10.6, 59.2, 49.9), 0, (20, 10, 60, 50), id="touched pixels count"),
        pytest.param((-30, -5, 20, 30), 0, (0, 0, 20, 30), id="beyond the upper left"),
        pytest.param((100, 60, 1e300, 1e300), 0.1, (98, 58, 120, 80), id="beyond the lower right"),
        pytest.param((119.5, 0, 130, 80), 0, (119, 0, 120, 80), id="the last column"),
        pytest.param((20, 10, 20, 50), 0.5, None, id="no width"),
        pytest.param((120, 0, 140, 50), 0.5, None, id="right of the image"),
        pytest.param((0, -40, 50, 0), 0, None, id="above the image"),
    ],
)
def test_a_crop_has_the_pixels_of_its_box_in_the_upright_image(photo, capsys, box, margin, region):
    folder, pixels, _ = photo
    rows = rows_of(folder, photo_row(folder / "in/a.jpg", found(box=box)))
    assert made(rows, "--crops", folder / "cut", "--annotate", folder / "drawn", "--margin", margin) == 0
    if region is None:
        assert files_of(folder / "cut") == [] and "0 crops" in (said := capsys.readouterr().out)
        assert said.endswith("1 box outside of the image or without area\n")
    else:
        x0, y0, x1, y1 = region
        assert_alike(pixels_of(folder / "cut/cat/a-1-0.90.jpg"), pixels[y0:y1, x0:x1])


def test_flags_choose_objects_and_numbers_are_places_in_the_row(tmp_path):
    """An image without a wanted object is not read for crops."""
    write_photo(tmp_path / "a.jpg")
    objects = [found("cat", confidence=0.9), found("dog", confidence=0.8), found("dog", confidence=0.4), found("", class_id=7)]
    rows = rows_of(tmp_path, photo_row(tmp_path / "a.jpg", *objects), photo_row("gone.jpg", found(confidence=0.1)))
    cut = tmp_path / "cut"
    assert made(rows, "--crops", cut, "--min-confidence", 0.5, "--class", "dog", "--class", "class_7") == 0
    assert files_of(cut) == ["class_7/a-4-0.90.jpg", "dog/a-2-0.80.jpg"]


@pytest.mark.parametrize(("name", "moved"), [("in.zip", True), ("in.tar.gz", False)])
def test_members_of_archives_are_read_and_each_archive_once(tmp_path, monkeypatch, capsys, name, moved):
    pixels = write_photo(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    write(tmp_path / name, {"x/a.jpg": content, "notes.txt": b"text", "unwanted.jpg": content, "y/b.jpg": content, "c.jpg": b"c"})
    named = f"/elsewhere/photos/{name}" if moved else f"{tmp_path}/{name}"
    members = ("x/a.jpg", "y/b.jpg", "c.jpg", "gone.jpg")
    rows = rows_of(tmp_path, *(photo_row(f"{named}#{member}", found(box=(20, 10, 60, 50))) for member in members))
    opened = []
    read = again.images_in
    monkeypatch.setattr(again, "images_in", lambda *args: opened.append(args) or read(*args))
    assert made(rows, "--crops", tmp_path / "cut", *(["--images", tmp_path] if moved else [])) == 1
    assert files_of(tmp_path / "cut") == ["cat/a-1-0.90.jpg", "cat/b-1-0.90.jpg"]
    assert_alike(pixels_of(tmp_path / "cut/cat/b-1-0.90.jpg"), pixels[10:50, 20:60])
    assert len(opened) == 1
    assert "2 could not be read (" in (said := capsys.readouterr().out) and "not_found 1" in said and "not_an_image 1" in said


def test_images_that_cannot_be_used_are_counted_by_reason(photo, capsys):
    folder, _, _ = photo
    (folder / "in/b.jpg").write_bytes(b"no image")
    write_photo(folder / "in/c.jpg", size_wh=(60, 40))
    uris = ["in/a.jpg", "in/b.jpg", "in/c.jpg", "in/gone\x1b[2J.jpg", "in/nul\0.jpg", "in", "gone.zip#a.jpg", "inline:abc"]
    rows = rows_of(folder, *(photo_row(folder / uri if uri != "inline:abc" else uri, found()) for uri in uris))
    assert made(rows, "--annotate", folder / "drawn") == 1
    said = capsys.readouterr()
    assert files_of(folder / "drawn") == ["a.jpg"]
    assert said.out.startswith("8 images; 1 annotated in ") and "; 7 could not be read (not_found 3, " in said.out
    for reason in ("not_an_image", "changed", "not_a_file", "unreadable"):
        assert f"{reason} 1" in said.out and f"warning: {reason}: " in said.err
    assert "c.jpg has 60 x 40 pixels, its row 120 x 80" in said.err and "\x1b" not in said.err


def test_images_on_the_web_are_read_and_no_name_or_message_has_their_tokens(photo, server, capsys):  # noqa: F811
    folder, pixels, _ = photo
    write_photo(folder / "in/b.jpg", size_wh=(60, 40))
    uris = [f"{server}/{name}.jpg?token=secret/1" for name in ("a", "b", "gone")]
    Server.images.update({f"/{name}.jpg?token=secret/1": (folder / f"in/{name}.jpg").read_bytes() for name in ("a", "b")})
    rows = rows_of(folder, *(photo_row(uri, found(box=(20, 10, 60, 50))) for uri in uris))
    assert made(rows, "--crops", folder / "cut") == 1
    assert files_of(folder / "cut") == ["cat/a-1-0.90.jpg"]
    assert_alike(pixels_of(folder / "cut/cat/a-1-0.90.jpg"), pixels[10:50, 20:60])
    said = capsys.readouterr()
    assert "changed 1, not_found 1" in said.out
    assert said.err.count("warning: ") == 2 and "secret" not in said.err


def test_images_of_one_name_have_pictures_of_their_own_whatever_their_order(tmp_path):
    uris = [tmp_path / name for name in ("x/1.jpg", "y/1.jpg", "y/1.png", "z/2.jpg")]
    for uri in uris:
        write_photo(uri)
    rows = [photo_row(uri, found()) for uri in uris]
    assert made(rows_of(tmp_path, *rows), "--annotate", tmp_path / "drawn", "--crops", tmp_path / "cut") == 0
    names = files_of(tmp_path / "drawn")
    assert len(names) == 4 and names[-1] == "2.jpg" and all(name.startswith("1~") for name in names[:3])
    assert len(files_of(tmp_path / "cut")) == 4
    assert made(rows_of(tmp_path, *rows[::-1]), "--annotate", tmp_path / "again") == 0
    assert files_of(tmp_path / "again") == names
    first = picture_names(["x/1.jpg", "y/1.jpg"])
    crafted = f"z/{first['y/1.jpg']}.jpg"  # looks like another image with its hash
    assert len({*picture_names(["x/1.jpg", "y/1.jpg", crafted]).values()}) == 3


HOSTILE = ["..", "../../up", "/etc/x", "a\0b", "\x1b[2J", "", ".hidden", "-rf", "é" * 300, "猫", "\udc80", "CON|<>", "~", "a/.."]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_no_name_of_a_class_or_an_image_leads_out_of_the_folder(tmp_path, name):
    """Nor is it hidden, a flag, or longer than a disk takes."""
    write_photo(tmp_path / "a.jpg")
    rows = rows_of(tmp_path, photo_row(tmp_path / "a.jpg", found(name, class_id=7)))
    assert made(rows, "--crops", tmp_path / "to/cut") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.jpg", "rows.jsonl", "to"}
    ((folder, file),) = (each.split("/") for each in files_of(tmp_path / "to/cut"))
    assert file == "a-1-0.90.jpg"
    plain = picture_names([f"folder/{name}", f"{name}/x.jpg", f"a.zip#{name}", name])
    for each in (folder, *plain.values()):
        assert each.isprintable() and "/" not in each and each[0] not in ".-" and len(each.encode()) < 236
    assert len({*plain.values()}) == len(plain)


def test_only_pictures_of_this_command_are_replaced_and_not_the_photos(photo, capsys):
    folder, _, rows = photo
    before = (folder / "in/a.jpg").read_bytes()
    assert made(rows, "--annotate", folder / "in") == 1
    assert "0 annotated in " in (said := capsys.readouterr().out) and "1 not written, as files of other programs" in said
    assert (folder / "in/a.jpg").read_bytes() == before and files_of(folder / "in") == ["a.jpg"]
    command = (rows, "--annotate", folder / "drawn")
    assert made(*command) == 0
    ours = (folder / "drawn/a.jpg").read_bytes()
    (folder / "drawn/a.jpg").write_bytes(ours[:4096])
    assert made(*command) == 0
    assert (folder / "drawn/a.jpg").read_bytes() == ours


@pytest.mark.parametrize(
    ("path", "flags", "said"),
    [
        pytest.param("rows.jsonl", [], "nothing to write: give --annotate FOLDER, --crops FOLDER", id="nothing to write"),
        pytest.param("rows.jsonl", ["--crops", "gs://bucket/cut"], "gs://bucket/cut is not a local folder", id="no local folder"),
        pytest.param("rows.jsonl", ["--crops", "cut", "--class", "cta"], "class 'cta'; classes are cat", id="class"),
        pytest.param("rows.jsonl", ["--crops", "rows.jsonl/cut"], "expected a folder that can be written", id="below a file"),
        pytest.param("coco.json", ["--crops", "cut"], "COCO results need images.json", id="rows without names of images"),
        pytest.param(
            "duplicates.jsonl", ["--crops", "cut"], "2 rows, each image may have one row", id="several rows of an image"
        ),
        pytest.param("rows.jsonl", ["--crops", "cut", "--margin", "-1"], "--margin: invalid number from 0 on", id="below 0"),
        pytest.param("rows.jsonl", ["--crops", "cut", "--margin", "nan"], "--margin: invalid number from 0 on", id="nan"),
    ],
)
def test_a_wrong_command_is_one_line(photo, monkeypatch, capsys, path, flags, said):
    folder, _, rows = photo
    monkeypatch.chdir(folder)
    (folder / "coco.json").write_text(json.dumps([{"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.5}]))
    (folder / "duplicates.jsonl").write_text(rows.read_text() * 2)
    assert made(path, *flags) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.fixture
def many(tmp_path):
    """Rows of 60 images in an archive, each with a cat in it."""
    write_photo(tmp_path / "a.jpg")
    write(tmp_path / "in.zip", {f"{n}.jpg": (tmp_path / "a.jpg").read_bytes() for n in range(60)})
    return tmp_path, rows_of(tmp_path, *(photo_row(f"{tmp_path}/in.zip#{n}.jpg", found()) for n in range(60)))


def test_few_images_are_in_hand_at_a_time(many, monkeypatch):
    folder, rows = many
    read, in_hand = again.images_in, []

    def counted_read(*args):
        for number, image in enumerate(read(*args), 1):
            in_hand.append(number - len(list((folder / "drawn").glob("*.jpg"))))
            yield image

    monkeypatch.setattr(again, "images_in", counted_read)
    assert made(rows, "--annotate", folder / "drawn") == 0
    assert len(files_of(folder / "drawn")) == 60
    assert max(in_hand) <= AHEAD <= 16


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_is_full_is_one_line_and_leaves_no_part_of_a_picture(photo, monkeypatch, capsys, code):
    def full(_file):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    folder, _, rows = photo
    assert made(rows, "--annotate", folder / "drawn") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {folder}/drawn: ") and os.strerror(code) in err and err.count("\n") == 1
    assert os.listdir(folder / "drawn") == []


@pytest.mark.slow
def test_a_command_that_is_stopped_leaves_only_whole_pictures(many):
    folder, rows = many
    command = [rows, "--annotate", folder / "drawn", "--crops", folder / "drawn"]
    at = Moment("os:replace", 30, sent=signal.SIGTERM)
    assert run_forked(command, folder / "log", at, "pipeline.commands.pictures") == 130
    said = (folder / "log").read_text()
    assert said.splitlines()[-1] == "stopped; the pictures that are there are complete" and "Traceback" not in said
    left = [path for path in (folder / "drawn").rglob("*") if path.is_file()]
    assert 0 < len(left) < 120 and not [path for path in (folder / "drawn").iterdir() if path.name.startswith(".")]
    for path in left:
        Image.open(path).load()
