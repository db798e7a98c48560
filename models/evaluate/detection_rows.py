"""Reads the detections of this pipeline or of another tool into one record per image.

The reader takes JSON Lines with one image a line,

    {"image": {"uri", "width", "height", …}, "detections": [{"box_xyxy", "class_id", "class_name", "confidence"}, …], …}

and COCO results, `[{"image_id", "category_id", "bbox": [x, y, w, h], "score"}, …]`. A function of the caller reads Parquet files
of such rows. An `images.json` in the same folder (a COCO data set with
`images` and `categories`) gives COCO results their file names and class names.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.base.image_uris import archive_member
from models.base.progress import shown
from models.geometry import boxes_to_xyxy


class RowsError(ValueError):
    """A file or row cannot be used; the message has one line: what was expected, what came, what to do."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ImageRow:
    """The detections of one image.

    Attributes:
      uri: Path or URI of the image; empty if only `image_id` is known.
      image_id: COCO image id if `uri` is not known, else None.
      width: Pixels, 0 if unknown.
      height: Pixels, 0 if unknown.
      boxes_xyxy: `(N, 4) float64`, pixels of the original image.
      scores: `(N,) float64`.
      class_names: N names; empty strings if only ids are known.
      class_ids: N class numbers from 0, or COCO category ids if the names are not known.
      model: Name and version of the model; empty if unknown.
    """

    uri: str
    image_id: int | str | None
    width: int
    height: int
    boxes_xyxy: npt.NDArray[np.float64]
    scores: npt.NDArray[np.float64]
    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]
    model: tuple[str, str] = ("", "")

    @property
    def name(self) -> str:
        """The file's name without its folder or archive."""
        return unpacked(self.uri).rpartition("/")[2]


ReadParquet = Callable[[Path], Iterable[Mapping[str, Any]]]
Source = str | os.PathLike[str] | Sequence[Mapping[str, Any] | ImageRow]


def unpacked(uri: str) -> str:
    """The name of an image, that of an archive's member as if the archive were a folder.

    >>> unpacked("a.zip#b/1.jpg"), unpacked("street#1.jpg")
    ('a.zip/b/1.jpg', 'street#1.jpg')
    """
    archive, member = archive_member(uri) or ("", None)
    return f"{archive}/{member}" if member else uri


def one_of(first: ImageRow, second: ImageRow) -> str:
    """How to get one of two rows of an image: for an error."""
    (name, version), (other_name, other_version) = first.model, second.model
    if name != other_name:
        return f"of the models {name or 'without a name'} and {other_name or 'without a name'}; --model takes one of them"
    if version != other_version:
        return f"of the versions {version} and {other_version} of {name}; --model-version takes one of them"
    return "each image may have one row: of several runs give one, without --all"


