"""Pictures of a finished run: objects drawn into their images, or cut out of them; images are read again, a few at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil, floor

import numpy as np
from PIL import Image

from models.base.image_uris import video_frame
from models.base.progress import shown
from models.evaluate.detection_rows import ImageRow
from pipeline.config.sections import DetectConfig
from pipeline.errors import FullError, InputError, OutputError, is_full
from pipeline.exports.exports import WAIT_SECONDS
from pipeline.exports.write_labels import short_name
from pipeline.failures import Failure
from pipeline.feed.decode import decode_image
from pipeline.feed.read_again import Read, reads, refuse_duplicates
from pipeline.log_lines import console, plural, say
from pipeline.records import DetectedImage, Detections, ImageRef, identity_hash
from pipeline.report.annotate import annotate, marked_jpeg
from pipeline.results.layout import MADE_BY
from pipeline.results.lock import locked
from pipeline.storage.files import UNFINISHED, delete_files, move_files, sync, write_files
from pipeline.storage.web import without_query

_THREADS = min(4, os.cpu_count() or 1)
AHEAD = 4 * _THREADS  # images in flight
_MARK_BYTES = 4096  # the mark is in the first bytes of a picture
_CROP_QUALITY = 95
_NEW = "new"  # folder of crops that are to replace others
_JPEG_SIDE = 65_500  # pixels
_FAR = 1e9  # pixels; float32 has room for it
_UNSAFE = re.compile(r'^[.-]|[/\\:*?"<>|]')

_Failure = tuple[str, str]  # reason and message


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Which pictures are wanted, and where.

    Attributes:
      annotate: Folder for each image with its objects drawn; empty: none.
      crops: Folder for each object, as `<class>/<image>-<number>-<confidence>.jpg`; empty: none.
      replace: Whether the crops replace all earlier ones in their folder once they are complete; without `annotate`.
      margin: What to add to a crop on each side, as a share of its box.
      min_confidence: Objects of a lower confidence are left out.
      classes: Names of classes; of others no object counts. Empty: all count.
      images: Where the images are now; empty: as the rows name them.
      max_megapixels: Larger images are refused.
    """

    annotate: str = ""
    crops: str = ""
    replace: bool = False
    margin: float = 0.0
    min_confidence: float = 0.0
    classes: tuple[str, ...] = ()
    images: str = ""
    max_megapixels: float = DetectConfig().max_megapixels


def folders_of(pictures: Pictures) -> list[str]:
    """The folders that pictures are written to; raises `InputError` if there is none, `OutputError` if one is not local."""
    folders = [folder for folder in (pictures.annotate, pictures.crops) if folder]
    if not folders:
        raise InputError("nothing to write: give --annotate FOLDER, --crops FOLDER, or both")
    if remote := next((folder for folder in folders if "://" in folder), ""):
        raise OutputError(f"{remote} is not a local folder: write here, then copy (for Cloud Storage: gcloud storage cp -r)")
    return folders


def write_pictures(source: str, given: Sequence[ImageRow], pictures: Pictures) -> bool:
    """Writes pictures of rows, and says in a line what there is; returns whether none is missing.

    Args:
      source: What the rows were read from, for messages.
      given: The rows.
      pictures: What to write.

    Raises:
      InputError: The rows name no images, one of them twice, or no object has a class.
      OutputError: A folder cannot be written; or FullError, its disk is full.
    """
    folders = folders_of(pictures)
    rows = _wanted(source, pictures, given)
    names = picture_names(row.uri for row in rows)
    counts, failures, staging = Counter(images=len(rows)), [], {}
    try:
        with contextlib.ExitStack() as stack:
            for folder in folders:
                os.makedirs(folder, exist_ok=True)
                staging[folder] = stack.enter_context(tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder))
            pool = stack.enter_context(ThreadPoolExecutor(_THREADS, "pictures"))
            images = shown(reads(rows, pictures.images), "writing pictures of", "images", len(rows))
            while ahead := list(itertools.islice(images, AHEAD)):
                for made in pool.map(lambda image: _write_pictures(pictures, names[image[0].uri], staging, *image), ahead):
                    if isinstance(made, Counter):
                        counts += made
                    else:
                        failures.append(made)
            if pictures.replace and (counts["crops"] or not failures):
                with locked(os.path.dirname(pictures.crops), "export", wait_s=WAIT_SECONDS, what="export"):
                    _replace_crops(f"{staging[pictures.crops]}/{_NEW}", pictures.crops)
    except OSError as err:  # of writing; an image that cannot be read is a failure
        if is_full(err):
            raise FullError.of(err, " and ".join(folders)) from err
        raise OutputError(f"{' and '.join(folders)}: expected a folder that can be written, but: {err}") from err
    return _report(pictures, counts, failures)


