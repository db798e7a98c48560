"""Contender: the streaming pipeline that Beam's documentation suggests, ReadFromPubSub | decode | RunInference | WriteToPubSub.

On the DirectRunner with `--streaming`, which takes its older bundle-based runner for this source. `python -m
tests.benchmarks.beam_streaming SUBSCRIPTION TOPIC LOG`; the log gets one line a model call: how many images.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import apache_beam as beam
from apache_beam.io.gcp.pubsub import PubsubMessage, ReadFromPubSub, WriteToPubSub
from apache_beam.ml.inference.base import KeyedModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from tests.benchmarks.beam_documented import SavedModelHandler, decode, infer, to_row
from tests.benchmarks.images import BENCH


def answer(keyed: tuple[str, Any]) -> PubsubMessage:
    """A prediction as a message."""
    return PubsubMessage(to_row(keyed).encode(), {"image_uri": f"inline:{json.loads(keyed[0])[0]}"})


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
        | "Decode" >> beam.Map(lambda message: decode(message.attributes["name"], message.data))
        | RunInference(handler)
        | "Answer" >> beam.Map(answer)
        | WriteToPubSub(topic, with_attributes=True)
    )
    pipeline.run().wait_until_finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
