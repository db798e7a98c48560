"""TensorFlow has the device, memory and threads that were asked for, and its private functions do what this project needs.

After an upgrade the test of a private function fails by its name.
"""

import contextlib
import glob
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.engine import FunctionEngine, OpenedModel
from pipeline.detect.load_model import load
from pipeline.detect.tensorflow_internals import freeze
from pipeline.detect.tensorflow_setup import gpu_bytes
from pipeline.errors import ModelError
from tests.conftest import REPO
from tests.forked_jobs import run_forked
from tests.processes import end_group, running
from tests.without_keras import tf


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bright", pytest.param("digits", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("settings", "of_gpus"),
    [
        pytest.param(
            {"device": "cpu", "gpu_memory_mb": 1000, "precision": "bfloat16"},
            {"visible": [], "taken": [], "rewrites": {"auto_mixed_precision_onednn_bfloat16": True}, "sizes": [1, 2, 4]},
            id="cpu",
        ),
        pytest.param(
            {"device": "gpu:1", "gpu_memory_mb": 1000, "precision": "float16"},
            {
                "visible": [1],
                "memory_mb": 1000,
                "taken": ["1-0"],
                "rewrites": {"auto_mixed_precision": True},
                "sizes": [1, 2, 4, 8, 16, 32],
            },
            id="one by its number",
        ),
        pytest.param(
            {"device": "auto"},
            {"visible": [0], "grows": True, "taken": ["0-0"], "rewrites": {"auto_mixed_precision": False}, "sizes": [1, 8, 32]},
            id="any, which is taken once",
        ),
    ],
)
def test_a_model_that_nobody_prepared_runs_as_asked(tmp_path, monkeypatch, bright_model, model, settings, of_gpus):
    """In a process without any cache. On a GPU TensorFlow chooses how many operations run at once, and XLA compiles float32."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = {**settings, "intra_op_threads": 7, "concurrent_batches": 5}
    arguments = [bright_model if model == "bright" else model, json.dumps(settings)]
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    code = run_forked(arguments, printed, module="tests.detect.absent_gpus", errors=errors)
    assert code == 0, errors.read_text()
    told = json.loads(printed.read_text())
    del told["signature"]
    assert told == {**of_gpus, "threads": [7, 0 if of_gpus["visible"] else 5]}


@pytest.mark.parametrize(
    ("engine", "others"), [("tensorflow", "float32 and bfloat16 on a CPU"), ("openvino", "float32, bfloat16 and int8 on a CPU")]
)
def test_a_precision_that_the_device_lacks_is_refused(engine, others):
    """Grappler's rewrite to float16 does nothing on a CPU."""
    with pytest.raises(ModelError, match=f"precision float16: engine {engine} has {others}"):
        load(ModelConfig(path="digits"), DetectConfig(device="cpu", engine=engine, precision="float16"))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "engine"), [("float32", "tensorflow"), ("bfloat16", "openvino")])
def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_is_a_warning(monkeypatch, precision, engine):
    """Also in OpenVINO, which has no other device."""
    pytest.importorskip(engine, reason="its extra is not installed")
    real = glob.glob
    monkeypatch.setattr(glob, "glob", lambda path, **more: ["/dev/nvidia0"] if "nvidia" in path else real(path, **more))
    for device, notes in (("auto", 1), ("cpu", 0)):
        loaded = load(ModelConfig(path="digits"), DetectConfig(device=device, precision=precision))
        loaded.batcher.close()
        assert loaded.engine_name == (engine if device == "auto" else "tensorflow")
        assert "".join(loaded.notes).count("runs on the CPU, though this machine has a GPU") == notes