def _replace_crops(new: str, crops: str) -> None:
    """Puts new crops in the place of all earlier ones; they are never mixed, however this ends."""
    earlier = [path for path in _of_classes(crops) if _may_be_written(path)]
    delete_files(earlier)
    classes = {os.path.dirname(path) for path in earlier}
    sync(classes)
    move_files({path: f"{crops}/{os.path.relpath(path, new)}" for path in _of_classes(new)})
    for folder in classes:  # one without a picture is an error for torchvision's ImageFolder
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _of_classes(folder: str) -> list[str]:
    """The files that end with .jpg in the folders of a folder; links lead elsewhere."""
    classes = [each.path for each in os.scandir(folder) if each.is_dir(follow_symlinks=False)] if os.path.isdir(folder) else []
    files = (each for place in classes for each in os.scandir(place) if each.is_file(follow_symlinks=False))
    return [each.path for each in files if each.name.endswith(".jpg")]


def _wanted(source: str, pictures: Pictures, rows: Sequence[ImageRow]) -> list[ImageRow]:
    """The rows whose images are needed."""
    if not all(row.uri for row in rows):
        raise InputError(f"{source} has no names of images, only ids: COCO results need images.json in the same folder")
    refuse_duplicates(rows)
    known = {_label(row, place) for row in rows for place in range(len(row.scores))} if pictures.classes else set()
    if unknown := {*pictures.classes} - known:
        raise InputError(f"no object has the class {min(unknown)!r}; classes are {', '.join(sorted(known)[:20]) or 'none'}")
    return [row for row in rows if pictures.annotate or _kept(pictures, row)]


def _kept(pictures: Pictures, row: ImageRow) -> list[int]:
    """The places of the wanted objects in a row, the most confident first."""
    places = [place for place in np.argsort(-row.scores, kind="stable").tolist() if row.scores[place] >= pictures.min_confidence]
    return [place for place in places if not pictures.classes or _label(row, place) in pictures.classes]


def _label(row: ImageRow, place: int) -> str:
    return row.class_names[place] or f"class_{row.class_ids[place]}"


def _write_pictures(
    pictures: Pictures, name: str, staging: Mapping[str, str], row: ImageRow, read: Read
) -> Counter[str] | _Failure:
    """Writes the pictures of one image; returns how many, or why there are none."""
    content = read()
    decoded = content if isinstance(content, Failure) else decode_image(content, pictures.max_megapixels * 1e6)
    if isinstance(decoded, Failure):
        return decoded.reason, decoded.message
    pixels = decoded.pixels
    height, width = pixels.shape[:2]
    has = f"{without_query(row.uri)} has {width} x {height} pixels"
    if row.width and (row.width, row.height) != (width, height):
        return "changed", f"{has}, its row {row.width} x {row.height}"
    if max(width, height) > _JPEG_SIDE:
        return "too_large", f"{has}; a JPEG has at most {_JPEG_SIDE}"
    kept, counts = _kept(pictures, row), Counter[str]()
    made: dict[str, dict[str, bytes]] = {}
    if pictures.crops:
        made["crops"] = dict(_crops(row, kept, name, pixels, pictures.margin))
        counts["outside"] = len(kept) - len(made["crops"])
    if pictures.annotate:
        made["annotate"] = {f"{name}.jpg": annotate(_detected(row, kept, (width, height)), pixels)}
    for kind, contents in made.items():
        folder = getattr(pictures, kind)
        free = {path: content for path, content in contents.items() if _may_be_written(os.path.join(folder, path))}
        place = f"{staging[folder]}/{_NEW}" if pictures.replace else folder
        write_files({os.path.join(place, path): content for path, content in free.items()}, staging[folder])
        counts[kind] += len(free)
        counts["in_the_way"] += len(contents) - len(free)
    return counts


