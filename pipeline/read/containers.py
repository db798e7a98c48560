"""Containers of images, TFRecord files, archives and videos, behind one function that opens each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pipeline.config import DetectConfig, ReadConfig
from pipeline.config.paths import local_path
from pipeline.read import tfrecords
from pipeline.read.archives import archive_of, images_of_archive, is_archive
from pipeline.read.fetch import RETRY_SECONDS
from pipeline.read.image_names import names_image
from pipeline.read.tfrecords import images_of_file, is_tfrecord
from pipeline.read.videos import images_of_video, is_video, video_of
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.globs import real_folder, real_path

MAX_MEGAPIXELS = DetectConfig().max_megapixels


def is_container(name: str) -> bool:
    """Whether a name or pattern is that of TFRecord files, archives or videos, or of a part of one."""
    if "#" not in name and names_image(name):  # most names; the other patterns take longer
        return is_tfrecord(name)
    return is_tfrecord(name) or is_archive(name) or is_video(name)


def is_image_by_name(path: str) -> bool:
    """Whether a file is one to read by its name alone: an image, a TFRecord file, an archive, or a video."""
    return names_image(path) or is_container(path)


def file_of(uri: str) -> str:
    """The file of a part of a container; any other name is that of a file itself."""
    return video_of(archive_of(tfrecords.file_of(uri)))


def full_name(uri: str, real_folder: Callable[[str], str] = real_folder) -> str:
    """The one name of an image or a part of a container: of a local one, also as a `file:` URI, see `real_path`; a URI stays."""
    path = file = file_of(uri)
    if file.lower().startswith("file:"):
        with contextlib.suppress(ValueError):  # of another machine
            path = local_path(file)
    return real_path(path, real_folder) + uri[len(file) :]


def images_in(
    container: ImageRef,
    read: ReadConfig,
    retry_seconds: float = RETRY_SECONDS,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Iterator[EncodedImage | DeadLetter | str]:
    """The images of a container or of a part of it, and the names of members that are none; see `images_of_archive`."""
    if is_video(container.uri) and not is_archive(container.uri):
        return images_of_video(container, read.fps, max_megapixels, retry_seconds)
    images = images_of_archive if is_archive(container.uri) else images_of_file
    return images(container, int(read.max_file_mb * 1e6), retry_seconds)