@pytest.fixture
def seen_gpu(monkeypatch):
    """A GPU that TensorFlow seems to use, of which it has taken 100 bytes."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    for name in ("list_physical_devices", "get_visible_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind=None: [gpu])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, grows: None)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"peak": 100})


@pytest.mark.parametrize(("error", "code"), [(tf.errors.InternalError, 5), (tf.errors.DataLossError, 2)])
def test_a_gpu_that_fails_when_tensorflow_first_uses_it_is_an_error_of_the_device(
    seen_gpu, monkeypatch, bright_model, error, code
):
    def fail(_folder):
        raise error(None, None, "CUDA runtime implicit initialization on GPU:0 failed. Status: all devices are busy")

    monkeypatch.setattr(tf.saved_model, "load", fail)
    with pytest.raises(ModelError, match="TensorFlow cannot load it: CUDA runtime") as caught:
        load(ModelConfig(path=bright_model), DetectConfig())
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("free_mb", "limit_mb", "may_use"),
    [("70", None, 100 + 70 * 2**20), ("70", 64, 64 * 2**20), ("[N/A]", None, None)],
    ids=["all that is left", "a limit, which it takes at once", "the driver does not tell"],
)
def test_tensorflow_may_use_what_it_has_taken_and_what_no_other_process_has(
    seen_gpu, monkeypatch, tmp_path, free_mb, limit_mb, may_use
):
    """So a swap knows whether two versions have room."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase $1 in *memory.total*) echo 80000;; *memory.free*) echo '{free_mb}';; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert gpu_bytes(DetectConfig(gpu_memory_mb=limit_mb)) == may_use


SMI = """\
#!/bin/sh
case "$*" in
  *memory.free*GPU-a*) cat a ;;
  *memory.free*GPU-b*) cat b ;;
  *) printf 'GPU-a\\nGPU-b\\n' ;;
esac
"""
LOADS_ON_GPU = """
import glob
from pathlib import Path
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import load
from tests.detect import test_tensorflow_setup

def open_model(*arguments):
    Path("a").write_text("9000")  # of another job, which begins beside this one
    Path("b").write_text("29000")
    return test_tensorflow_setup.open_on_gpu(*arguments)

if __name__ == "__main__":
    real = glob.glob
    glob.glob = lambda path, **more: ["/dev/nvidia0", "/dev/nvidia1"] if "nvidia" in path else real(path, **more)
    loaded = load(ModelConfig(name="toy"), DetectConfig(engine="loads:open_model", device="gpu:1"))
    loaded.batcher.close()
    print(loaded.memory_bytes)
"""


