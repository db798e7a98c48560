"""The Flex Template: its parameters are settings, its requests are what the service takes, and its launcher writes the job."""

import json
import re
import runpy
import string
import sys

import pytest
from google.cloud.dataflow_v1beta3.types import (
    ContainerSpec,
    LaunchFlexTemplateRequest,
    TemplateMetadata,
    WorkerIPAddressConfiguration,
)

from pipeline.config import load_config, settings
from pipeline.launch.dataflow import check_machine
from tests.conftest import REPO

FOLDER = REPO / "deploy" / "flex_template"
METADATA = json.loads((FOLDER / "metadata.json").read_text())
PARAMETERS = {each["name"]: each for each in METADATA["parameters"]}
LAUNCH = runpy.run_path(str(FOLDER / "launch.py"))


def nightly(**values: object) -> dict:
    """The scheduler's request, with its places filled in."""
    text = string.Template((FOLDER / "nightly.json.tftpl").read_text())
    places = {name: f"gs://bucket/{name}" for name in ("spec", "input", "output", "model", "temp", "staging")}
    named = {"name": "detection", "image": "reg/worker:gpu", "service_account": "worker@p.iam", "max_workers": 20, "workers": 2}
    named |= {"time_zone": "Europe/Zurich", "network": "", "subnetwork": "", "addresses": "WORKER_IP_PUBLIC"}
    return json.loads(text.substitute(places | named | values))


def test_the_service_knows_every_field_of_the_metadata():
    spec = {"image": "reg/worker:gpu", "sdkInfo": {"language": "PYTHON"}, "metadata": METADATA}
    assert ContainerSpec.from_json(json.dumps(spec)).metadata == TemplateMetadata.from_json(json.dumps(METADATA))


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_is_a_setting_or_the_config(name):
    known = {"config", *(setting.flag[2:].replace("-", "_") for setting in settings())}
    assert name in known
    assert PARAMETERS[name]["label"] and PARAMETERS[name]["helpText"]


@pytest.mark.parametrize(
    ("parameter", "flag"),
    [
        ("--input=gs://b/a,b/*", "--input=gs://b/a,b/*"),
        ("--score_threshold=0.4", "--score-threshold=0.4"),
        ("--model=gs://b/m", "--model=gs://b/m"),
        ("--allow_empty=true", "--allow-empty"),
        ("--allow_empty=false", "--no-allow-empty"),
        ("--temp_location=gs://b/tmp", "--temp_location=gs://b/tmp"),
        ("--experiments=a=b", "--experiments=a=b"),
        ("--config=batch_gcs_dataflow_gpu", "--config=batch_gcs_dataflow_gpu"),
    ],
)
def test_a_parameter_becomes_the_flag_of_its_setting(parameter, flag):
    assert list(LAUNCH["to_flags"]([parameter])) == [flag]


def test_the_nightly_request_is_one_that_the_service_takes():
    """No field of another name, and only parameters that the template has, each as its pattern wants it."""
    request = LaunchFlexTemplateRequest.from_json(json.dumps(nightly()))
    environment = request.launch_parameter.environment
    assert (environment.num_workers, environment.max_workers) == (2, 20)
    assert environment.staging_location == "gs://bucket/staging" and environment.temp_location == "gs://bucket/temp"
    assert (environment.network, environment.subnetwork) == ("", "")  # the service's default
    given = dict(request.launch_parameter.parameters)
    assert set(given) <= set(PARAMETERS)
    assert {name for name, each in PARAMETERS.items() if not each.get("isOptional")} <= set(given)
    wrong = [
        name for name, value in given.items() for regex in PARAMETERS[name].get("regexes", ()) if not re.search(regex, value)
    ]
    assert wrong == []


def test_the_nightly_request_may_name_a_private_network():
    given = nightly(network="net", subnetwork="regions/r/subnetworks/s", addresses="WORKER_IP_PRIVATE")
    environment = LaunchFlexTemplateRequest.from_json(json.dumps(given)).launch_parameter.environment
    assert (environment.network, environment.subnetwork) == ("net", "regions/r/subnetworks/s")
    assert environment.ip_configuration == WorkerIPAddressConfiguration.WORKER_IP_PRIVATE


def test_the_accelerator_that_the_template_offers_goes_with_the_machines_of_its_config():
    offered = re.search(r"type:[^ ]*", PARAMETERS["accelerator"]["helpText"])[0]
    for config in ("batch_gcs_dataflow_gpu", "streaming_pubsub_dataflow_gpu"):
        said = load_config([config], {})
        check_machine(offered, said.beam_options["machine_type"])


def test_the_launcher_writes_the_nightly_job(gcs_bucket, tmp_path, monkeypatch, capsys, bright_model):
    """With the parameters of the schedule and what the service adds to them; the exit code is the launcher's verdict.

    The launcher runs in the image, where the model is; of what has rows of it already nothing is done again.
    """
    bucket = f"gs://{gcs_bucket.name}"
    request = nightly(input=f"{bucket}/images/{{date:%Y/%m/%d}}/**", output=f"{bucket}/results", model=bright_model)
    environment = request["launchParameter"]["environment"]
    added = {
        "runner": "DataflowRunner",
        "project": "test-project",
        "region": "europe-west1",
        "job_name": request["launchParameter"]["jobName"],
        "temp_location": f"{bucket}/tmp",
        "staging_location": f"{bucket}/tmp",
        "template_location": str(tmp_path / "job_object"),
        "service_account_email": environment["serviceAccountEmail"],
        "sdk_container_image": environment["sdkContainerImage"],
        "max_num_workers": environment["maxWorkers"],
    }
    parameters = [f"--{name}={value}" for name, value in (request["launchParameter"]["parameters"] | added).items()]
    monkeypatch.setattr(sys, "argv", ["launch.py", *parameters, "--no_auth"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "launch.py"), run_name="__main__")
    assert (ended.value.code, capsys.readouterr().err) == (0, "")
    job = json.loads((tmp_path / "job_object").read_text())
    assert job["name"] == "detection-nightly"
    assert job["environment"]["serviceAccountEmail"] == "worker@p.iam"
    assert job["environment"]["workerPools"][0]["autoscalingSettings"]["maxNumWorkers"] == 20
