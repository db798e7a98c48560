"""Contender: what the documentation of Beam's RunInference shows for images: decode in a Map, `TFModelHandlerNumpy`.

https://beam.apache.org/documentation/ml/inference-overview/ and its TensorFlow notebooks. Two lines differ from there:
`load_model` is overridden, since the handler's own cannot read a SavedModel with Keras 3, and the handler is keyed, so that
rows know their image. The DirectRunner is the in-memory one: left alone it would look for Prism first and fall back to this.

`--skip-bad` is Beam's dead-letter output of `Map`:
https://beam.apache.org/documentation/sdks/python-dead-letter-queues/ (`with_exception_handling`).
"""

from __future__ import annotations

import io
import json
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.io import WriteToText
from apache_beam.io.fileio import MatchFiles, ReadMatches
from apache_beam.ml.inference import utils
from apache_beam.ml.inference.base import KeyedModelHandler, RunInference
from apache_beam.ml.inference.tensorflow_inference import TFModelHandlerNumpy
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from PIL import Image

from tests.benchmarks import work


class SavedModelHandler(TFModelHandlerNumpy):
    """Beam's handler; loads with TensorFlow's own loader."""

    def load_model(self) -> Any:
        import tensorflow as tf

        with work.loading():
            model = tf.saved_model.load(self._model_uri)
            for _ in range(2):
                model.signatures["serving_default"](images=tf.zeros((8, work.SIDE, work.SIDE, 3)))
        return model


def decode(file: Any) -> tuple[str, np.ndarray]:
    """A file -> (what the row needs, pixels for the model)."""
    return decoded(file.metadata.path, file.read())


def decoded(name: str, content: bytes) -> tuple[str, np.ndarray]:
    """The same of a name and the content of an image."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    resized = image.resize((work.SIDE, work.SIDE), Image.Resampling.BILINEAR)
    return json.dumps([name, *image.size]), np.asarray(resized, dtype=np.float32) / 255.0


def infer(model: Any, batch: Any, _arguments: Any, model_id: str | None = None) -> Any:
    """Calls the signature."""
    import tensorflow as tf

    answer = model.signatures["serving_default"](images=tf.convert_to_tensor(np.stack(batch)))
    return utils._convert_to_result(batch, answer, model_id)


def to_row(keyed: tuple[str, Any]) -> str:
    """A prediction as a row."""
    uri, width, height = json.loads(keyed[0])
    return work.row(uri, width, height, {name: np.asarray(value)[None] for name, value in keyed[1].inference.items()}, 0)


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    import tensorflow  # noqa: F401  its import is start-up, not work

    handler = KeyedModelHandler(SavedModelHandler(model_uri=args.model, inference_fn=infer))
    with work.measured(), beam.Pipeline(runner=FnApiRunner()) as pipeline:
        files = pipeline | MatchFiles(f"{args.images}/*") | ReadMatches()
        if args.skip_bad:
            images, _ = files | beam.Map(decode).with_exception_handling()
        else:
            images = files | beam.Map(decode)
        rows = images | RunInference(handler) | beam.Map(to_row)
        _ = rows | WriteToText(f"{args.output}/rows", file_name_suffix=".jsonl")


if __name__ == "__main__":
    main()
