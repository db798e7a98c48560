"""A sink is one module: it gets everything a job finds out, beside the files, and can refuse its place before the job starts."""

import dataclasses

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline import graph
from pipeline.config import Config, ModelConfig
from pipeline.errors import OutputError
from pipeline.results.completion import UNKNOWN
from pipeline.results.run import Run
from pipeline.write.sink import Results, Sink
from tests.conftest import write_bright_image
from tests.shard_rows import rows_in


@dataclasses.dataclass
class WriteNames(Sink):
    """A toy sink: one text file with a line for each image."""

    path: str

    def __post_init__(self):
        super().__init__()

    def check(self, *, write=True):
        if not self.path.endswith(".txt"):
            raise OutputError(f"names {self.path}: expected a .txt file")

    def expand(self, results: Results):
        detected = results.detected | beam.Map(lambda image: f"{image.ref.uri} {len(image.detections)}")
        dead = [part | f"Dead{n}" >> beam.Map(lambda letter: letter.ref.uri) for n, part in enumerate(results.dead)]
        return [detected, *dead] | beam.Flatten() | beam.io.WriteToText(self.path, shard_name_template="")


def test_a_sink_of_ones_own_gets_every_result_beside_the_files(tmp_path, bright_model):
    for name in ("a", "b"):
        write_bright_image(tmp_path / "in" / f"{name}.png", (64, 48), (10, 10, 30, 30))
    (tmp_path / "in" / "c.png").touch()
    out = f"{tmp_path}/out"
    config = Config(input=(f"{tmp_path}/in",), output=out, model=ModelConfig(bright_model))

    run = Run.new(out)
    with run.opened(), beam.Pipeline(runner=FnApiRunner()) as pipeline:
        graph.build(pipeline, config, [*graph.sinks(config, run, UNKNOWN), WriteNames(f"{tmp_path}/names.txt")])

    names = (tmp_path / "names.txt").read_text().splitlines()
    assert sorted(names) == [f"{tmp_path}/in/a.png 1", f"{tmp_path}/in/b.png 1", f"{tmp_path}/in/c.png"]
    assert [row["image"]["uri"] for row in rows_in(out)] == [f"{tmp_path}/in/a.png", f"{tmp_path}/in/b.png"]


def test_a_sink_refuses_its_place_in_one_line():
    with pytest.raises(OutputError, match=r"^names out/x: expected a \.txt file$"):
        WriteNames("out/x").check()