def test_the_memory_of_a_model_is_what_its_own_gpu_lost(tmp_path, monkeypatch):
    """That of all GPUs had what other jobs took of theirs meanwhile."""
    for name, content in {"nvidia-smi": SMI, "loads.py": LOADS_ON_GPU, "a": "30000", "b": "30000"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = subprocess.run([sys.executable, "loads.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) == 1000 * 1_048_576


def open_on_gpu(_local, _folder, _model, detect):
    engine = FunctionEngine(lambda pixels: {"boxes": np.zeros((len(pixels), 1, 4)), "scores": np.zeros((len(pixels), 1))}, detect)
    engine.gpu = True
    return OpenedModel(engine, DetectorMetadata("toy", (96, 128), "stretch", ("a",)))


@pytest.mark.parametrize(
    ("device", "processes", "said"),
    [("auto", None, True), ("gpu", "3", True), ("gpu", "4", False), ("gpu:1", None, False)],
    ids=["one process", "three", "as many as GPUs", "a GPU that is asked for"],
)
def test_a_job_that_leaves_gpus_idle_says_so(monkeypatch, device, processes, said):
    """And names flags only with the jobs that take them."""
    real = glob.glob
    found = [f"/dev/nvidia{number}" for number in range(4)]
    monkeypatch.setattr(glob, "glob", lambda path, **more: found if "nvidia" in path else real(path, **more))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if processes:
        monkeypatch.setenv("DETECTION_PROCESSES", processes)
        monkeypatch.setenv("WORKER_ID", "worker_0")
    engine = f"{__name__}:open_on_gpu"
    loaded = load(ModelConfig(name="toy"), DetectConfig(engine=engine, device=device))
    loaded.batcher.close()
    said_of = (f"which uses {processes or 1} of them", "a batch job on DirectRunner uses all with --direct_running_mode multi")
    assert [all(text in note for text in said_of) for note in loaded.notes] == [True] * said


TAKE = """
import sys
from pipeline.detect.gpus import take_gpu

print(take_gpu(int(sys.argv[1]), *sys.argv[2:]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Starts a process that takes a GPU and keeps it until it is ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.ExitStack() as ended:

        def start(gpus: int, *device: str) -> tuple[int, subprocess.Popen]:
            command = [sys.executable, "-c", TAKE, str(gpus), *device]
            started = ended.enter_context(running(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            return int(started.stdout.readline()), started

        yield start


@pytest.mark.slow
def test_jobs_that_see_different_gpus_take_none_from_each_other(process, monkeypatch):
    """As on a machine that SLURM divides: each counts its own GPUs from 0."""
    taken = {}
    for visible in ("0,1", "2,3", "0,1", "2,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        taken.setdefault(visible, []).append(process(2)[0])
    assert taken == {"0,1": [0, 1], "2,3": [0, 1]}


@pytest.mark.slow
def test_gpus_are_known_by_their_uuids_and_processes_and_containers_begin_at_their_own(process, monkeypatch, tmp_path):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf 'GPU-a\\nGPU-b-4f7e\\nGPU-c\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DETECTION_PROCESSES", "3")
    monkeypatch.setenv("WORKER_ID", "worker_5")
    assert process(3)[0] == 2
    monkeypatch.delenv("DETECTION_PROCESSES")
    monkeypatch.setenv("WORKER_ID", "sdk-0-1")
    monkeypatch.setenv("TMPDIR", str(program.parent))  # of a container of its own
    assert process(3)[0] == 1
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("WORKER_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,0")
    assert process(2)[0] == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b-4,GPU-a")  # the beginning of a UUID names it
    assert process(2)[0] == 0
    locks = {path.name for path in tmp_path.glob("detection-gpus-*/*")}
    assert locks == {"GPU-c-0", "GPU-a-0", "GPU-b-4f7e-0"}


@pytest.mark.slow
def test_each_process_has_a_gpu_of_its_own_until_all_are_taken(process):
    """Then the next ones share them evenly; one whose process was killed is free again."""
    taken = [process(3) for _ in range(5)]
    assert [number for number, _ in taken] == [0, 1, 2, 0, 1]
    end_group(taken[2][1])
    assert process(3)[0] == 2


@pytest.mark.slow
def test_a_process_that_asks_for_a_gpu_is_counted_there(process, monkeypatch):
    """Also one that sees no other GPU. Both were not, so that the next job went there, too."""
    assert [process(3, device)[0] for device in ("gpu:1", "gpu:1", "gpu:7")] == [1, 1, 7]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert process(1)[0] == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [process(3, "gpu")[0] for _ in range(3)] == [2, 0, 2]


def test_where_no_file_can_be_locked_the_first_is_taken(process, tmp_path):
    """A file stands where the folder of locks would."""
    (tmp_path / f"detection-gpus-{os.getuid()}").write_text("a file")
    assert [process(2)[0] for _ in range(2)] == [0, 0]


def test_freeze_makes_constants_of_variables():
    """A frozen function knows its variables' values and captures none."""
    weights = tf.Variable(np.arange(20_000, dtype=np.float32))
    signature = [tf.TensorSpec((), tf.float32)]
    frozen = freeze(tf.function(lambda x: tf.reduce_sum(weights) + x, signature).get_concrete_function())
    weights.assign(tf.zeros_like(weights))
    assert frozen(tf.constant(0.0))[0].numpy() == pytest.approx(np.arange(20_000).sum())
    assert list(frozen.graph.captures) == []


def test_no_other_module_of_the_pipeline_uses_private_parts_of_tensorflow():
    """An upgrade breaks one module."""
    private = re.compile(r"tensorflow\.python")
    users = {path.name for path in (REPO / "pipeline").rglob("*.py") if private.search(path.read_text(encoding="utf-8"))}
    assert users == {"tensorflow_internals.py"}


IMPORTED = """
import gc, sys
from pipeline.config import DetectConfig
from pipeline.detect.tensorflow_setup import configure_tensorflow
tf = configure_tensorflow(DetectConfig())
print("keras" in sys.modules, gc.isenabled())
from tensorflow.keras import layers
print(tf.keras.layers.Dense is layers.Dense, layers.Dense.__module__.partition(".")[0])
"""


@pytest.mark.slow
def test_import_without_keras():
    """A job imports no Keras; a user's own code may still do so, in both ways that TensorFlow offers."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.split() == ["False", "True", "True", "keras"], done.stderr
