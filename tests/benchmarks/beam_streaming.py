"""Contender: the streaming pipeline that Beam's documentation suggests, ReadFromPubSub | decode | RunInference | WriteToPubSub.

On the DirectRunner with `--streaming`, which takes its older bundle-based runner for this source. `python -m
tests.benchmarks.beam_streaming SUBSCRIPTION TOPIC LOG`; the log gets one line a model call: how many images.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.io.gcp.pubsub import PubsubMessage, ReadFromPubSub, WriteToPubSub
from apache_beam.ml.inference.base import KeyedModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from PIL import Image

from tests.benchmarks import work
from tests.benchmarks.beam_documented import SavedModelHandler, infer
from tests.benchmarks.images import BENCH


def decode(message: PubsubMessage) -> tuple[str, np.ndarray]:
    """A message -> (what the answer needs, pixels for the model)."""
    image = Image.open(io.BytesIO(message.data)).convert("RGB")
    resized = image.resize((work.SIDE, work.SIDE), Image.Resampling.BILINEAR)
    return json.dumps([message.attributes["name"], *image.size]), np.asarray(resized, dtype=np.float32) / 255.0


def answer(keyed: tuple[str, Any]) -> PubsubMessage:
    """A prediction as a message."""
    name, width, height = json.loads(keyed[0])
    arrays = {key: np.asarray(value)[None] for key, value in keyed[1].inference.items()}
    return PubsubMessage(work.row(name, width, height, arrays, 0).encode(), {"image_uri": f"inline:{name}"})


def main(subscription: str, topic: str, log: str) -> None:
    """Runs until killed."""

    def infer_and_note(model: Any, batch: Any, arguments: Any, model_id: str | None = None) -> Any:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{len(batch)}\n")
        return infer(model, batch, arguments, model_id)

    handler = KeyedModelHandler(SavedModelHandler(model_uri=str(BENCH / "model"), inference_fn=infer_and_note))
    pipeline = beam.Pipeline(options=PipelineOptions(["--streaming"]))
    _ = (
        pipeline
        | ReadFromPubSub(subscription=subscription, with_attributes=True)
        | "Decode" >> beam.Map(decode)
        | RunInference(handler)
        | "Answer" >> beam.Map(answer)
        | WriteToPubSub(topic, with_attributes=True)
    )
    pipeline.run().wait_until_finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
