"""Models on servers, of both protocols: TensorFlow's detections, and one result for each image whatever the servers do."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from models.metadata import read_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.detect.versions import locate
from pipeline.errors import EXIT_CODES, ModelAwayError, ModelDeviceError, ModelError
from pipeline.log_lines import log_lines
from pipeline.records import DeadLetter
from tests.conftest import REPO
from tests.detect.sample_rows import SAMPLES, check_equal, rows
from tests.emulators import free_ports
from tests.forked_jobs import ForkedJob
from tests.processes import running, wait_until
from tests.tiny_models import png
from tests.without_keras import tf

grpc = pytest.importorskip("grpc")
pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")

from tests.model_server import KServeServer, Refused, TensorFlowServer, serving  # noqa: E402  after the checks

INPUTS = {"images": ("FP32", (-1, 3, 8, 12))}
OUTPUTS = {"boxes": ("FP32", (-1, -1, 4)), "scores": ("FP32", (-1, -1))}
POISON = 13
GREYS = [*range(100, 130)]


def image(grey):
    return png(str(grey), np.full((8, 12, 3), grey, np.uint8))


def answer(arrays):
    """One box, whose confidence is the grey of the image."""
    pixels = arrays["images"]
    assert pixels.shape[1:] == (3, 8, 12)
    boxes = np.tile(np.float32([0.25, 0.25, 0.75, 0.75]), (len(pixels), 1, 1))
    return {"boxes": boxes, "scores": pixels[:, 0, :1, 0].copy()}


def poisoned(arrays):
    return any(round(float(one[0, 0, 0]) * 255) == POISON for one in arrays["images"])


def serve(run=answer, kind=KServeServer, **how):
    """Serves a toy model while a block lasts."""
    return serving(kind(run, INPUTS, OUTPUTS, **how))


def load(*servers, detect=None, **model):
    path = f"grpc://{','.join(f'localhost:{server.port}' for server in servers)}/toy"
    config = ModelConfig(path, **{"nms": "pipeline", "box_format": "xyxy", "server_wait_s": 120.0, **model})
    return load_detector(config, DetectConfig(engine=servers[0].engine, score_threshold=0.0, **(detect or {})))


def detector_of(*servers, **how):
    """A detector, open while a block lasts."""
    return contextlib.closing(load(*servers, **how))


def found_by(detector, greys=GREYS):
    """The confidences of images of these greys, rounded to greys; of dead letters their reason."""
    return [
        found.reason if isinstance(found, DeadLetter) else round(float(found.detections.confidences[0]) * 255)
        for found in detector.detect([image(grey) for grey in greys])
    ]


both = pytest.mark.parametrize("kind", [KServeServer, TensorFlowServer], ids=lambda kind: kind.engine)


@contextlib.contextmanager
def served_by_kserve():
    """The bundled detector's candidates; yields engine, port, the version of the rows, and what the config says of the model."""
    candidates = tf.saved_model.load(locate("digits", None)[0]).signatures["candidates"]

    def run(arrays):
        return {name: found.numpy() for name, found in candidates(images=tf.constant(arrays["images"])).items()}

    inputs, outputs = {"images": ("UINT8", (-1, 320, 320, 3))}, {"boxes": ("FP32", (-1, -1, 4)), "scores": ("FP32", (-1, -1, 10))}
    with serving(KServeServer(run, inputs, outputs, versions=("2", "11"))) as server:
        yield server.engine, server.port, "11", {"nms": "pipeline"}


@contextlib.contextmanager
def served_by_triton():
    """The same on NVIDIA's server."""
    python = os.environ.get("TRITON_PYTHON")
    if not python:
        pytest.skip("takes 2.5 GB; TRITON_PYTHON=<path> names the Python of an environment with PyTriton and TensorFlow")
    ports = free_ports(2)
    command = [python, str(REPO / "tests" / "triton_server.py"), locate("digits", None)[0], *map(str, ports)]
    with running(command, cwd=REPO):  # the job itself waits until the server answers
        yield "triton", ports[0], "1", {"nms": "pipeline", "server_wait_s": 300.0}


