"""`python -m pipeline.row_schema`: writes the JSON Schema of the output rows: detections or dead letters.

    python -m pipeline.row_schema detections > detections.schema.json
    python -m pipeline.row_schema dead_letters > dead_letters.schema.json

Each line under `detections/` and `dead_letters/`, and the body of each message of a stream, fits its schema.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from pipeline.extra_fields import LEFT_OUT
from pipeline.failures import REASONS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _object(description: str, properties: Mapping[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    of_object = {"type": "object", "description": description, "additionalProperties": False}
    return {**of_object, "properties": dict(properties), "required": required}


_URI = _text("path or URI of the image, as given; inline:<name> if its message held it")
_GENERATION = _text("the object's generation on Cloud Storage; size and time of a local file; a hash of an inline image")
_EXTRA = {
    "type": "object",
    "description": "extra fields of the image in its manifest or message; absent if there are none",
    "properties": {
        LEFT_OUT: {
            "type": "integer",
            "minimum": 1,
            "description": "the number of fields left out, which were too large or too many",
        }
    },
}
_MODEL = {"name": _text("its name"), "version": _text("its version; empty if it has none")}


def detection_schema() -> dict[str, Any]:
    """The schema of a row of detections, in JSON Schema's dialect 2020-12."""
    size = {"type": "integer", "minimum": 1}
    image = {
        **{"uri": _URI, "generation": _GENERATION},
        "width": {**size, "description": "of the upright image, in pixels"},
        "height": {**size, "description": "of the upright image, in pixels"},
    }
    found = {
        "box_xyxy": {
            **{"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4},
            "description": "x0, y0, x1, y1 in pixels of the original upright image, to 0.01; may lie beyond its edges",
        },
        "class_id": {"type": "integer", "description": "the model's number of the class, from 0"},
        "class_name": _text("its name"),
        "confidence": {"type": "number", "minimum": 0, "maximum": 1, "description": "to 0.00001"},
    }
    row = {
        "image": _object("which image", image),
        "model": _object("which model", _MODEL),
        "detections": {"type": "array", "items": _object("one object", found), "description": "confidence descending"},
        "extra": _EXTRA,
    }
    return {"$schema": _DIALECT, "title": "Detections", **_object("The detections of one image.", row, ("extra",))}


def dead_letter_schema() -> dict[str, Any]:
    """The schema of a dead letter, in JSON Schema's dialect 2020-12."""
    row = {
        "image": _object("the image, as far as known", {"uri": _URI, "generation": _GENERATION}, ("uri", "generation")),
        "model": _object("the model that failed; absent if none was called", _MODEL),
        "stage": {"enum": list(REASONS), "description": "the stage that failed"},
        "reason": {"enum": sorted({reason for reasons in REASONS.values() for reason in reasons}), "description": "why"},
        "message": _text("the reason for a person: what was expected, what came"),
        "record": _text("the image's place in a TFRecord file: <file>@<start>-<end>, in bytes; is an input, too"),
        "extra": _EXTRA,
        "payload_base64": {
            **_text("the message as received, if it names no image that can be read again"),
            "contentEncoding": "base64",
        },
    }
    of_stage = [{"properties": {"stage": {"const": stage}, "reason": {"enum": list(REASONS[stage])}}} for stage in REASONS]
    of_row = _object("An image, or a message, without a result.", row, ("model", "record", "extra", "payload_base64"))
    return {"$schema": _DIALECT, "title": "Dead letter", **of_row, "oneOf": of_stage}


_SCHEMAS = {"detections": detection_schema, "dead_letters": dead_letter_schema}


def main() -> None:
    """Writes the schema that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.row_schema", description=__doc__.partition("\n")[0])
    parser.add_argument("of", choices=_SCHEMAS)
    json.dump(_SCHEMAS[parser.parse_args().of](), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
