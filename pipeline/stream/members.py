"""Opens the archives, TFRecord files and videos that messages name, as a batch job does, within bounds.

All members of a container are images of the message that named it: it is acknowledged when the last of them has its row. So a
job that dies amid a container gets the message again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pipeline.config import Config
from pipeline.failures import Failure
from pipeline.feed.read_image import note_storage
from pipeline.listing.containers import images_in
from pipeline.records import DeadLetter, EncodedImage, ImageRef

MAX_MEMBERS = 1000  # of one container, as of one message
MAX_BYTES = 256_000_000  # of one container's images
_AGAIN_SECONDS = 5.0  # while storage fails


def members_of(
    container: ImageRef, config: Config, stop: threading.Event, others: Sequence[ImageRef] = ()
) -> Iterator[EncodedImage | DeadLetter | str]:
    """The images of a container, each read when it is asked for, and the names of members that are none.

    While storage fails, it waits, and goes on behind the members that it has given.

    Args:
      container: As a message names it. Its members are of the same message.
      config: How containers are read.
      stop: Ends the waiting for storage. The container is then skipped, so its message comes again.
      others: Further members of the same archive that the message names, which are read in the same pass.

    Yields:
      What `images_in` yields, with the fields of the message; behind the bounds one dead letter that names batch.
    """
    newest, *more = (replace(each, generation="", size_bytes=0) for each in (container, *others))
    seen, size_bytes = set[tuple[str, bool]](), 0  # a second image of one name is a dead letter
    if container.size_bytes > MAX_BYTES:
        yield _too_large(newest)
        return
    while True:
        failed = None
        for member in images_in(newest, config.read, config.detect.max_megapixels, more):
            if isinstance(member, DeadLetter) and member.reason == "storage_unavailable":
                failed = member
                break
            name = member if isinstance(member, str) else member.ref.record or member.ref.uri
            if (name, isinstance(member, DeadLetter)) in seen:
                continue
            seen.add((name, isinstance(member, DeadLetter)))
            size_bytes += len(member.content) if isinstance(member, EncodedImage) else 0
            if len(seen) > MAX_MEMBERS or size_bytes > MAX_BYTES:
                names = {given for given, _ in seen}
                yield from (_too_large(each) for each in (newest, *more) if each.uri == name or each.uri not in names)
                return
            yield member if isinstance(member, str) else _of_message(member, container)
        note_storage(failed.message if failed else "", "until it is back")
        if not failed:
            return
        if stop.wait(_AGAIN_SECONDS):
            yield replace(failed, skipped=True)
            return


def _of_message(member: EncodedImage | DeadLetter, container: ImageRef) -> EncodedImage | DeadLetter:
    """A member as an image that the container's message asks for."""
    fields = {"event_time": container.event_time, "request_id": container.request_id, "message_id": container.message_id}
    return replace(member, ref=replace(member.ref, **fields))


def _too_large(container: ImageRef) -> DeadLetter:
    bounds = f"{MAX_MEMBERS} members or {MAX_BYTES / 1e6:.0f} MB of images, the most that a stream opens"
    message = f"{container.uri} has more than {bounds}; a batch job reads it: --mode batch --input {container.uri}"
    return Failure("read", "too_large_for_stream", message).dead_letter(container)
