"""Lists the versions of a model and picks the wanted one.

The layout is TensorFlow Serving's: `<path>/<integer>/saved_model.pb`, local or on object storage. `<path>/labels.json` may name
versions: `{"stable": 7, "canary": 8}`.
https://www.tensorflow.org/tfx/serving/serving_config#model_server_configuration
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from models import digits
from models.manifest import MANIFEST, missing_file
from models.metadata import METADATA_PATH
from pipeline.config import BUNDLED, ModelConfig
from pipeline.config.engines import ONNX, SAVED_MODEL
from pipeline.config.setting import is_own_engine
from pipeline.detect.other_formats import what_it_is
from pipeline.errors import AwayError, ModelAwayError, ModelError
from pipeline.storage.files import exists, read_file
from pipeline.storage.globs import escape_glob, real_folder, real_path
from pipeline.storage.listing import files_in, location_of
from pipeline.storage.store import FoundFile, is_transient_error
from pipeline.storage.stores import LISTED
from pipeline.storage.waiting import waiting_for

LABELS = "labels.json"
_MODEL, ONNX_MODEL = "saved_model.pb", "model.onnx"
_MODELS = (_MODEL, ONNX_MODEL)
_EXTERNAL = re.compile(r"\.onnx[._]data[^/]*$")  # weights beside an ONNX file


class Version(NamedTuple):
    """A version in storage.

    Attributes:
      name: Its number, as in rows; of a model without a number its fingerprint.
      folder: Its files' folder, or an ONNX file.
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
    def manifest(self) -> FoundFile | None:
        """Its manifest, written last; None without one."""
        return next((file for file in self.files if file.path.endswith(f"/{MANIFEST}")), None)

    @property
    def missing(self) -> str:
        """A file that its manifest lists and that is not there in full; empty if all are, or without a manifest."""
        if not self.manifest:
            return ""
        root = self.manifest.path.removesuffix(MANIFEST)
        return missing_file(_content_of(self.manifest), {file.path.removeprefix(root): file.size_bytes for file in self.files})

    @property
    def kind(self) -> str:
        """`ONNX` or `SAVED_MODEL`."""
        names = {posixpath.basename(file.path) for file in self.files}
        return ONNX if _MODEL not in names and any(name.endswith(".onnx") for name in names) else SAVED_MODEL


def locate(path: str, named: str | None = None) -> tuple[str, str]:
    """Finds the model for a path: the path itself, or a version in it.

    Args:
      path: A model, or a folder of versions.
      named: A version's number or label; None: the newest.

    Returns:
      (folder of the version, its name).

    Raises:
      ModelError: There is no such model.
    """
    best = resolve_versions(path, named)[0]
    return best.folder, best.name


def resolve_versions(path: str, named: str | None = None) -> list[Version]:
    """The complete versions that match, the best first; see `locate`."""
    path = folder_of(path)
    with _reaching(path):
        return choose(path, _itself(path) if _is_model(path) else versions_in(path), named)


def how_to_use(folder: str, flags: str = "") -> str:
    """The command that uses a new version, with further flags, and which jobs use it, too."""
    model, number = os.path.split(folder)
    command = "use it with python -m pipeline.run --model"
    if not number.isdecimal():
        return f"{command} {shlex.quote(folder)}{flags}; jobs with another --model stay as they are"
    newest = resolve_versions(model or ".")[0].name
    others = f"jobs with another --model-version stay as they are, and those without one use the newest, version {newest}"
    return f"{command} {shlex.quote(model or '.')} --model-version {number}{flags}; {others}"


def choose(path: str, versions: Mapping[int, Version], named: str | None) -> list[Version]:
    """Of a folder's versions the complete ones that match, the best first; see `locate`."""
    found = {number: version for number, version in versions.items() if not version.missing}
    partial = "".join(
        f"; version {each.name} is incomplete (missing {each.missing})" for each in versions.values() if each.missing
    )
    if not found:
        raise ModelError(
            f"model {path}: expected a SavedModel ({_MODEL}) or version folders <integer>/{_MODEL} there, or an .onnx file, "
            f"found none{partial}; {what_it_is(path) or 'check --model'}"
        )
    if not named:
        return [found[number] for number in sorted(found, reverse=True)]
    labels = {} if named.isdigit() else labels_in(path)
    if not named.isdigit() and named not in labels:
        known = f"{LABELS} there has {', '.join(sorted(labels))}" if labels else f"there is no {LABELS} there that names one"
        raise ModelError(f"model {path}: expected a version's number or label as --model-version, got {named}; {known}")
    number = labels[named] if labels else int(named)
    if number not in found:
        expected = f"version {number}" + (f", which {LABELS} calls {named}" if labels else "")
        there = ", ".join(sorted(version.name if number else "a model without versions" for number, version in found.items()))
        raise ModelError(f"model {path}: expected {expected}, found {there}{partial}; check --model-version")
    return [found[number]]


def opens_as_given(model: ModelConfig, engine: str) -> bool:
    """Whether a user's own engine gets a path as it is: it is no SavedModel, no ONNX model, and has no versions of these."""
    path = model.path
    if not is_own_engine(engine) or ("://" in path and not path.startswith(LISTED)):
        return is_own_engine(engine)
    with _reaching(path):
        is_gone = is_number(posixpath.basename(path)) and not given_files(path)  # a version that somebody has removed
        return not path or not (is_gone or _is_model(folder_of(path)) or versions_in(folder_of(path)))