@contextlib.contextmanager
def served_by_tensorflow_serving():
    """Its signature that takes pixels and suppresses, whose thresholds are inputs with defaults."""
    from tensorflow.core.protobuf import saved_model_pb2

    folder = locate("digits", None)[0]
    predict = tf.saved_model.load(folder).signatures["detect"]

    def run(arrays):
        found = predict(**{name: tf.constant(value) for name, value in arrays.items()})
        return {name: array.numpy() for name, array in found.items()}

    server = TensorFlowServer(run, {}, {}, versions=("2", "11"))
    saved = saved_model_pb2.SavedModel.FromString(Path(folder, "saved_model.pb").read_bytes())
    server.signatures = dict(saved.meta_graphs[0].signature_def)
    with serving(server):
        yield server.engine, server.port, "11", {"signature": "detect"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "served", [served_by_kserve, served_by_triton, pytest.param(served_by_tensorflow_serving, marks=pytest.mark.matrix)]
)
def test_the_bundled_detector_gives_the_rows_of_tensorflow(served):
    described, settings = read_metadata(locate("digits", None)[0]), {"score_threshold": 0.7, "max_detections": 3}
    fields = ("input_hw", "resize", "class_names", "letterbox_value", "box_format", "box_units")
    model = {field: getattr(described, field) for field in fields}
    with served() as (engine, port, version, how):
        found = rows(f"grpc://localhost:{port}/toy", model={**model, **how}, engine=engine, **settings)
    assert {(row["model"]["name"], row["model"]["version"]) for row in found} == {("toy", version)}
    check_equal(found, rows("digits", **settings), 30)


def test_a_signature_that_tensorflow_serving_does_not_have_is_one_line():
    with serve(kind=TensorFlowServer) as server, pytest.raises(ModelError) as refused:
        load(server, signature="other")
    assert "it has no signature 'other' but ['serving_default']; set model.signature" in str(refused.value)


@both
def test_a_model_that_the_server_does_not_have_is_one_line(kind):
    with serve(kind=kind) as server, pytest.raises(ModelError, match="unknown model other"):
        load_detector(ModelConfig(path=f"grpc://localhost:{server.port}/other"), DetectConfig(engine=server.engine))


def test_a_server_that_takes_only_small_batches_gets_small_ones():
    def run(arrays):
        if len(arrays["images"]) > 2:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "batch-size must be <= 2")
        return answer(arrays)

    with serve(run) as server, detector_of(server) as detector:
        assert detector.batch_sizes == (1, 2)
        assert found_by(detector) == GREYS


def wrong_rows(arrays):
    return {name: array[:-1] for name, array in answer(arrays).items()}


def wrong_type(arrays):
    return {name: array.astype(np.float64) for name, array in answer(arrays).items()}


def refusing(code):
    def run(_):
        raise Refused(code, "no")

    return run


WRONG = {
    "refused": refusing(grpc.StatusCode.INVALID_ARGUMENT),
    "failed": refusing(grpc.StatusCode.INTERNAL),
    "too few rows": wrong_rows,
    "another dtype": wrong_type,
    "no output": lambda _: {},
    "short of memory": refusing(grpc.StatusCode.RESOURCE_EXHAUSTED),
}


@both
@pytest.mark.parametrize("wrong", WRONG)
def test_an_image_that_the_server_refuses_is_one_dead_letter(kind, wrong):
    """Lack of memory may pass: it is not final for the image, and the server gets batches of all sizes again."""

    def run(arrays):
        return (WRONG[wrong] if poisoned(arrays) else answer)(arrays)

    with serve(run, kind) as server, detector_of(server) as detector:
        sizes = detector.batch_sizes
        assert found_by(detector, [*GREYS, POISON]) == [*GREYS, "no_room" if wrong == "short of memory" else "model_failed"]
        assert detector.batch_sizes == sizes


TOO_LARGE = "Received message larger than max (4915237 vs. 4194304)"  # in the words of gRPC; its default


@both
@pytest.mark.parametrize(
    ("code", "words", "ends_with"),
    [("INVALID_ARGUMENT", "no", 2), ("RESOURCE_EXHAUSTED", TOO_LARGE, 2), ("RESOURCE_EXHAUSTED", "no", 5), ("INTERNAL", "no", 5)],
    ids=["wrong input", "large request", "short of memory", "failed"],
)
def test_what_a_server_will_always_refuse_is_no_error_that_a_supervisor_repeats(kind, code, words, ends_with):
    """As a wrong input size in the config, or a bound of the server's on the bytes of a request."""

    def refuse(_):
        raise Refused(grpc.StatusCode[code], words)

    with serve(refuse, kind) as server, pytest.raises(ModelError, match="fails on a blank image: ") as caught:
        load(server)
    assert caught.value.exit_code == ends_with


