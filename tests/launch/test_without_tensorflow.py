"""ONNX files without TensorFlow: a job imports none, and where none is installed, whatever takes it says so in a line."""

import subprocess
import sys

import pytest

from pipeline.own_python import environment
from pipeline.results.layout import DETECTIONS
from tests.fixtures import RELEASE
from tests.launch.jobs import write_images
from tests.onnx_files import write_yolo

NAMES = ("tensorflow", "tfx_bsl", "keras", "tensorflow_serving")
JOB = f"""
import sys
from pipeline.run import main
code = main(sys.argv[1:])
print(code, [name for name in {NAMES} if name in sys.modules])
"""
NOT_INSTALLED = f"""
import sys
sys.modules.update(dict.fromkeys({NAMES}))
from pipeline.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
EXTRA = "pip install 'hybrid-detection-pipeline[tensorflow]'"


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=300)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_job_with_an_onnx_file_imports_no_tensorflow(engine, tmp_path):
    """Neither its memory nor its seconds of start-up."""
    write_images(tmp_path / "in", "a.png", "b.png")
    flags = ["--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out", "--model", write_yolo(tmp_path / "toy.onnx")]
    job = python(JOB, *flags, "--engine", engine, "--feeder-processes", "1")
    assert job.stdout.splitlines()[-1] == "0 []", job.stdout + job.stderr
    assert "2 images read: 2 detected" in job.stdout


@pytest.mark.slow
def test_an_onnx_file_is_imported_and_runs_where_tensorflow_is_not_installed(tmp_path):
    write_images(tmp_path / "in", "a.png", "b.png")
    model = tmp_path / "m" / "1"
    imported = python(NOT_INSTALLED, "import", write_yolo(tmp_path / "toy.onnx"), "--output", model)
    assert imported.returncode == 0, imported.stderr
    job = python(NOT_INSTALLED, "--input", tmp_path / "in", "--output", tmp_path / "out", "--model", tmp_path / "m")
    assert (job.returncode, "2 images read: 2 detected" in job.stdout) == (0, True), job.stdout + job.stderr


@pytest.mark.slow
def test_a_saved_model_names_the_extra_where_tensorflow_is_not_installed(tmp_path):
    write_images(tmp_path / "in", "a.png")
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", "digits", "--engine", "tensorflow"]
    job = python(NOT_INSTALLED, *flags)
    assert job.returncode == 2 and "Traceback" not in job.stderr
    last = job.stderr.splitlines()[-1]
    assert "digits/1, a SavedModel, needs tensorflow; install the extra: " + EXTRA in last


@pytest.mark.slow
def test_an_export_as_tfrecord_names_the_extra_where_tensorflow_is_not_installed(tmp_path):
    (tmp_path / DETECTIONS).mkdir()
    for shard in (RELEASE / DETECTIONS).glob("*.parquet"):
        (tmp_path / DETECTIONS / shard.name).write_bytes(shard.read_bytes())
    done = python(NOT_INSTALLED, "export", tmp_path, "--format", "tfrecord")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.endswith(f": it takes TensorFlow: {EXTRA}\n")


def test_records_are_dead_letters_that_name_the_extra_where_tfx_bsl_is_not_installed(tmp_path):
    """The next run tries them again."""
    read = (
        "import sys; sys.modules['tfx_bsl'] = None\n"
        "from pipeline.listing.tfrecords import framed, images_of_file; from pipeline.records import ImageRef\n"
        "open(sys.argv[1], 'wb').write(framed(b'x'))\n"
        "print(*[(each.reason, each.message) for each in images_of_file(ImageRef(sys.argv[1]), 1000)])"
    )
    done = python(read, tmp_path / "a.tfrecord")
    assert done.stdout.strip() == repr(("no_decoder", f"examples are decoded by tfx-bsl: {EXTRA}")), done.stderr


def test_the_doctor_says_what_lacks_where_tensorflow_is_not_installed():
    said = python(NOT_INSTALLED, "doctor").stdout
    assert "devices         0 NVIDIA GPUs; TensorFlow is not installed, so only ONNX files run\n" in said
    assert "  tensorflow    not installed; SavedModel" in said
