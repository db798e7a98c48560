"""What a Dataflow job is made of, as Beam's own Dataflow runner submits it to a service of this machine; and how it ends."""

import contextlib
import json
import os
import signal
from typing import Any
from unittest.mock import ANY

import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2

from pipeline import run, software
from pipeline.runners import dataflow as dataflow_runner
from tests.conftest import REPO
from tests.dataflow_service import BATCH, CLOUD, STREAMING
from tests.processes import in_thread

GPU = {"beam:resources:accelerator:v1": b"type:nvidia-tesla-t4;count:1;install-nvidia-driver"}
DETECT_OBJECTS = {
    "DetectObjects/StartDetecting",
    "DetectObjects/RunInference/BatchElements/ParDo(_GlobalWindowsBatchingDoFn)",
    "DetectObjects/RunInference/BeamML_RunInference",
    "DetectObjects/PartDeadLetters/FlatMap(_part)",
}
SHUFFLES = {"beam:transform:group_by_key:v1", "beam:transform:reshuffle:v1"}


class Submitted:
    """A job as Dataflow would get it.

    Attributes:
      type: Batch or streaming.
      environment: What it asks of the service.
      pool: What it asks of its machines.
      options: Beam's options.
      steps: Its steps by their full names.
      hints: What each step asks of its machines.
    """

    def __init__(self, job: dict[str, Any], graph: beam_runner_api_pb2.Pipeline):
        self.type, self.environment = job["type"], job["environment"]
        (self.pool,) = self.environment["workerPools"]
        self.options = self.environment["sdkPipelineOptions"]["options"]
        self.steps = {each.unique_name: each for each in graph.components.transforms.values() if not each.subtransforms}
        hints = {key: dict(each.resource_hints) for key, each in graph.components.environments.items()}
        self.hints = {name: found for name, step in self.steps.items() if (found := hints.get(step.environment_id))}

    def before(self, name: str) -> set[str]:
        """The steps that elements pass on their way to this one since the last shuffle."""
        made_by = {output: each.unique_name for each in self.steps.values() for output in each.outputs.values()}
        found, open_ends = set(), [name]
        while open_ends:
            step = self.steps[open_ends.pop()]
            if step.spec.urn not in SHUFFLES:
                sources = {made_by[each] for each in step.inputs.values()} - found
                found |= sources
                open_ends += sources
        return found


@pytest.fixture
def submitted(gcs_bucket, dataflow, tmp_path):
    """Submits the job of a command line to a service where it is done at once; what was submitted."""
    dataflow.first_state = "JOB_STATE_DONE"

    def submit(arguments: list[str]) -> Submitted:
        place = tmp_path / "job.json"
        # a batch job ends with an error, since the service runs nothing
        run.main([*arguments, f"--dataflow_job_file={place}", "--sdk_container_image=reg/worker:gpu"])
        (graph,) = [blob for blob in gcs_bucket.list_blobs() if blob.name.endswith("/pipeline.pb")]
        return Submitted(json.loads(place.read_text()), beam_runner_api_pb2.Pipeline.FromString(graph.download_as_bytes()))

    return submit


def check_job(job: Submitted, config: str) -> None:
    """What both configs say of machines, field by field; of the steps only the four of DetectObjects ask for a GPU."""
    asked = yaml.safe_load((REPO / config).read_text())["beam_options"]
    pool, experiments = job.pool, job.environment["experiments"]
    assert (pool["machineType"], pool["diskSizeGb"]) == (asked["machine_type"], asked["disk_size_gb"])
    scaling = {"algorithm": "AUTOSCALING_ALGORITHM_BASIC", "maxNumWorkers": asked["max_num_workers"]}
    assert pool["autoscalingSettings"] == scaling
    assert pool.get("numWorkers") == asked.get("num_workers")
    assert pool.get("numThreadsPerWorker") == asked.get("number_of_worker_harness_threads")
    assert not {"network", "subnetwork", "ipConfiguration"} & pool.keys(), "the service chooses"
    assert {image["containerImage"] for image in pool["sdkHarnessContainerImages"]} == {"reg/worker:gpu"}
    assert not [package["name"] for package in pool["packages"] if package["name"].endswith((".tar.gz", ".pickle"))]
    assert "no_use_multiple_sdk_containers" in experiments and "use_multiple_sdk_containers" not in experiments
    assert "serviceOptions" not in job.environment and job.options["save_main_session"] is False
    assert job.hints == dict.fromkeys(DETECT_OBJECTS, GPU)


