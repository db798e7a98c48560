"""The streaming graph as a runner sees it: names by which a running job is updated, nothing between reading and publishing."""

import re
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.pipeline import PipelineVisitor
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.environments import EmbeddedPythonEnvironment
from apache_beam.typehints import typehints

from pipeline import graph
from pipeline.config import load_config
from pipeline.results.run_folder import Run
from pipeline.stream.shared import RunSettings
from pipeline.worker import WorkerContext

GOLDEN = Path(__file__).parent / "golden" / "streaming_steps.txt"
BEAMS_OWN = re.compile(
    r"/(Impulse|MaybeReshuffle|Map\(decode\)|FlatMap\(<lambda at core.py:\d+>\)|ParDo\(\w+\)|_?GroupByKey\w*)($|/)"
)
BEAMS_COMPOSITES = ("DetectObjects/RunInference/",)


def build(in_process: bool, native_source: bool = False) -> beam.Pipeline:
    places = {"input": ["projects/test-project/subscriptions/images"], "output": "projects/test-project/topics/detections"}
    config = load_config(["configs/streaming_pubsub_direct.yaml"], {**places, "stream.archive": "out", "model.path": "digits"})
    pipeline = beam.Pipeline(runner=FnApiRunner())
    context = None if in_process else WorkerContext(Run("out", "job"), list)
    run = RunSettings("job", config, results="out", worker_context=context)
    graph.build_streaming(pipeline, config, run, native_source=native_source)
    return pipeline


def steps_of(pipeline: beam.Pipeline) -> dict[str, object]:
    found: dict[str, object] = {}

    class Collect(PipelineVisitor):
        def enter_composite_transform(self, node):
            found[node.full_label] = node

        def visit_transform(self, node):
            found[node.full_label] = node

    pipeline.visit(Collect())
    return {label: node for label, node in found.items() if label}


def own(labels: object) -> list[str]:
    return sorted(label for label in labels if not BEAMS_OWN.search(label) and not label.startswith(BEAMS_COMPOSITES))


def test_steps_keep_their_names():
    """A running job is updated by them; where a change is meant, write the file anew."""
    assert own(steps_of(build(in_process=True))) == GOLDEN.read_text().split()


@pytest.mark.parametrize("in_process", [True, False])
def test_each_step_is_named_by_us(in_process):
    """A default label holds a function's or a DoFn's name, or a file and line, and changes with it."""
    defaults = [
        label for label in own(steps_of(build(in_process))) if re.search(r"\(|lambda", label) and not label.endswith("(_part)")
    ]
    assert defaults == []


def way_to(steps: dict[str, object], label: str) -> list:
    """The steps between the pulling of messages and one of the last, backwards."""
    node, way = steps[label], []
    while node.full_label != "ReadMessages/Pull":
        way.append(node)
        (source,) = node.main_inputs.values()
        node = source.producer
    return way


PUBLISHING = {f"Publish{what}" for what in ("Refused", "Undetected", "Detections")}


def test_nothing_but_plain_steps_lies_between_reading_and_publishing():
    """A flatten, a shuffle or a side input would part them, and messages would be acknowledged before they are answered."""
    steps = steps_of(build(in_process=True))
    assert {label for label in steps if re.fullmatch(r"Publish\w+", label)} == PUBLISHING
    for node in (node for label in PUBLISHING for node in way_to(steps, label)):
        assert isinstance(node.transform, beam.ParDo) and not node.side_inputs, node.full_label


def test_the_in_memory_runner_has_one_stage_from_pulling_to_publishing():
    """So it finalizes a bundle, which acknowledges its messages, only when all is published and archived."""
    job = build(in_process=True).to_runner_api(default_environment=EmbeddedPythonEnvironment.default())
    stages = [
        {transform.unique_name.removesuffix("/Process") for transform in stage.transforms}
        for stage in FnApiRunner().create_stages(job)[1]
    ]
    (stage,) = [names for names in stages if names & PUBLISHING]
    assert stage >= {"ReadMessages/Pull", *PUBLISHING}


@pytest.mark.parametrize("in_process", [True, False])
def test_no_image_is_read_before_duplicates_are_found(in_process):
    """What is shuffled by identity are names, and what messages themselves carry. A service's own source may read them."""
    assert "ReadMessages/ReadFromPubSub" in steps_of(build(in_process=False, native_source=True))
    path = [node.full_label for node in way_to(steps_of(build(in_process)), "PublishDetections")]
    assert path.index("DetectObjects/StartDetecting") < path.index("DropDuplicates")


def types_in(hint: object) -> set[object]:
    """A type and all that it is made of."""
    parts = hint._inner_types() if isinstance(hint, typehints.TypeConstraint) else ()
    return {hint}.union(*map(types_in, parts))


@pytest.mark.parametrize("in_process", [True, False])
def test_no_text_crosses_an_edge_as_text(in_process):
    """Beam's coder of text takes Unicode only: half a surrogate pair fails the bundle, at each start. Records take any text."""
    outputs = {
        f"{label}/{tag}": output.element_type
        for label, node in steps_of(build(in_process)).items()
        for tag, output in node.outputs.items()
    }
    assert len(outputs) > 10
    assert [name for name, hint in outputs.items() if str in types_in(hint)] == []
