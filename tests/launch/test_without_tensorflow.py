"""A job with an ONNX file imports no TensorFlow, in either engine: neither its memory nor its seconds of start-up."""

import subprocess
import sys

import pytest

from models.own_python import environment
from tests.launch.jobs import write_images
from tests.onnx_files import write_yolo

JOB = """
import sys
from pipeline.run import main
code = main(sys.argv[1:])
print(code, [name for name in ("tensorflow", "tfx_bsl", "keras") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_job_with_an_onnx_file_imports_no_tensorflow(engine, tmp_path):
    write_images(tmp_path / "in", "a.png", "b.png")
    flags = ["--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out", "--model", write_yolo(tmp_path / "toy.onnx")]
    command = [sys.executable, "-c", JOB, *flags, "--engine", engine, "--feeder-processes", "1"]
    job = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=300)
    assert job.stdout.splitlines()[-1] == "0 []", job.stdout + job.stderr
    assert "2 images read: 2 detected" in job.stdout