def test_the_batch_job_asks_for_what_its_config_says(batch, submitted):
    """Detecting reads the images; before it no shuffle has any from a container, so none crosses the network twice."""
    job = submitted(batch)
    assert job.type == "JOB_TYPE_BATCH"
    check_job(job, BATCH)
    before = job.before("DetectObjects/StartDetecting")
    assert "ReadImages/OpenContainers/ParDo(_OpenContainers)" in before
    assert not [step for step in before if step.startswith(("ReadImages/ListImages", "ReadImages/DropDoubles"))]


def test_the_streaming_job_asks_for_what_its_config_says_and_its_steps_keep_their_names(stream, submitted):
    """A running job is updated by them (`--update`); where a change is meant, write the golden file anew.

    Each worker that starts, be it months later, fetches what is staged; what lies below temp_location may be deleted.
    """
    job = submitted(stream)
    assert job.type == "JOB_TYPE_STREAMING"
    check_job(job, STREAMING)
    assert {"enable_streaming_engine", "enable_windmill_service"} <= set(job.environment["experiments"])
    sources = {step.spec.urn for name, step in job.steps.items() if name.startswith("ReadMessages/ReadFromPubSub/")}
    assert "beam:transform:pubsub_read:v1" in sources
    assert sorted(job.steps) == (REPO / "tests/golden/dataflow_streaming_steps.txt").read_text().splitlines()
    staged = {package["location"] for package in job.pool["packages"]} | {job.options["pipelineUrl"]}
    assert staged and all("/staging/" in place and "/tmp/" not in place for place in staged)


def test_the_user_may_ask_for_a_process_a_core_and_for_no_machines_of_a_kind(batch, submitted):
    asked = ("--runner=DataflowRunner", "--experiments=use_multiple_sdk_containers")
    job = submitted(["--config=configs/batch_gcs_direct.yaml", *batch[2:], *asked])
    assert job.hints == {} and "no_use_multiple_sdk_containers" not in job.environment["experiments"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(["--config", BATCH, "--output=out"], "output: expected gs://<bucket>/…, which", id="local output"),
        pytest.param(["--config", STREAMING, "--output=projects/p12345/topics/t01"], "archive: expected", id="no archive"),
        pytest.param(["--config", BATCH, "--output=out", "--runner=DirectRunner"], "DataflowRunner, which fits", id="local GPU"),
        pytest.param(
            ["--config", BATCH, "--output=gs://b/o", "--input=photos/"],
            "input: expected gs://<bucket>/…, which",
            id="local input",
        ),
        pytest.param(
            ["--config", BATCH, "--output=gs://b/o", "--input=gs://b/i/*", "--model=/srv/yolov4"],
            "model: expected gs://<bucket>/…, or /models/<name> in the image of DataflowRunner's workers; got '/srv/yolov4'",
            id="local model",
        ),
        pytest.param(
            ["--config", BATCH, "--output=o", "--template_location=gs://b/t"], "template_location: a classic", id="template"
        ),
    ],
)
def test_what_its_workers_cannot_be_or_reach_is_one_line_and_exit_code_2(flags, expected, error_of):
    places = [] if any(flag.startswith("--input") for flag in flags) else ["--input=projects/p12345/subscriptions/s01"]
    assert expected in error_of(*flags, *CLOUD, "--temp_location=gs://bucket/tmp", *places)


@contextlib.contextmanager
def signalled_when_running(service, number: signal.Signals):
    """Sends this process a signal once its launcher watches the job run."""
    with in_thread(lambda: service.running.wait(300) and os.kill(os.getpid(), number)):
        yield


