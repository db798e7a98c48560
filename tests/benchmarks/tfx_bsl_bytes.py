"""Contender: tfx_bsl's RunInference on the same JPEG bytes, which the graph decodes, on Beam's in-memory runner."""

from __future__ import annotations

import json
import time
from typing import Any

import apache_beam as beam
import tensorflow as tf
from apache_beam.io import WriteToText
from apache_beam.io.fileio import MatchFiles, ReadMatches
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from tfx_bsl.public.beam import RunInference
from tfx_bsl.public.proto import model_spec_pb2

from tests.benchmarks import work

_SIGNATURE = "from_bytes"


def load(path: str, tags: Any) -> Any:
    """As tfx_bsl loads by itself, plus a warm-up and a note of how long both took."""
    started_at = time.time()
    session = tf.compat.v1.Session(graph=tf.compat.v1.Graph())
    signature = tf.compat.v1.saved_model.loader.load(session, tags, path).signature_def[_SIGNATURE]
    fed = next(iter(signature.inputs.values())).name
    blank = tf.io.encode_jpeg(tf.zeros((480, 640, 3), tf.uint8)).numpy()
    for _ in range(2):
        session.run([output.name for output in signature.outputs.values()], {fed: [blank] * 8})
    work.note_load(started_at)
    return session


def read(file: Any) -> tuple[str, bytes]:
    """A file -> (what the row needs, its bytes)."""
    content = file.read()
    return json.dumps([file.metadata.path, *work.jpeg_wh(content)]), content


def to_row(keyed: tuple[str, Any]) -> str:
    """A prediction log as a row."""
    uri, width, height = json.loads(keyed[0])
    outputs = keyed[1].predict_log.response.outputs
    return work.row(uri, width, height, {name: tf.make_ndarray(value) for name, value in outputs.items()}, 0)


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    model = model_spec_pb2.SavedModelSpec(model_path=args.model, signature_name=[_SIGNATURE])
    spec = model_spec_pb2.InferenceSpecType(saved_model_spec=model)
    with work.Work(), beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | MatchFiles(f"{args.images}/*.jpg")
            | ReadMatches()
            | beam.Map(read).with_output_types(tuple[str, bytes])
            | RunInference(spec, load_override_fn=load)
            | beam.Map(to_row)
            | WriteToText(f"{args.output}/rows", file_name_suffix=".jsonl")
        )


if __name__ == "__main__":
    main()
