"""Opens containers of images: TFRecord files, archives and videos."""

from __future__ import annotations

from collections.abc import Iterator

from models.image_uris import archive_member, video_frame
from pipeline.config import DetectConfig, ReadConfig
from pipeline.read.archives import images_of_archive
from pipeline.read.tfrecords import images_of_file
from pipeline.read.videos import images_of_video
from pipeline.records import DeadLetter, EncodedImage, ImageRef

MAX_MEGAPIXELS = DetectConfig().max_megapixels


def images_in(
    container: ImageRef, read: ReadConfig, max_megapixels: float = MAX_MEGAPIXELS
) -> Iterator[EncodedImage | DeadLetter | str]:
    """The images of a container or of a part of it, and the names of members that are none; see `images_of_archive`."""
    if archive_member(container.uri):
        return images_of_archive(container, read.max_file_bytes)
    if video_frame(container.uri):
        return images_of_video(container, read.fps, max_megapixels)
    return images_of_file(container, read.max_file_bytes)