@both
def test_a_served_model_that_returns_no_detections_is_refused_at_once_and_for_good(kind):
    """Another answer will not come, however long the job waits for the server."""

    def run(arrays):
        return {**answer(arrays), "scores": np.zeros((len(arrays["images"]), 2), np.float32)}

    with serve(run, kind) as server, pytest.raises(ModelError, match=r"expected boxes .* got \(1, 4\) and \(2,\)$") as caught:
        load(server, server_wait_s=1e9)
    assert caught.value.exit_code == 2


def test_an_image_that_one_of_two_servers_has_no_memory_for_may_pass():
    """The other one fails on it."""
    with serve() as one, serve() as other, detector_of(one, other) as detector:
        for server, wrong in ((one, "failed"), (other, "short of memory")):
            server.run = lambda arrays, wrong=WRONG[wrong]: (wrong if poisoned(arrays) else answer)(arrays)
        assert found_by(detector, [100, POISON]) == [100, "no_room"]


@both
@pytest.mark.parametrize(("asked", "kind_of_error"), [("metadata", ModelAwayError), ("a blank image", ModelDeviceError)])
def test_a_server_without_memory_when_a_job_starts_is_an_error_that_a_supervisor_repeats(kind, asked, kind_of_error):
    with serve(WRONG["short of memory"], kind) as server:
        if asked == "metadata":
            server.stop()

            def refuse(_request, context):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")

            server.ModelMetadata = server.GetModelMetadata = refuse
            server.start()
        with pytest.raises(kind_of_error, match="RESOURCE_EXHAUSTED") as caught:
            load(server)
    assert EXIT_CODES[caught.value.exit_code].retry


@pytest.mark.parametrize("kind", [pytest.param(KServeServer, marks=pytest.mark.matrix), TensorFlowServer])
@pytest.mark.slow
def test_an_image_beyond_the_deadline_is_one_dead_letter(kind, monkeypatch):
    monkeypatch.setattr("pipeline.detect.remote_engine._REQUEST_SECONDS", 1.0)
    ended = threading.Event()

    def run(arrays):
        if poisoned(arrays):
            ended.wait(500)
        return answer(arrays)

    with serve(run, kind) as server, detector_of(server) as detector:
        found = found_by(detector, (100, POISON, 101))
        ended.set()
    assert found == [100, "model_failed", 101]


BROKEN = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL]


@pytest.mark.slow
@pytest.mark.parametrize("code", BROKEN, ids=lambda code: code.name)
def test_no_image_is_blamed_while_the_server_fails_on_a_blank_one_too(code):
    """It fails on everything for a while, and then works again."""
    failures = iter(range(20))

    with serve() as server, detector_of(server, detect={"batch_sizes": (1,)}) as detector:

        def run(arrays):
            if next(failures, None) is not None:
                raise Refused(code, "no")
            return answer(arrays)

        server.run = run
        assert found_by(detector) == GREYS
        assert next(failures, None) is None


@pytest.mark.slow
@log_lines()
def test_a_server_that_dies_and_starts_again_costs_no_image(capfd):
    with serve() as server, detector_of(server) as detector, ThreadPoolExecutor(1) as pool:
        assert found_by(detector, [100]) == [100]
        server.stop()
        found = pool.submit(found_by, detector)
        wait_until(lambda: "waiting for model grpc://" in capfd.readouterr().err)
        assert not found.done()
        server.start()
        assert found.result() == GREYS


@pytest.mark.slow
@log_lines()
def test_a_server_that_has_just_come_may_not_have_loaded_the_model_yet(capfd):
    """Triton answers like one that does not know it; the job waits, as for a server that is away."""
    with serve() as server:
        server.stop()  # its port is known now
        unknown, describe = iter(range(3)), server.ModelMetadata

        def describe_later(request, context):
            if next(unknown, None) is not None:
                context.abort(grpc.StatusCode.NOT_FOUND, "unknown model toy")
            return describe(request, context)

        server.ModelMetadata = describe_later
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(load, server)
            wait_until(lambda: "waiting for model grpc://" in capfd.readouterr().err)
            server.start()
            with contextlib.closing(loaded.result()) as detector:
                assert found_by(detector, [100]) == [100]
        assert next(unknown, None) is None


@both
def test_a_server_that_stays_away_fails_the_job_and_no_image(kind):
    """Its next run takes the images again."""
    with serve(kind=kind) as server, detector_of(server, server_wait_s=0.2) as detector:
        server.stop()
        with pytest.raises(ModelError, match=r"^model grpc://.* has not answered for 0\.2 s: .*UNAVAILABLE"):
            detector.detect([image(100)])
        server.start()

        def works():
            with contextlib.suppress(ModelError):  # gRPC connects again after a pause of its own
                return found_by(detector, [100]) == [100]

        wait_until(works)