def read_rows(source: Source, read_parquet: ReadParquet | None = None) -> list[ImageRow]:
    """Reads all rows of an output.

    Args:
      source: A file (`.jsonl`, `.parquet`: rows; `.json`: COCO results), a folder of such files, a glob, or the rows
        themselves. Of a folder the first kind that it has counts, since all of them may hold the same rows.
      read_parquet: Gives the rows of a Parquet file, in the form of JSON Lines; None: such a file is refused.

    Raises:
      RowsError: The source has no rows, or a row has another form.
    """
    if not isinstance(source, str | os.PathLike):
        return [row if isinstance(row, ImageRow) else from_json(row, f"row {n}") for n, row in enumerate(source, 1)]
    paths = _files(os.fspath(source))
    rows = list(shown((row for path in paths for row in _read_file(path, read_parquet)), "reading", "rows"))
    if not rows:
        raise RowsError(f"{os.fspath(source)} holds no rows: expected one line for each image")
    return rows


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Reads a JSON file; an error names the file."""
    try:
        return _parsed(Path(path).read_bytes(), f"{what} {os.fspath(path)}")
    except OSError as err:
        raise RowsError(f"{what} {os.fspath(path)} cannot be read: {err.strerror or err}") from err


def _files(source: str) -> list[Path]:
    if Path(source).is_dir():
        folder = Path(source, "detections") if Path(source, "detections").is_dir() else Path(source)
        for ending in (".jsonl", ".parquet"):
            found = sorted(folder.rglob(f"*{ending}"))
            if visible := [path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts)]:
                return visible
        raise RowsError(f"{folder} holds no .jsonl or .parquet file: expected a results folder, or a folder of rows")
    paths = [Path(source)] if Path(source).is_file() else sorted(map(Path, glob.glob(source, recursive=True)))
    if not paths:
        raise RowsError(f"{source} is not there: expected a file of rows or COCO results, a folder of rows, or a glob")
    return [path for path in paths if path.is_file()]


def _read_file(path: Path, read_parquet: ReadParquet | None) -> Iterator[ImageRow]:
    if path.suffix == ".json":
        yield from _from_coco_results(path)
    elif path.suffix == ".parquet":
        if read_parquet is None:
            raise RowsError(
                f"{path}: expected JSON Lines or COCO results, got Parquet; pipeline.results.current.read_rows reads it"
            )
        for number, row in enumerate(read_parquet(path), 1):
            yield from_json(row, f"{path}, row {number}")
    else:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from_json(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _parsed(content: bytes, what: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as err:
        raise RowsError(f"{what} is not JSON: {err}") from err


def from_json(row: Mapping[str, Any], place: str) -> ImageRow:
    """A row as a job writes it; `place` names it in errors.

    Raises:
      RowsError: It has another form.
    """
    try:
        image, found, model = row["image"], row["detections"], row.get("model") or {}
        return ImageRow(
            uri=str(image["uri"]),
            image_id=None,
            width=int(image.get("width") or 0),
            height=int(image.get("height") or 0),
            boxes_xyxy=_boxes(one["box_xyxy"] for one in found),
            scores=_finite([one["confidence"] for one in found]),
            class_names=tuple(str(one["class_name"]) for one in found),
            class_ids=tuple(int(one["class_id"]) for one in found),
            model=(str(model.get("name") or ""), str(model.get("version") or "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        wanted = '{"image": {"uri"}, "detections": [{"box_xyxy", "class_id", "class_name", "confidence"}]}'
        raise RowsError(f"{place}: expected {wanted}, got {type(err).__name__}: {err}") from err


def _from_coco_results(path: Path) -> Iterator[ImageRow]:
    results, listed = read_json(path, "detections"), path.with_name("images.json")
    if not isinstance(results, list):
        raise RowsError(f"{path}: expected a list of COCO results, got {type(results).__name__}")
    known = read_json(listed, "image list") if listed.is_file() else {"images": [], "categories": []}
    try:
        images = {image["id"]: image for image in known["images"]}
        names = {category["id"]: str(category["name"]) for category in known["categories"]}
        by_image: dict[Any, list[Mapping[str, Any]]] = {image_id: [] for image_id in images}
        for result in results:
            by_image.setdefault(result["image_id"], []).append(result)
        for image_id, found in by_image.items():
            image, boxes_xywh = images.get(image_id, {}), _boxes(one["bbox"] for one in found)
            yield ImageRow(
                uri=str(image.get("file_name", "")),
                image_id=None if image else image_id,
                width=int(image.get("width") or 0),
                height=int(image.get("height") or 0),
                boxes_xyxy=boxes_to_xyxy(boxes_xywh, "xywh"),
                scores=_finite([one["score"] for one in found]),
                class_names=tuple(names.get(one["category_id"], "") for one in found),
                class_ids=tuple(int(one["category_id"]) for one in found),
            )
    except (KeyError, TypeError, ValueError) as err:
        wanted = "expected COCO results (image_id, category_id, bbox, score), and in images.json images and categories with ids"
        raise RowsError(f"{path}: {wanted}, got {type(err).__name__}: {err}") from err


def _boxes(boxes: Iterable[Sequence[float]]) -> npt.NDArray[np.float64]:
    rows = list(boxes)
    if any(len(box) != 4 for box in rows):
        raise ValueError("a box that has not 4 numbers")
    return _finite(rows).reshape(-1, 4)


def _finite(numbers: Any) -> npt.NDArray[np.float64]:
    values = np.array(numbers, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a box or confidence that is no finite number")
    return values