def test_a_signal_drains_the_stream_and_waits_for_it(dataflow, stream, capfd):
    """The launcher's own memory of a stop reaches no worker there."""
    with signalled_when_running(dataflow, signal.SIGTERM):
        assert run.main(stream) == 0
    assert [(job["name"], job["currentState"]) for job in dataflow.jobs.values()] == [("detect", "JOB_STATE_DRAINED")]
    printed = capfd.readouterr().err
    assert "stopping: finishing in-flight images" in printed and "error" not in printed


def test_a_stream_that_dataflow_refuses_to_drain_is_drained_once_it_does(dataflow, stream, capfd):
    """The handler of the signal makes no call that may fail: the launcher would end, and the stream go on."""
    dataflow.refusals["PUT"] = 2
    with signalled_when_running(dataflow, signal.SIGTERM):
        assert run.main(stream) == 0
    assert [job["currentState"] for job in dataflow.jobs.values()] == ["JOB_STATE_DRAINED"]
    assert capfd.readouterr().err.count("Dataflow does not drain the stream yet, and is asked again: ") == 1


def test_an_update_replaces_the_running_job_of_its_name(dataflow, stream):
    """With its id, and the user's renamings; the launcher that waits for the old one ends well."""
    dataflow.jobs["old"] = {"id": "old", "name": "detect", "currentState": "JOB_STATE_RUNNING"}
    with signalled_when_running(dataflow, signal.SIGINT):
        assert run.main([*stream, "--update", '--transform_name_mapping={"Old": "New"}']) == 0
    new = dataflow.jobs["job-1"]
    assert (new["replaceJobId"], new["transformNameMapping"]) == ("old", {"Old": "New"})
    assert dataflow.jobs["old"]["currentState"] == "JOB_STATE_UPDATED"


def test_an_update_of_a_job_that_does_not_run_is_one_line_and_exit_code_2(dataflow, stream, error_of):
    dataflow.jobs["other"] = {"id": "other", "name": "others", "currentState": "JOB_STATE_RUNNING"}
    expected = "error: --update: expected --job_name of a job that runs in europe-west1: others; got detect\n"
    assert error_of(*stream, "--update") == expected


def test_a_batch_job_that_is_stopped_here_does_not_go_on_there(dataflow, batch, capfd):
    with signalled_when_running(dataflow, signal.SIGINT):
        assert run.main(batch) == 130
    assert [job["requestedState"] for job in dataflow.jobs.values()] == ["JOB_STATE_CANCELLED"]
    assert "stopped; rows that were written stay" in capfd.readouterr().err


def test_a_signal_while_a_batch_job_is_submitted_cancels_it_once_its_id_is_there(dataflow, batch, capfd):
    """Nobody would pay for a job that its launcher has left behind."""
    dataflow.on_create = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert run.main(batch) == 130
    assert [job["requestedState"] for job in dataflow.jobs.values()] == ["JOB_STATE_CANCELLED"]
    assert "stopping: the job is being submitted" in capfd.readouterr().err


def test_a_signal_while_a_stream_is_submitted_drains_it(dataflow, stream):
    dataflow.on_create = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert run.main(stream) == 0
    assert [job["currentState"] for job in dataflow.jobs.values()] == ["JOB_STATE_DRAINED"]


IN_IMAGE = ("--model=/models/yolov4", "--name=yolov4", "--model-version=7")


def test_a_model_that_only_workers_see_is_accepted(batch, submitted, error_of):
    """It lies in their image. The launcher must know which rows are done."""
    assert "expected --name and --model-version" in error_of(*batch, "--model=/models/yolov4")
    assert submitted([*batch, *IN_IMAGE]).type == "JOB_TYPE_BATCH"


