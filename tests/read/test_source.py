"""A source is one module: it gives images to the graph as files do, and can refuse its place before the job starts."""

import dataclasses
import zipfile

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline import graph
from pipeline.config import Config, ModelConfig
from pipeline.errors import InputError
from pipeline.read.source import ReadOutputs, Source
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.results.completion import UNKNOWN
from pipeline.results.run import Run
from pipeline.stats.summary import JobStats
from pipeline.write.write_shards import read_stats
from tests.conftest import write_bright_image
from tests.shard_rows import rows_in


@dataclasses.dataclass
class ReadZip(Source):
    """A toy source: the members of a zip archive."""

    path: str

    def __post_init__(self):
        super().__init__()

    def check(self):
        if not zipfile.is_zipfile(self.path):
            raise InputError(f"archive {self.path}: expected a zip archive")

    def expand(self, begin):
        names = begin | beam.Create([self.path]) | beam.FlatMap(lambda path: zipfile.ZipFile(path).namelist())
        images = names | "Read" >> beam.Map(self._read)
        counted = images | "Count" >> beam.Map(lambda _: JobStats(read=1))
        return ReadOutputs(images, begin | "None" >> beam.Create([]).with_output_types(DeadLetter), counted)

    def _read(self, name):
        return EncodedImage(ImageRef(f"{self.path}/{name}"), zipfile.ZipFile(self.path).read(name))


@pytest.mark.slow
def test_a_source_of_ones_own_feeds_the_graph_as_files_do(tmp_path, bright_model):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for name in ("a", "b"):
            write_bright_image(tmp_path / f"{name}.png", (64, 48), (10, 10, 30, 30))
            archive.write(tmp_path / f"{name}.png", f"{name}.png")
        archive.writestr("c.png", b"")
    out = f"{tmp_path}/out"
    config = Config(output=out, model=ModelConfig(bright_model))
    source = ReadZip(f"{tmp_path}/images.zip")
    source.check()

    run = Run.new(out)
    with run.opened():
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            graph.build(pipeline, config, graph.sinks(config, run, UNKNOWN), source)
        stats = read_stats(run)

    assert [row["image"]["uri"].rpartition("/")[2] for row in rows_in(out)] == ["a.png", "b.png"]
    assert (stats.read, stats.detected, sum(stats.dead.values()), stats.skipped) == (3, 2, 1, 0)


def test_a_source_refuses_its_place_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"^archive .*/no.zip: expected a zip archive$"):
        ReadZip(f"{tmp_path}/no.zip").check()


def test_the_source_of_a_config_is_checked_with_its_inputs(tmp_path):
    """Also that an empty one may be none."""
    with pytest.raises(InputError, match=r"^input .*/gone: no file matches"):
        graph.source_of(Config(input=(f"{tmp_path}/gone",))).check()
    graph.source_of(Config(input=(f"{tmp_path}/gone",), allow_empty=True)).check()
