"""Lists the versions of a model and picks the wanted one.

The layout is TensorFlow Serving's: `<path>/<integer>/saved_model.pb`, local or on object storage. `<path>/labels.json` may name
versions: `{"stable": 7, "canary": 8}`.
https://www.tensorflow.org/tfx/serving/serving_config#model_server_configuration
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from models import digits
from models.manifest import MANIFEST, missing_file
from models.metadata import METADATA_PATH
from pipeline.config import BUNDLED, ModelConfig
from pipeline.detect.other_formats import what_it_is
from pipeline.errors import ModelError
from pipeline.storage.files import exists, read_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import files_in, location_of
from pipeline.storage.store import FoundFile
from pipeline.storage.waiting import waiting_for

LABELS = "labels.json"
_MODEL, ONNX_MODEL = "saved_model.pb", "model.onnx"
_MODELS = (_MODEL, ONNX_MODEL)
_GOLDEN_FILE = re.compile(r"/assets\.extra/golden/([^/]+)$")
_GOLDEN_ROWS = "detections.jsonl"
_VARIABLES = re.compile(r"/variables/variables\.data-\d{5}-of-(\d{5})$")


class Version(NamedTuple):
    """A version in storage.

    Attributes:
      name: Its number, as in rows; of a SavedModel without a number its fingerprint.
      folder: Its SavedModel.
      files: Its files. Without a manifest, two polls that find the same show that no process is writing them.
    """

    name: str
    folder: str
    files: frozenset[FoundFile] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Sum over its files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def lacks(self) -> str:
        """Files that are missing, as in a version that is being copied; empty if none are."""
        return lacking(self.files)

    @property
    def is_whole(self) -> bool:
        """Whether its manifest shows that it is complete; False without one."""
        return _manifest_in(self.files) is not None and not self.lacks


def locate(path: str, named: str | None = None) -> tuple[str, str]:
    """Finds the SavedModel for a path: the path itself, or a version in it.

    Args:
      path: A SavedModel, or a folder of versions.
      named: A version's number or label; None: the newest.

    Returns:
      (folder of the SavedModel, version or "").

    Raises:
      ModelError: There is no such model.
    """
    return wanted(path, named)[0][1::-1]


def wanted(path: str, named: str | None = None) -> list[Version]:
    """The versions that match, the best first; see `locate`.

    Raises:
      ModelError: There is no such model.
    """
    path = folder_of(path)
    try:
        with waiting_for(f"model {path}"):
            there = _itself(path) if _is_model(path) else _all_in(path)
            found = {number: version for number, version in there.items() if not version.lacks}
            labels = labels_in(path) if named and not named.isdigit() and found else {}
    except ModelError:
        raise
    except Exception as err:
        raise ModelError(f"model {path}: cannot be reached: {first_line(err)}") from err
    if not found:
        raise ModelError(
            f"model {path}: expected a SavedModel ({_MODEL}) or version folders <integer>/{_MODEL} there, or an .onnx file, "
            f"found none{_partial(there)}; {what_it_is(path) or 'check --model'}"
        )
    return _chosen(path, found, named, labels, _partial(there))


def partial_versions(path: str, than: str) -> list[Version]:
    """Incomplete versions in a folder that are newer `than` one."""
    path = folder_of(path)
    if not than or _is_model(path):
        return []
    return [version for number, version in _all_in(path).items() if number > int(than) and version.lacks]


def files_of(folder: str) -> frozenset[FoundFile]:
    """The files of a model, without hidden local ones."""
    pattern = escape_glob(folder) + ("" if folder.endswith(".onnx") else "/**")
    return frozenset(files_in(location_of(pattern if "://" in folder else folder)))


def lacking(files: Iterable[FoundFile]) -> str:
    """Missing files of a SavedModel, by its manifest; without one rows of its golden images, or parts of its variables."""
    paths = [file.path for file in files]
    if manifest := _manifest_in(files):
        root = manifest.path.removesuffix(MANIFEST)
        name = missing_file(_content_of(manifest), {file.path.removeprefix(root): file.size_bytes for file in files})
        return f"{name} in the size that {MANIFEST} lists" if name else ""
    golden = {found[1] for path in paths if (found := _GOLDEN_FILE.search(path))}
    if golden and _GOLDEN_ROWS not in golden:
        return f"assets.extra/golden/{_GOLDEN_ROWS}"
    parts = Counter(int(found[1]) for path in paths if (found := _VARIABLES.search(path)))
    missing = {total - number: total for total, number in parts.items()}  # an earlier save may have left other numbers of parts
    return f"{min(missing)} of {missing[min(missing)]} files variables/variables.data-*" if missing and min(missing) > 0 else ""


def _manifest_in(files: Iterable[FoundFile]) -> FoundFile | None:
    return next((file for file in files if file.path.endswith(f"/{MANIFEST}")), None)


@functools.lru_cache(maxsize=64)
def _content_of(file: FoundFile) -> bytes:
    """The content of a small file; a changed one has another size or generation."""
    return read_file(file.path)


def _is_model(path: str) -> bool:
    return exists(path) if path.endswith(".onnx") else any(exists(f"{path}/{model}") for model in _MODELS)


def is_onnx(files: Iterable[FoundFile]) -> bool:
    """Whether a model's files are those of an ONNX model."""
    names = {posixpath.basename(file.path) for file in files}
    return _MODEL not in names and any(name.endswith(".onnx") for name in names)


