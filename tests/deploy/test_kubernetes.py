"""`deploy/kubernetes/`: the schemas of Kubernetes accept its objects, and this program accepts the commands in them."""

import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml

from tests.conftest import REPO
from tests.deploy.test_cron import config_of

FOLDER = REPO / "deploy/kubernetes"
OBJECTS = [
    found
    for path in sorted(FOLDER.glob("**/*.yaml"))
    if path.name != "kustomization.yaml"
    for found in yaml.safe_load_all(path.read_text())
]
OF_KUBERNETES = [each for each in OBJECTS if each["apiVersion"].partition("/")[0] not in ("flink.apache.org", "keda.sh")]


def the(kind: str, name: str) -> dict:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


STREAM, BACKFILL, FLINK = (
    the("Deployment", "detect-stream"),
    the("CronJob", "detect-backfill"),
    the("FlinkDeployment", "detect-flink"),
)
PODS = {
    "stream.yaml": STREAM["spec"]["template"]["spec"],
    "backfill.yaml": BACKFILL["spec"]["jobTemplate"]["spec"]["template"]["spec"],
}


@pytest.mark.parametrize("found", OF_KUBERNETES, ids=lambda found: f"{found['kind']} {found['metadata']['name']}")
def test_each_object_is_one_of_kubernetes(found):
    kubernetes_validate.validate(found, "1.31", strict=True)


def test_each_account_that_a_pod_runs_as_is_made():
    """Pods of one that is not there are refused."""
    made = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "ServiceAccount"}
    assert {*(pod["serviceAccountName"] for pod in PODS.values()), FLINK["spec"]["serviceAccount"]} == made
    bound = the("RoleBinding", "detect-flink")
    assert bound["roleRef"]["name"] == the("Role", "detect-flink")["metadata"]["name"]
    assert [subject["name"] for subject in bound["subjects"]] == [FLINK["spec"]["serviceAccount"]]


@pytest.mark.parametrize("base", ["base", "gpu"])
def test_the_kustomization_has_each_file_of_its_folder(base):
    found = yaml.safe_load((FOLDER / base / "kustomization.yaml").read_text())["resources"]
    files = {path.name for path in (FOLDER / base).glob("*.yaml")} - {"kustomization.yaml"}
    assert {*found} - {"../base"} == files


@pytest.mark.parametrize("name", sorted(PODS))
def test_each_pod_has_a_command_of_this_program_no_privileges_and_limits(name):
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
    pom = (REPO / "deploy/flink/pom.xml").read_text()
    version = FLINK["spec"]["flinkVersion"].removeprefix("v").replace("_", ".")
    assert f"<flink.version>{version}." in pom
    needed = {"state.checkpoints.dir", "state.savepoints.dir", "classloader.resolve-order"}
    assert needed <= set(CONFIGURATION)


CONFIGURATION = FLINK["spec"]["flinkConfiguration"]


def test_flink_has_the_plugin_of_the_storage_that_its_configuration_names():
    """Without it the JobManager does not start."""
    assert any(str(value).startswith("gs://") for value in CONFIGURATION.values())
    (container,) = FLINK["spec"]["podTemplate"]["spec"]["containers"]
    (version,) = re.findall(r"<flink.version>([\d.]+)<", (REPO / "deploy/flink/pom.xml").read_text())
    assert {"name": "ENABLE_BUILT_IN_PLUGINS", "value": f"flink-gs-fs-hadoop-{version}.jar"} in container["env"]
    assert container["name"] == "flink-main-container", "the operator merges the template into this one"


def megabytes(text: str) -> int:
    return int(text.removesuffix("m"))


def test_the_memory_of_flinks_jvm_and_of_the_python_worker_adds_up_to_the_pods():
    """The worker has as much as the pod of a stream without Flink is sure to get."""
    memory = {name.removeprefix("taskmanager.memory."): value for name, value in CONFIGURATION.items() if ".memory." in name}
    assert memory.pop("network.max") == memory["network.min"] and memory.pop("jvm-overhead.max") == memory["jvm-overhead.min"]
    assert sum(map(megabytes, memory.values())) == megabytes(FLINK["spec"]["taskManager"]["resource"]["memory"])
    (container,) = PODS["stream.yaml"]["containers"]
    assert megabytes(memory["task.off-heap.size"]) >= 1024 * int(container["resources"]["requests"]["memory"].removesuffix("Gi"))


@pytest.mark.skipif(
    not shutil.which("java") or not (REPO / ".tools/flink/.ready").exists(), reason="no Flink; make flink gets it"
)
def test_flink_itself_can_divide_the_memory(tmp_path):
    own = {**CONFIGURATION, "taskmanager.memory.process.size": FLINK["spec"]["taskManager"]["resource"]["memory"]}
    own["taskmanager.cpu.cores"] = FLINK["spec"]["taskManager"]["resource"]["cpu"]
    (tmp_path / "flink-conf.yaml").write_text("".join(f"{name}: {value}\n" for name, value in own.items()))
    tool = ["org.apache.flink.runtime.util.bash.BashJavaUtils", "GET_TM_RESOURCE_PARAMS", "--configDir", str(tmp_path)]
    done = subprocess.run(["java", "-cp", f"{REPO}/.tools/flink/lib/*", *tool], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "-Xmx" in done.stdout, done.stderr


def test_keda_scales_the_stream_by_its_subscription():
    scaled, (container,) = the("ScaledObject", "detect-stream")["spec"], PODS["stream.yaml"]["containers"]
    assert scaled["scaleTargetRef"]["name"] == STREAM["metadata"]["name"]
    (trigger,) = scaled["triggers"]
    assert f"--input={trigger['metadata']['subscriptionName']}" in container["args"]
    assert trigger["authenticationRef"]["name"] == the("TriggerAuthentication", "detect-stream")["metadata"]["name"]
    assert scaled["minReplicaCount"] >= 1, "a stream of none would answer nobody"