def as_given(model: ModelConfig) -> Version:
    """What an engine of the user's own opens: any file or folder, whose version is the fingerprint of its files, or another text.

    Raises:
      ModelError: A version is named, or storage cannot be reached.
    """
    path = model.path
    if model.model_version:
        raise ModelError(
            f"model {path}: has no versions that --model-version could name; give the path of the version as --model"
        )
    with _reaching(path):
        files = given_files(path)
        return Version(_digest(_named(path, files)) if files else "", path, files)


def given_files(path: str) -> frozenset[FoundFile]:
    """The file at a path, or the files in a folder; none where it names neither."""
    if path.startswith(LISTED):
        return frozenset(files_in(location_of(escape_glob(path)))) or files_of(path)
    return frozenset(files_in(location_of(path))) if path and os.path.exists(path) else frozenset()


def incomplete_versions(path: str, newer_than: str) -> list[Version]:
    """Versions in a folder that are newer than one, and lack files of their manifests."""
    path = folder_of(path)
    if _is_model(path):
        return []
    return [version for number, version in versions_in(path).items() if number > int(newer_than) and version.missing]


def versions_in(path: str) -> dict[int, Version]:
    """The versions in a folder, by number, also incomplete ones."""
    return {int(version.name): version for version in (_remote_versions(path) if "://" in path else _local_versions(path))}


def files_of(folder: str, files: str = "**") -> frozenset[FoundFile]:
    """The files of a model, or some of them, without hidden local ones; of an ONNX file its external data, too.

    PyTorch writes weights into `x.onnx.data`, and others into `x.onnx_data`.
    """
    if folder.endswith(".onnx"):
        beside = escape_glob(folder) + "[._]data*" if "://" in folder else ""
        local = () if beside else sorted(glob.glob(glob.escape(folder) + "[._]data*"))
        data = files_in(location_of(beside)) if beside else (each for path in local for each in files_in(location_of(path)))
        return frozenset([*files_in(location_of(escape_glob(folder) if beside else folder)), *data])
    pattern = f"{escape_glob(folder)}/{files}"
    return frozenset(files_in(location_of(pattern if "://" in folder else folder)))


@functools.lru_cache(maxsize=4096)  # each poll asks for that of each version in the folder
def _content_of(file: FoundFile) -> bytes:
    """The content of a small file; a changed one has another size or generation."""
    return read_file(file.path)


@contextmanager
def _reaching(path: str) -> Iterator[None]:
    """Names the model in a notice while storage does not answer, and in its errors."""
    try:
        with waiting_for(f"model {path}"):
            yield
    except ModelError:
        raise
    except Exception as err:
        kind = ModelAwayError if isinstance(err, AwayError) or is_transient_error(err) else ModelError
        raise kind(f"model {path}: cannot be reached: {first_line(err)}") from err


def _is_model(path: str) -> bool:
    return exists(path) if path.endswith(".onnx") else any(exists(f"{path}/{model}") for model in _MODELS)


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
    with _reaching(model.path):
        return not _is_model(folder_of(model.path))


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


def _itself(path: str) -> dict[int, Version]:
    name, files = path.rsplit("/", 1)[-1], files_of(path)
    number = int(name) if is_number(name) else 0
    return {number: Version(str(number) if is_number(name) else fingerprint(path, files), path, files)}


def fingerprint(folder: str, files: frozenset[FoundFile]) -> str:
    """The version of a model without a number: a hash of its files, so that rows of another model are others.

    Local files count by their content, so a copy is the same version; objects by their generation.
    """
    return _digest(_counted(folder, files))


def content_of_all(path: str) -> str:
    """A digest of all files of a model on this machine, also of those that links lead to."""
    return _digest(_named(path, files_of(path)))


def counted_names(folder: str) -> set[str]:
    """The names, without folders, of the files that a fingerprint follows."""
    return {posixpath.basename(file.path) for file, _ in _counted(folder, files_of(folder))}


def _counted(folder: str, files: frozenset[FoundFile]) -> frozenset[tuple[FoundFile, str]]:
    parts = (*_MODELS, "variables/", "assets/", "metadata.yaml", METADATA_PATH)
    named = _named(folder, files)
    return frozenset((file, name) for file, name in named if not name or name.startswith(parts) or _EXTERNAL.search(file.path))


def _named(path: str, files: frozenset[FoundFile]) -> frozenset[tuple[FoundFile, str]]:
    """Files of a model with their paths below its own; empty for the model itself if it is a file, and for what a link led to.

    Listings name local files by absolute paths free of links, whichever path was given.
    """
    itself = real_path(path.rstrip("/"))
    is_file = any(file.path == itself for file in files)
    root = itself if is_file or "://" in path else real_folder(path).rstrip("/")
    return frozenset((each, each.path[len(root) + 1 :] if is_file or each.path.startswith(f"{root}/") else "") for each in files)


@functools.lru_cache(maxsize=8)
def _digest(named: frozenset[tuple[FoundFile, str]]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file, name in sorted(named):
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
        if is_number(name) and any(os.path.isfile(f"{path}/{name}/{model}") for model in _MODELS):
            yield Version(str(int(name)), f"{path}/{name}", files_of(f"{path}/{name}"))


def _remote_versions(path: str) -> Iterator[Version]:
    """Takes one listing for all versions, since each costs money."""
    files: defaultdict[str, list[FoundFile]] = defaultdict(list)
    for file in files_in(location_of(f"{escape_glob(path)}/**")):
        files[file.path[len(path) + 1 :].partition("/")[0]].append(file)
    for name in filter(is_number, files):
        if {f"{path}/{name}/{model}" for model in _MODELS} & {file.path for file in files[name]}:
            yield Version(str(int(name)), f"{path}/{name}", frozenset(files[name]))


def is_number(name: str) -> bool:
    """Whether a folder's name is a version's."""
    return name.isascii() and name.isdigit()


def first_line(err: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
