"""Contender: tfx_bsl's RunInference on the files' bytes, which the graph decodes, on Beam's in-memory runner.

https://www.tensorflow.org/tfx/tfx_bsl/api_docs/python/tfx_bsl/public/beam/RunInference, keyed, with its own batch sizes.
"""

from __future__ import annotations

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
    """As tfx_bsl loads by itself, and a warm-up."""
    with work.loading():
        session = tf.compat.v1.Session(graph=tf.compat.v1.Graph())
        signature = tf.compat.v1.saved_model.loader.load(session, tags, path).signature_def[_SIGNATURE]
        fed = next(iter(signature.inputs.values())).name
        blank = tf.io.encode_jpeg(tf.zeros((480, 640, 3), tf.uint8)).numpy()
        for _ in range(2):
            session.run([output.name for output in signature.outputs.values()], {fed: [blank] * 8})
    return session


def read(file: Any) -> tuple[str, bytes]:
    """A file -> (its path, its bytes)."""
    return file.metadata.path, file.read()


def to_row(keyed: tuple[str, Any]) -> str:
    """A prediction log as a row."""
    answer = {name: tf.make_ndarray(value) for name, value in keyed[1].predict_log.response.outputs.items()}
    return work.row(keyed[0], *answer["wh"][0].tolist(), answer, 0)


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    model = model_spec_pb2.SavedModelSpec(model_path=args.model, signature_name=[_SIGNATURE])
    spec = model_spec_pb2.InferenceSpecType(saved_model_spec=model)
    with work.measured(), beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | MatchFiles(f"{args.images}/*")
            | ReadMatches()
            | beam.Map(read).with_output_types(tuple[str, bytes])
            | RunInference(spec, load_override_fn=load)
            | beam.Map(to_row)
            | WriteToText(f"{args.output}/rows", file_name_suffix=".jsonl")
        )


if __name__ == "__main__":
    main()