def _partial(versions: Mapping[int, Version]) -> str:
    return "".join(f"; version {version.name} lacks {version.lacks} (yet)" for version in versions.values() if version.lacks)


def is_remote(path: str) -> bool:
    """Whether a model is on a server."""
    return path.startswith(("grpc://", "grpcs://"))


def is_watchable(model: ModelConfig) -> bool:
    """Whether the settings allow another version to replace the current one.

    Raises:
      ModelError: Storage cannot be reached.
    """
    if not model.model_poll_s or model.path == BUNDLED or is_remote(model.path) or (model.model_version or "").isdigit():
        return False
    try:
        with waiting_for(f"model {model.path}"):
            return not _is_model(folder_of(model.path))
    except Exception as err:
        raise ModelError(f"model {model.path}: cannot be reached: {first_line(err)}") from err


def versions_in(path: str) -> dict[int, Version]:
    """Complete versions in a folder, by number."""
    return {number: version for number, version in _all_in(path).items() if not version.lacks}


def _all_in(path: str) -> dict[int, Version]:
    found = _remote_versions(path) if "://" in path else _local_versions(path)
    return {int(version.name): version for version in found}


def labels_in(path: str) -> dict[str, int]:
    """Reads the labels of versions; none if there is no such file.

    Raises:
      ModelError: The file is malformed.
    """
    file = f"{path}/{LABELS}"
    if not exists(file):
        return {}
    try:
        labels = json.loads(read_file(file))
    except ValueError as err:
        raise ModelError(f"model {path}: {LABELS} is no JSON: {first_line(err)}") from err
    if not isinstance(labels, dict) or not all(type(number) is int for number in labels.values()):
        raise ModelError(f'model {path}: expected {LABELS} to be such as {{"stable": 7, "canary": 8}}, got {str(labels)[:200]}')
    return labels


def folder_of(path: str) -> str:
    """The folder for a model's path."""
    path = digits.FOLDER if path == BUNDLED else path.rstrip("/")
    return posixpath.dirname(path) or os.getcwd() if posixpath.basename(path) in _MODELS else path


def _chosen(path: str, found: Mapping[int, Version], named: str | None, labels: Mapping[str, int], partial: str) -> list[Version]:
    if not named:
        return [found[number] for number in sorted(found, reverse=True)]
    if not named.isdigit() and named not in labels:
        known = f"{LABELS} there has {', '.join(sorted(labels))}" if labels else f"there is no {LABELS} there that names one"
        raise ModelError(f"model {path}: expected a version's number or label as --model-version, got {named}; {known}")
    number = int(named) if named.isdigit() else labels[named]
    if number not in found:
        wanted = f"version {number}" if named.isdigit() else f"version {number}, which {LABELS} calls {named}"
        numbered = {number: version.name if number else "a SavedModel without versions" for number, version in found.items()}
        there = ", ".join(name for _, name in sorted(numbered.items()))
        raise ModelError(f"model {path}: expected {wanted}, found {there}{partial}; check --model-version")
    return [found[number]]


def _itself(path: str) -> dict[int, Version]:
    number = path.rsplit("/", 1)[-1]
    return {int(number): Version(str(int(number)), path)} if _is_number(number) else {0: Version(fingerprint(path), path)}


def fingerprint(folder: str) -> str:
    """The version of a SavedModel without a number: a hash of its files, so that rows of another model are others.

    Local files count by their content, so a copy is the same version; objects by their generation.
    """
    return _fingerprint(folder, files_of(folder))


@functools.lru_cache(maxsize=8)
def _fingerprint(folder: str, files: frozenset[FoundFile]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(files):
        name = file.path[len(folder) + 1 :]
        if name and not name.startswith((*_MODELS, "variables/", "assets/", "metadata.yaml", METADATA_PATH)):
            continue
        digest.update(name.encode("utf-8", "surrogatepass"))
        if "://" in file.path:
            digest.update(f"{file.size_bytes} {file.generation}".encode())
        else:
            with open(file.path, "rb") as content:
                while part := content.read(1 << 20):
                    digest.update(part)
    return digest.hexdigest()


def _local_versions(path: str) -> Iterator[Version]:
    """Follows links to versions: renaming a link releases a version atomically."""
    for name in os.listdir(path) if os.path.isdir(path) else ():
        if _is_number(name) and any(os.path.isfile(f"{path}/{name}/{model}") for model in _MODELS):
            yield Version(str(int(name)), f"{path}/{name}", frozenset(files_in(location_of(f"{path}/{name}"))))


def _remote_versions(path: str) -> Iterator[Version]:
    """Takes one listing for all versions, since each costs money."""
    files: defaultdict[str, list[FoundFile]] = defaultdict(list)
    for file in files_in(location_of(f"{escape_glob(path)}/**")):
        files[file.path[len(path) + 1 :].partition("/")[0]].append(file)
    for name in filter(_is_number, files):
        if {f"{path}/{name}/{model}" for model in _MODELS} & {file.path for file in files[name]}:
            yield Version(str(int(name)), f"{path}/{name}", frozenset(files[name]))


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def first_line(err: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