def _crops(row: ImageRow, kept: Iterable[int], name: str, pixels: np.ndarray, margin: float) -> Iterator[tuple[str, bytes]]:
    for place in kept:
        if region := region_of(row.boxes_xyxy[place], pixels.shape[1::-1], margin):
            x0, y0, x1, y1 = region
            confidence = min(max(row.scores[place], 0.0), 1.0)
            path = f"{safe_name(_label(row, place))}/{name}-{place + 1}-{confidence:.2f}.jpg"
            yield path, marked_jpeg(Image.fromarray(pixels[y0:y1, x0:x1]), _CROP_QUALITY)


def region_of(box_xyxy: np.ndarray, image_wh: tuple[int, int], margin: float = 0.0) -> tuple[int, int, int, int] | None:
    """The pixels of a box that lie in the image, xyxy and half-open; None if there are none.

    Args:
      box_xyxy: `(4,)`, pixels.
      image_wh: Width and height, pixels.
      margin: What to add on each side, as a share of the part of the box that lies in the image.

    >>> region_of(np.array([10.2, 10, 30, 99]), (100, 50)), region_of(np.array([10, 10, 30, 30]), (100, 50), margin=0.1)
    ((10, 10, 30, 50), (8, 8, 32, 32))
    """
    x0, y0, x1, y1 = np.clip(box_xyxy, 0, [*image_wh, *image_wh]).tolist()
    if x0 >= x1 or y0 >= y1:
        return None
    dx, dy = margin * (x1 - x0), margin * (y1 - y0)
    width, height = image_wh
    return max(0, floor(x0 - dx)), max(0, floor(y0 - dy)), min(width, ceil(x1 + dx)), min(height, ceil(y1 + dy))


def picture_names(uris: Iterable[str]) -> dict[str, str]:
    """A name without an ending for each image, safe as a file's; images whose names are alike get a hash of their URI.

    >>> list(picture_names(["a/1.jpg", "a/../..", "b/x.png", "c/X.jpg"]).values())
    ['1', '_.', 'x~2b6c8c034209632e', 'X~bf87598b87fbdd40']
    """
    names = {uri: safe_name(_stem(without_query(uri).rpartition("/")[2])) for uri in uris}
    times = Counter(name.casefold() for name in names.values())
    alike = {uri for uri, name in names.items() if times[name.casefold()] > 1 or "~" in name}
    return {uri: f"{name}~{identity_hash(uri):016x}" if uri in alike else name for uri, name in names.items()}


def _stem(name: str) -> str:
    """A name without its ending; that of a frame has its time.

    >>> _stem("a.b.jpg"), _stem("clip.mp4#t=12.480")
    ('a.b', 'clip-12.480')
    """
    video = (video_frame(name) or [name])[0]
    return os.path.splitext(video)[0] + name[len(video) :].replace("#t=", "-")


def safe_name(name: str) -> str:
    """A name of one file in one folder, without what a shell, a terminal or another system takes for something else."""
    return short_name(_UNSAFE.sub("_", "".join(c if c.isprintable() else "_" for c in name)) or "_")


def _detected(row: ImageRow, kept: list[int], image_wh: tuple[int, int]) -> DetectedImage:
    found = Detections(
        np.clip(row.boxes_xyxy[kept], -_FAR, _FAR).astype(np.float32),
        np.array([row.class_ids[place] % 2**31 for place in kept], np.int32),
        np.clip(row.scores[kept], 0, 1).astype(np.float32),
        tuple(_label(row, place) for place in kept),
    )
    return DetectedImage(ImageRef(row.uri), *image_wh, "", "", found)


def _may_be_written(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return MADE_BY in file.read(_MARK_BYTES)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _report(pictures: Pictures, counts: Counter[str], failures: Sequence[_Failure]) -> bool:
    for reason, message in dict(reversed(failures)).items():  # the first message of each reason
        console.warning("%s: %s", reason, message)
    unread = Counter(reason for reason, _ in failures)
    reasons = ", ".join(f"{reason} {times}" for reason, times in unread.most_common())
    parts = {
        plural(counts["images"], "image"): True,
        f"{counts['annotate']} annotated in {pictures.annotate}": pictures.annotate,
        f"{plural(counts['crops'], 'crop')} in {pictures.crops}": pictures.crops,
        f"{len(failures)} could not be read ({reasons})": failures,
        f"{plural(counts['outside'], 'box', 'boxes')} outside of the image or without area": counts["outside"],
        f"{counts['in_the_way']} not written, as files of other programs have their names": counts["in_the_way"],
    }
    say(["; ".join(part for part, is_shown in parts.items() if is_shown)])
    return not failures and not counts["in_the_way"]