@pytest.mark.parametrize("model", [("--model=digits",), IN_IMAGE], ids=["on this machine, too", "in the image"])
def test_a_dry_run_on_a_machine_without_a_gpu_shows_the_plan(batch, gcs_bucket, model, capsys):
    """The config asks for a GPU on the workers; a model that is here is tried on the CPU."""
    gcs_bucket.blob("in/a.jpg").upload_from_filename(REPO / "models/digits/samples/scene_000.jpg")
    assert run.main([*batch, *model, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "input    1 image\n" in printed and "nothing was written" in printed
    tried = "is in the image of the workers: no image is tried here" if model is IN_IMAGE else "tried    gs://"
    assert tried in printed


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Puts a program of that name on the path, which has one image with the given labels."""

    def put(labels: dict[str, str]) -> None:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n[ \"$5\" = reg/worker:gpu ] && echo '{json.dumps(labels)}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return put


def test_an_image_of_another_python_is_refused_before_a_worker_is_paid_for(batch, docker, error_of):
    """Beam's workers would refuse the job minutes later."""
    docker({"detect-objects.python": "3.9", "detect-objects.beam": software.here().beam})
    error = error_of(*batch, "--sdk_container_image=reg/worker:gpu", "--dry-run")
    assert error.startswith("error: sdk_container_image reg/worker:gpu: has Python 3.9, Beam ") and str(software.here()) in error


def test_an_image_that_is_not_here_is_a_doubt_of_the_dry_run_where_its_defaults_are_others(monkeypatch):
    options = PipelineOptions(["--sdk_container_image=reg/worker:gpu"])
    assert [*dataflow_runner.doubts(options)] == ([] if software.OF_DOCKERFILE.fits(software.here()) else [ANY])
    monkeypatch.setattr(dataflow_runner, "OF_DOCKERFILE", software.Software("3.9", "2.50.0"))
    (doubt,) = dataflow_runner.doubts(options)
    assert "an image of deploy/Dockerfile has Python 3.9, Beam 2.50.0" in doubt


FAULTS = {
    "no such machine": ("machine_type: n1-standard-8", "machine_type: n1-standard-9", "there is no machine type n1-standard-9"),
    "no such GPU": ("type:nvidia-tesla-t4", "type:nvidia-tesla-t5", "there is no accelerator type:nvidia-tesla-t5"),
    "a GPU of other machines": ("type:nvidia-tesla-t4", "type:nvidia-l4", "nvidia-l4 goes with g2-…, not with n1-standard-8"),
    "a disk without room": ("disk_size_gb: 50", "disk_size_gb: 5", "disk_size_gb 5 is less than 30"),
    "more workers than the most": ("\n  num_workers: 2", "\n  num_workers: 30", "num_workers 30 is more than max_num_workers"),
}


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [each if number == 0 else pytest.param(*each, marks=pytest.mark.matrix) for number, each in enumerate(FAULTS.values())],
    ids=FAULTS,
)
def test_a_config_with_a_fault_is_refused_by_the_service_and_is_a_wrong_command(there, instead, said, batch, tmp_path, capfd):
    """The service knows what Google lists; a repeat of the command would not help."""
    text = (REPO / BATCH).read_text()
    assert text.count(there) == 1
    (tmp_path / "faulty.yaml").write_text(text.replace(there, instead))
    assert run.main(["--config", str(tmp_path / "faulty.yaml"), *batch[2:], "--sdk_container_image=reg/worker:gpu"]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: DataflowRunner refuses the job: {said}")


def test_a_stream_in_a_region_that_there_is_not_is_refused(stream, capfd):
    assert run.main([*stream[:-1], "--region=europe-west99"]) == 2
    assert capfd.readouterr().err.endswith("error: DataflowRunner refuses the job: there is no region europe-west99\n")


def test_a_launcher_waits_on_where_the_service_refuses_to_say_how_its_job_is(dataflow, stream, capfd):
    """The job goes on there; a launcher that ended would leave nobody who drains it."""
    dataflow.refusals["GET"] = 3
    with signalled_when_running(dataflow, signal.SIGTERM):
        assert run.main(stream) == 0
    assert [job["currentState"] for job in dataflow.jobs.values()] == ["JOB_STATE_DRAINED"]
    assert not dataflow.refusals["GET"]
