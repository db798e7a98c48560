"""Opens containers of images: TFRecord files, archives and videos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from models.base.image_uris import archive_member, video_frame
from pipeline.config import DetectConfig, ReadConfig
from pipeline.listing.archives import images_of_archive
from pipeline.listing.names import is_container
from pipeline.listing.tfrecords import images_of_file
from pipeline.listing.videos import images_of_video
from pipeline.records import DeadLetter, EncodedImage, ImageRef

MAX_MEGAPIXELS = DetectConfig().max_megapixels


def archive_of(name: str) -> str:
    """The archive in which a name is that of a member, all of which are read in one pass; empty for any other name."""
    found = archive_member(name) if is_container(name) else None
    return found[0] if found else ""


def reading(container: str, read: ReadConfig) -> str:
    """The settings that decide which images a container has."""
    return f"fps={read.fps:g}" if video_frame(container) else ""


def images_in(
    container: ImageRef, read: ReadConfig, max_megapixels: float = MAX_MEGAPIXELS, others: Sequence[ImageRef] = ()
) -> Iterator[EncodedImage | DeadLetter | str]:
    """The images of a container or of a part of it, and the names of members that are none; see `images_of_archive`.

    Args:
      container: The container, or a part of it.
      read: How it is read.
      max_megapixels: A video of larger frames is refused.
      others: Further members of the same archive; see `archive_of`.
    """
    if archive_member(container.uri):
        return images_of_archive(container, read.max_file_bytes, others)
    if video_frame(container.uri):
        return images_of_video(container, read.fps, max_megapixels)
    return images_of_file(container, read.max_file_bytes)
