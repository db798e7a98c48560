"""The stream that Beam's documentation suggests: ReadFromPubSub, a Map that decodes, RunInference, WriteToPubSub.

    python -m tests.benchmarks.peers.beam_stream SUBSCRIPTION TOPIC MODEL SIZES

It runs on the DirectRunner with `--streaming` until it is killed. The file SIZES gets a line for each call of the model: how many
images it had.
"""

from __future__ import annotations

import sys
from typing import Any

import apache_beam as beam
from apache_beam.io.gcp.pubsub import PubsubMessage, ReadFromPubSub, WriteToPubSub
from apache_beam.ml.inference.base import KeyedModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from tests.benchmarks.peers.beam_documented import SavedModelHandler, decoded, infer, to_row


def main(subscription: str, topic: str, model: str, sizes: str) -> None:
    """Runs it."""

    def infer_and_note(model: Any, batch: Any, arguments: Any, model_id: str | None = None) -> Any:
        with open(sizes, "a", encoding="utf-8") as file:
            file.write(f"{len(batch)}\n")
        return infer(model, batch, arguments, model_id)

    handler = KeyedModelHandler(SavedModelHandler(model_uri=model, inference_fn=infer_and_note))
    with beam.Pipeline(options=PipelineOptions(["--streaming"])) as pipeline:
        _ = (
            pipeline
            | ReadFromPubSub(subscription=subscription, with_attributes=True)
            | "Decode" >> beam.Map(lambda message: decoded(message.attributes["name"], message.data))
            | RunInference(handler)
            | "Answer" >> beam.Map(lambda keyed: PubsubMessage(to_row(keyed).encode(), {}))
            | WriteToPubSub(topic, with_attributes=True)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
