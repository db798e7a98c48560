"""Videos: which frames are read, by which names, and what damage costs. The grey of a frame is five times its number."""

import math
import sys
from fractions import Fraction

import av
import cv2
import numpy as np
import pytest

from pipeline.listing.videos import images_of_video
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from tests.memory import less_memory_than

KINDS = [
    *(("a.mp4", "libx264", {}), ("a.mov", "mjpeg", {}), ("a.m4v", "mpeg4", {})),
    *(("a.mkv", "libx264", {}), ("a.avi", "mpeg4", {}), ("a.webm", "libvpx", {})),
    ("a.mp4", "libx264", {"x264-params": "open-gop=1:keyint=25:bframes=5:scenecut=0"}),  # frames refer to later ones
]


def grey(number, wh=(64, 48)):
    return np.full((*wh[::-1], 3), 5 * number % 255, np.uint8)


def write_video(
    path, frames=50, codec="libx264", times_ms=None, wh=(64, 48), container=None, draw=grey, sound_seconds=0, about=(), **options
):
    """A video of 25 frames a second, or with frames at these times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container or {}) as video:
        video.metadata.update(about)
        stream = video.add_stream(codec, rate=25, options=options)
        stream.codec_context.thread_count = 1  # the same file on each machine
        sound = video.add_stream("aac", rate=8000, layout="mono") if sound_seconds else None
        stream.width, stream.height = wh
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if times_ms:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for number in range(len(times_ms) if times_ms else frames):
            frame = av.VideoFrame.from_ndarray(draw(number, wh), format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            video.mux(stream.encode(frame))
        video.mux(stream.encode())
        if sound_seconds:
            add_sound(video, sound, sound_seconds)
    return path


def add_sound(video, stream, seconds):
    for _ in range(seconds):
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        video.mux(stream.encode(silence))
    video.mux(stream.encode())


def read(path, fps=1.0, max_megapixels=1.0):
    return list(images_of_video(ImageRef(str(path)), fps, max_megapixels))


def pixels(image):
    return cv2.imdecode(np.frombuffer(image.content, np.uint8), cv2.IMREAD_COLOR)


def frames(path, fps=1.0):
    """What is read: (time, number) of a frame, (time, reason) of a dead letter."""
    return [
        (image.ref.uri.partition("#t=")[2], round(pixels(image).mean() / 5) if isinstance(image, EncodedImage) else image.reason)
        for image in read(path, fps)
    ]


@pytest.mark.parametrize(
    ("fps", "numbers"),
    [
        (1.0, [0, 25]),
        (0.5, [0]),
        (0.001, [0]),
        (3.0, [0, 9, 17, 25, 34, 42]),  # the first at or after each third of a second
        (25.0, range(50)),
        (1000.0, range(50)),
    ],
)
def test_the_first_frame_at_or_after_each_multiple_is_read_and_each_frame_once(tmp_path, fps, numbers):
    assert frames(write_video(tmp_path / "a.mp4"), fps) == [(f"{n / 25:.3f}", n) for n in numbers]


def test_times_decide_where_the_rate_varies(tmp_path):
    path = write_video(tmp_path / "a.mkv", times_ms=[0, 40, 500, 520, 1700, 3000, 3001])
    assert frames(path) == [("0.000", 0), ("1.700", 4), ("3.000", 5)]
    assert frames(path, 1000.0)[-2:] == [("3.000", 5), ("3.001", 6)]


@pytest.mark.parametrize("rounded", [round, math.ceil, math.floor])
def test_a_container_that_rounds_times_to_milliseconds_gives_the_frames_of_one_that_does_not(tmp_path, rounded):
    """Frames at 30 a second, 3 of which are read: every tenth."""
    path = write_video(tmp_path / "a.mkv", times_ms=[rounded(n * 1000 / 30) for n in range(90)])
    assert [time for time, _ in frames(path, 3.0)] == [f"{rounded(n * 1000 / 30) / 1000:.3f}" for n in range(0, 90, 10)]


@pytest.mark.parametrize(("name", "codec", "options"), KINDS)
def test_of_each_kind_of_file_frames_are_read_at_the_rate_and_again_by_their_names(tmp_path, name, codec, options):
    """Wherever the file is sought, and whatever the rate is."""
    path = write_video(tmp_path / name, 160, codec, **options)
    numbers = [(f"{n / 25:.3f}", pytest.approx(n % 51, abs=1)) for n in range(0, 160, 5)]
    assert frames(path, 5.0) == numbers
    everything = read(path, 25.0)
    assert len(everything) == 160
    for image in everything[::13]:
        (again,) = read(image.ref.uri, 0.5)
        assert (again.ref, again.content) == (image.ref, image.content)


def test_a_name_between_two_frames_means_the_later_one_and_one_behind_the_end_none(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    assert frames(f"{path}#t=1.21") == [("1.240", 31)]
    assert frames(f"{path}#t=9") == [("9", "not_found")]
    assert frames(tmp_path / "absent.mp4") == [("", "not_found")]


@pytest.mark.parametrize(("matrix", "quarters"), [("0 1 -1 0", -1), ("-1 0 0 -1", 2), ("0 -1 1 0", 1), ("1 0 0 1", 0)])
def test_frames_are_upright_as_the_display_matrix_says(tmp_path, matrix, quarters):
    """Of a phone held upright, or upside down."""

    def draw(_number, wh):
        drawn = np.zeros((*wh[::-1], 3), np.uint8)
        drawn[: wh[1] // 2, : wh[0] // 2] = 255  # the top left quarter
        return drawn

    path = write_video(tmp_path / "a.mp4", 2, draw=draw)
    content = bytearray(path.read_bytes())
    at = content.index((1 << 16).to_bytes(4, "big") + bytes(12), content.index(b"tkhd"))
    for place, value in zip((0, 4, 12, 16), map(int, matrix.split()), strict=True):
        content[at + place : at + place + 4] = (value * 65536).to_bytes(4, "big", signed=True)
    path.write_bytes(content)
    (image,) = read(path)
    np.testing.assert_allclose(pixels(image), np.rot90(draw(0, (64, 48)), quarters), atol=40)


@pytest.mark.parametrize("overwritten", [b"", b"\xff" * 200], ids=["cut", "damaged"])
@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.mkv", "mpeg4"), ("a.avi", "mpeg4"), ("a.webm", "libvpx")])
def test_of_a_damaged_video_the_frames_before_are_read_and_the_rest_is_one_dead_letter(tmp_path, name, codec, overwritten):
    path = write_video(tmp_path / name, 250, codec, container={"movflags": "faststart"} if name == "a.mp4" else None)
    content = path.read_bytes()
    damaged_at = len(content) * 7 // 10
    path.write_bytes(content[:damaged_at] + overwritten + (content[damaged_at + 200 :] if overwritten else b""))
    *good, rest = read(path, 25.0)
    assert [round(pixels(image).mean() / 5) for image in good] == pytest.approx([n % 51 for n in range(len(good))], abs=1)
    assert 50 < len(good) < 220
    assert (rest.stage, rest.reason, rest.ref.uri) == ("read", "broken_file", str(path))
    assert f"is damaged behind {(len(good) - 1) / 25:.3f} s (" in rest.message


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "mpeg4"), ("a.mkv", "libx264"), ("a.webm", "libvpx")])
def test_wherever_matroska_is_damaged_no_frame_is_missing_without_a_dead_letter(tmp_path, name, codec):
    """Its demuxer went on at the next cluster: up to five seconds of frames were in no row and in no dead letter."""
    path = write_video(tmp_path / name, 250, codec)
    content = path.read_bytes()
    for damaged_at in range(len(content) // 20, len(content) * 19 // 20, len(content) // 25):
        path.write_bytes(content[:damaged_at] + b"\xff" * 200 + content[damaged_at + 200 :])
        images = read(path, 25.0)
        assert len(images) == 250 or isinstance(images[-1], DeadLetter), damaged_at


FRAGMENTED = [{"movflags": "frag_keyframe+empty_moov"}, {"movflags": "dash+global_sidx", "frag_duration": "400000"}]


@pytest.mark.parametrize("container", FRAGMENTED, ids=["fragments", "dash"])
@pytest.mark.parametrize(("sound_seconds", "overwritten"), [(0, b"\xff" * 200), (10, b"\0" * 200), (10, b"")])
def test_wherever_a_fragmented_video_is_damaged_or_cut_no_frame_is_missing_without_a_dead_letter(
    tmp_path, container, sound_seconds, overwritten
):
    """Its headers have no duration, and its demuxer passes over fragments that it does not understand."""
    path = write_video(tmp_path / "a.mp4", 250, "mpeg4", container=container, sound_seconds=sound_seconds)
    content = path.read_bytes()
    assert content.count(b"moof") > 10 and len(read(path, 25.0)) == 250
    for damaged_at in range(len(content) // 20, len(content) * 19 // 20, len(content) // 50):
        path.write_bytes(content[:damaged_at] + overwritten + content[damaged_at + 200 : len(content) if overwritten else 0])
        images = read(path, 25.0)
        assert len(images) == 250 or isinstance(images[-1], DeadLetter), damaged_at


def test_of_a_recording_that_goes_on_the_fragments_that_are_there_are_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", 250, "mpeg4", container=FRAGMENTED[0])
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"moof", 0, len(content) // 2) - 4])
    *_, last = read(path, 25.0)
    assert not isinstance(last, DeadLetter)


@pytest.mark.parametrize("cut", [0, 10, 1000])
def test_a_video_without_its_index_is_one_dead_letter(tmp_path, cut):
    path = write_video(tmp_path / "a.mp4")
    path.write_bytes(path.read_bytes()[:cut])
    assert frames(path) == [("", "broken_file")]


def test_a_file_with_sound_alone_is_one_dead_letter(tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as video:
        add_sound(video, video.add_stream("aac", rate=8000, layout="mono"), 1)
    (letter,) = read(path)
    assert (letter.reason, letter.message) == ("no_image", f"{path} has no video stream that can be decoded")


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "libvpx"])
def test_a_recording_that_begins_amid_a_group_of_pictures_is_read_from_the_next_key_frame(tmp_path, codec):
    """As recordings of cameras may, of whose stream the beginning was missed."""
    with (
        av.open(str(write_video(tmp_path / "whole.mkv", 75, codec, g="30", bf="0"))) as whole,
        av.open(str(tmp_path / "a.mkv"), "w") as part,
    ):
        stream = part.add_stream_from_template(whole.streams.video[0])
        packets = [packet for packet in whole.demux() if packet.dts is not None]
        later = next(number for number, packet in enumerate(packets) if number >= 5 and packet.is_keyframe)
        for packet in packets[5:]:
            packet.stream = stream
            part.mux(packet)
    found = frames(tmp_path / "a.mkv", 25.0)
    assert [number for _, number in found] == pytest.approx([n % 51 for n in range(later, 75)], abs=1)


@pytest.mark.parametrize(
    ("name", "other", "kind"),
    [("a.mov", {"about": {"timecode": "01:00:00:00"}}, "data"), ("a.mkv", {"sound_seconds": 4}, "audio")],
    ids=["a time code", "sound that lasts longer"],
)
def test_another_track_is_no_damage(tmp_path, name, other, kind):
    path = write_video(tmp_path / name, **other)
    with av.open(str(path)) as video:
        assert [stream.type for stream in video.streams] == ["video", kind]
    assert frames(path) == [("0.000", 0), ("1.000", 25)]


@pytest.mark.parametrize(
    "content",
    [
        b"no video",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{other}\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile {other}\n",
    ],
    ids=["text", "a playlist", "a list of files"],
)
def test_a_file_that_names_other_files_opens_none_of_them(tmp_path, content):
    other = write_video(tmp_path / "secret.mp4")
    (tmp_path / "a.mp4").write_bytes(content.replace(b"{other}", str(other).encode()))
    (letter,) = read(tmp_path / "a.mp4")
    assert letter.reason == "broken_file"
    assert "no MP4, QuickTime, Matroska, WebM or AVI" in letter.message and "\n" not in letter.message


def test_a_video_of_large_frames_is_refused_before_one_is_decoded(tmp_path):
    path = write_video(tmp_path / "a.mp4", 2, wh=(1280, 960))
    (letter,) = read(path, max_megapixels=1.0)
    assert (letter.stage, letter.reason) == ("decode", "too_large")
    assert letter.message == "expected at most 1 megapixels, got a video of 1280 x 960 pixels; max_megapixels sets the limit"


def test_without_pyav_a_video_is_one_dead_letter_that_says_what_to_install(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    (letter,) = read(path)
    assert letter.reason == "no_decoder"
    assert letter.message == f"{path}: videos are decoded by PyAV: pip install 'hybrid-detection-pipeline[video]'"


def test_a_long_video_is_read_frame_by_frame(tmp_path):
    """One frame is held: all of them, of noise, would take 20 MB."""
    noise = np.random.default_rng(0).integers(0, 255, (240, 320, 3), np.uint8)
    path = write_video(tmp_path / "a.mp4", 100, wh=(320, 240), draw=lambda number, _: np.roll(noise, number, axis=0))
    with less_memory_than(5_000_000):
        assert sum(len(image.content) for image in images_of_video(ImageRef(str(path)), 25.0, 1.0)) > 10_000_000


def test_a_video_on_cloud_storage_is_read_with_the_generation_of_its_object(tmp_path, gcs_bucket):
    path = write_video(tmp_path / "a.mp4")
    blob = gcs_bucket.blob("in/a.mp4")
    blob.upload_from_filename(path)
    uri = f"gs://{gcs_bucket.name}/in/a.mp4"
    assert frames(uri) == [("0.000", 0), ("1.000", 25)]
    assert [image.ref.generation for image in read(uri)] == [str(blob.generation)] * 2