def test_two_servers_share_the_work_and_one_that_dies_costs_no_image():
    with serve() as one, serve() as other, detector_of(one, other) as detector:
        assert found_by(detector) == GREYS
        assert one.requests and other.requests
        one.stop()
        assert found_by(detector) == GREYS


@pytest.mark.parametrize("wrong", [WRONG["failed"], WRONG["short of memory"]], ids=["failed", "out of memory"])
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4, 8)], ids=str)
def test_a_server_whose_device_is_sick_costs_no_image_while_another_one_is_sound(sizes, wrong):
    """It fails on everything: each request that it refuses goes to the other one before an image is to blame."""
    with serve() as sick, serve() as sound, detector_of(sick, sound, detect={"batch_sizes": sizes}) as detector:
        sick.run = wrong
        assert found_by(detector) == GREYS
        assert sick.requests and detector.batch_sizes == sizes


@pytest.mark.slow
def test_an_image_that_one_server_refuses_while_the_other_one_is_away_is_one_dead_letter():
    """A server that is away for longer than a moment has no say, else one such image would stop a stream."""
    refusing = serve(lambda arrays: (WRONG["failed"] if poisoned(arrays) else answer)(arrays))
    with refusing as one, serve() as away, detector_of(one, away) as detector:
        away.stop()
        assert found_by(detector, [100, POISON, 101]) == [100, "model_failed", 101]


def test_an_image_that_one_server_refuses_is_found_by_the_other_once_that_is_back():
    with serve() as one, serve() as away, detector_of(one, away, detect={"batch_sizes": (1,)}) as detector:
        away.stop()

        def refuse_until_the_other_is_back(_):
            away.start()
            one.run = WRONG["failed"]
            raise Refused(grpc.StatusCode.INTERNAL, "no")

        one.run = refuse_until_the_other_is_back
        assert found_by(detector, [100]) == [100]


@both
def test_answers_of_many_megabytes_arrive(kind):
    """gRPC's own limit is 4 MB."""

    def run(arrays):
        boxes, scores = answer(arrays).values()
        return {"boxes": np.repeat(boxes, 400_000, 1), "scores": np.pad(scores, ((0, 0), (0, 399_999)))}

    detect = {"batch_sizes": (1,), "max_detections": 1}
    with serve(run, kind) as server, detector_of(server, nms="model", detect=detect) as detector:
        assert found_by(detector, [100]) == [100]


@pytest.mark.slow
def test_tls(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject]
    subprocess.run(made, check=True, capture_output=True)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    script = (
        "import sys\nfrom pipeline.config import ModelConfig\nfrom pipeline.detect.remote_engine import RemoteServer\n"
        "for engine, port in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    print(RemoteServer(ModelConfig(path=f'grpcs://localhost:{port}/toy', server_wait_s=60), engine).version)"
    )
    with serve(credentials=credentials) as one, serve(kind=TensorFlowServer, credentials=credentials) as other:
        command = [sys.executable, "-c", script, one.engine, str(one.port), other.engine, str(other.port)]
        trusted = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)}
        done = subprocess.run(command, cwd=REPO, env=trusted, capture_output=True, text=True, check=False, timeout=500)
        assert done.stdout.split() == ["3", "3"], done.stderr


@pytest.mark.slow
def test_a_job_that_waits_for_a_server_is_stopped_by_sigterm(tmp_path):
    """Nothing listens at port 1."""
    command = ["--input", SAMPLES[0], "--output", tmp_path / "out", "--engine", "triton", "--model", "grpc://localhost:1/toy"]
    (log := tmp_path / "log").touch()
    with ForkedJob(command, log) as job:
        wait_until(lambda: "waiting for model grpc://localhost:1/toy" in log.read_text(), log.read_text, job)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 130, log.read_text()


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("grpc://localhost:1", {}, "expected grpc://host:port/name"),
        ("grpc://localhost:1/toy", {"engine": "tensorflow"}, "expected --engine triton or tf-serving for a model server"),
        ("digits", {}, "expected grpc://host:port/name as --model"),
        ("grpc://localhost:1/toy", {"precision": "bfloat16"}, "a server has a precision of its own"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(path, settings, message):
    with pytest.raises(ModelError, match=message):
        load_detector(ModelConfig(path=path, model_poll_s=0), DetectConfig(**{"engine": "triton", **settings}))
