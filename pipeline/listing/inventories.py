"""Inventories of buckets: which columns tell an object and its version, and the files that an S3 Inventory consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from pipeline.errors import InputError
from pipeline.storage.cloud import GS
from pipeline.storage.s3 import S3
from pipeline.storage.store import FoundFile
from pipeline.storage.stores import LISTED

_GENERATIONS = ("generation", "etag", "e_tag")  # columns that tell the version of an object, the best first
_MOST_DIGITS = 16  # of a size in bytes


class Objects(NamedTuple):
    """Where the rows of an inventory have their objects; `columns` are the header's names in lower case."""

    scheme: str
    bucket: int
    name: int
    columns: Sequence[str]

    @classmethod
    def of(cls, columns: Sequence[str]) -> Objects | None:
        """Those of `bucket` and `name` (Storage Insights) or `key` (S3 Inventory); None where a header has no such columns."""
        for name, scheme in (("name", GS), ("key", S3)):
            if "bucket" in columns and name in columns:
                return cls(scheme, columns.index("bucket"), columns.index(name), columns)
        return None

    def has(self, cells: Sequence[str]) -> bool:
        """Whether a row is of an object that is there: of its latest version, which deletes nothing, and stands for no folder."""
        told = {name.replace("_", ""): cell.lower() for name, cell in zip(self.columns, cells)}  # noqa: B905  a row may be shorter
        is_folder = len(cells) > self.name and cells[self.name].endswith("/")
        return told.get("islatest") != "false" and told.get("isdeletemarker") != "true" and not is_folder

    def found(self, cells: Sequence[str], name: str) -> FoundFile:
        """The object of this name; of Cloud Storage an ETag does not tell the version."""
        told = dict(zip(self.columns, cells))  # noqa: B905  a row may be shorter
        generation = _generation(told, _GENERATIONS[:1] if self.scheme == GS else _GENERATIONS)
        return FoundFile(f"{self.scheme}{cells[self.bucket]}/{name}", _size_bytes(told), generation)


def told_version(uri: str, fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, int]:
    """The fields of an image that are left, and the generation and size that these tell of an object."""
    told = {name.lower(): value for name, value in fields.items()} if uri.startswith(LISTED) else {}
    if not (generation := _generation(told, _GENERATIONS)):
        return fields, "", 0
    left = {name: value for name, value in fields.items() if name.lower() not in (*_GENERATIONS, "size")}
    return left, generation, _size_bytes(told)


def _generation(told: Mapping[str, Any], columns: Sequence[str]) -> str:
    return str(next((told[name] for name in columns if told.get(name)), "")).strip('"')


def _size_bytes(told: Mapping[str, Any]) -> int:
    size = str(told.get("size", ""))
    return int(size) if size.isdecimal() and len(size) <= _MOST_DIGITS else 0


def is_of_s3(path: str) -> bool:
    """Whether a file is the `manifest.json` of an S3 Inventory, by its name."""
    return path.rpartition("/")[2] == "manifest.json"


def files_of_s3(file: BinaryIO, path: str) -> tuple[Sequence[str], Sequence[str]]:
    """The files of an S3 Inventory, whose `manifest.json` this is, and the columns of those that are CSV; none of Parquet files.

    The files are `../data/<name>`, as S3 writes them, also in a copy of these folders.
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-inventory-location.html

    Raises:
      InputError: It is none, or of another format.
    """
    try:
        found = json.load(file)
        kind, names = found["fileFormat"], [each["key"].rpartition("/")[2] for each in found["files"]]
        columns = [column.strip() for column in found["fileSchema"].split(",")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise InputError(f"manifest {path}: expected that of an S3 Inventory, with fileFormat, fileSchema and files") from err
    if kind not in ("CSV", "Parquet"):
        raise InputError(f"manifest {path}: expected an S3 Inventory as CSV or Parquet, got {kind!r:.20}")
    return [f"{path.rsplit('/', 2)[0]}/data/{name}" for name in names], columns if kind == "CSV" else ()
