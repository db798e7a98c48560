"""`deploy/kubernetes/`: the schemas of Kubernetes accept its objects, and this program accepts the commands in them."""

import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml

from tests.conftest import REPO
from tests.deploy.test_cron import config_of

FOLDER = REPO / "deploy/kubernetes"
OBJECTS = {
    path.name: found
    for path in sorted(FOLDER.glob("base/*.yaml"))
    if path.name != "kustomization.yaml"
    for found in yaml.safe_load_all(path.read_text())
}

PODS = {
    "stream.yaml": OBJECTS["stream.yaml"]["spec"]["template"]["spec"],
    "backfill.yaml": OBJECTS["backfill.yaml"]["spec"]["jobTemplate"]["spec"]["template"]["spec"],
}


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_each_object_is_one_of_kubernetes_with_a_command_of_this_program_no_privileges_and_limits(name):
    kubernetes_validate.validate(OBJECTS[name], "1.31", strict=True)
    (container,) = PODS[name]["containers"]
    assert container["command"] == ["python", "-m", "pipeline.run"]
    config = config_of(container["args"])
    assert config.monitoring.log_format == "json"
    assert (config.mode == "streaming") == (name == "stream.yaml")
    assert PODS[name]["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
    assert PODS[name]["terminationGracePeriodSeconds"] >= 60


def test_the_probes_ask_the_health_checks_on_the_port_of_the_metrics():
    (container,) = PODS["stream.yaml"]["containers"]
    (port,) = container["ports"]
    assert f"--metrics-port={port['containerPort']}" in container["args"]
    paths = {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    for kind, path in paths.items():
        assert container[f"{kind}Probe"]["httpGet"] == {"port": port["name"], "path": path}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl, which builds the overlay")
def test_the_overlay_of_a_gpu_adds_one():
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / "gpu")], capture_output=True, text=True, check=True)
    deployment = next(each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1 and "--device=gpu" in container["args"]


def test_flinks_operator_gets_the_version_and_the_settings_that_streams_need():
    (found,) = yaml.safe_load_all((FOLDER / "flink.yaml").read_text())
    pom = (REPO / "deploy/flink/pom.xml").read_text()
    version = found["spec"]["flinkVersion"].removeprefix("v").replace("_", ".")
    assert f"<flink.version>{version}." in pom
    needed = {"state.checkpoints.dir", "state.savepoints.dir", "classloader.resolve-order"}
    assert needed <= set(found["spec"]["flinkConfiguration"])
