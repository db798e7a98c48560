"""`RecordCoder`: a Beam coder for records in shuffles and state, so that a later release reads an earlier one's bytes.

An updated streaming job continues with the contents of its shuffles and state. Beam's default coder pickles a record's fields
in order, so a new field breaks the update. This one writes the fields by name (see `data_format`).
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import apache_beam as beam
from apache_beam.coders import Coder
from apache_beam.typehints import typehints

from pipeline.data_format import from_plain, pack, parse
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef

_RECORDS = {record.__name__: record for record in (ImageRef, EncodedImage, DetectedImage, DeadLetter)}
_Name = Annotated[str, _RECORDS.__contains__]


class RecordCoder(Coder):
    """Codes `ImageRef`, `EncodedImage`, `DetectedImage`, `DeadLetter`, and unions of them: `[name of the record, its fields]`."""

    def encode(self, record: Any) -> bytes:
        """The bytes of a record."""
        return pack([type(record).__name__, record])

    def decode(self, content: bytes) -> Any:
        """The record of these bytes.

        Raises:
          DataError: They are no record.
        """
        named, blobs = parse(content)
        name, fields = from_plain(tuple[_Name, Any], named)
        return from_plain(_RECORDS[name], fields, blobs)

    def is_deterministic(self) -> bool:
        """Equal records have equal bytes."""
        return True

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @classmethod
    def from_type_hint(cls, typehint: Any, _registry: Any) -> RecordCoder:
        """The coder of a record or of a union of records.

        Raises:
          ValueError: The type is another one.
        """
        members = getattr(typehint, "union_types", ()) if isinstance(typehint, typehints.TypeConstraint) else get_args(typehint)
        if not {*(members or [typehint])} <= {*_RECORDS.values()}:
            raise ValueError(f"expected records, got {typehint}")
        return cls()


def register_record_coder() -> None:
    """Registers `RecordCoder` for steps whose output type is a record, or a union of records."""
    for record in _RECORDS.values():
        beam.coders.registry.register_coder(record, RecordCoder)
    beam.coders.registry.register_fallback_coder(RecordCoder)  # a union has no coder of its own
