"""What Terraform makes: parsed, each name in it leads somewhere, and nobody may more than their work needs."""

import json
import re
import shutil
import subprocess

import pytest

from tests.conftest import REPO

hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is not installed; get it with `pip install python-hcl2`")
FOLDER = REPO / "deploy" / "terraform"


def unquoted(value):
    """The parser leaves quotes around texts and names."""
    if isinstance(value, dict):
        return {unquoted(key): unquoted(part) for key, part in value.items() if key not in ("__is_block__", "__comments__")}
    if isinstance(value, list):
        return [unquoted(part) for part in value]
    return value[1:-1] if isinstance(value, str) and re.fullmatch(r'".*"', value, re.DOTALL) else value


PARSED = [unquoted(hcl2.loads(path.read_text())) for path in sorted(FOLDER.glob("*.tf"))]


def blocks(kind: str) -> dict[str, dict]:
    """Blocks of a kind by what stands behind it: `resource` and `data` by `<type>.<name>`, others by name."""
    found: dict[str, dict] = {}
    for block in (block for file in PARSED for block in file.get(kind, ())):
        for name, inner in block.items():
            found |= {f"{name}.{below}": part for below, part in inner.items()} if kind in ("resource", "data") else {name: inner}
    return found


TEXT = json.dumps(PARSED)
RESOURCES = blocks("resource")
(LOCALS,) = [file["locals"][0] for file in PARSED if "locals" in file]


@pytest.mark.skipif(not shutil.which("terraform"), reason="terraform is not installed")
def test_it_is_formatted_as_terraform_does():
    done = subprocess.run(["terraform", "fmt", "-check", "-diff"], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_reference_leads_somewhere():
    """As `terraform validate` would say first, without the provider that it needs."""
    assert set(re.findall(r"\bvar\.(\w+)", TEXT)) == set(blocks("variable"))
    assert set(re.findall(r"\blocal\.(\w+)", TEXT)) == set(LOCALS)
    assert set(re.findall(r"(?<!data\.)\b(google_\w+\.\w+)\.", TEXT)) <= set(RESOURCES)
    assert set(re.findall(r"\bdata\.(google_\w+\.\w+)", TEXT)) == set(blocks("data"))


def test_on_the_whole_project_an_account_may_only_be_what_it_is():
    """Everything else is granted on the one bucket, subscription, topic, repository or account; nobody edits or owns."""
    on_project = {name: each["role"] for name, each in RESOURCES.items() if name.startswith("google_project_iam_member.")}
    assert on_project == {
        "google_project_iam_member.worker": "roles/dataflow.worker",
        "google_project_iam_member.launcher": "roles/dataflow.developer",
    }
    assert not re.search(r"(?i)roles/[\w.]*(owner|editor|admin\b)", TEXT)


def test_what_a_job_stages_is_never_deleted_and_what_it_leaves_not_while_it_runs():
    """A worker fetches the staged files when it starts, and a stream has no end; a batch job on Dataflow ends after ten days."""
    staged = re.search(r"\.name\}/(.*)$", LOCALS["staging"])[1] + "/"
    (bucket,) = [each for name, each in RESOURCES.items() if name.startswith("google_storage_bucket.")]
    (condition,) = [rule["condition"][0] for rule in bucket["lifecycle_rule"]]
    assert condition["matches_prefix"] == ["tmp/"] and not staged.startswith("tmp/")
    assert condition["age"] > 10


def test_the_account_of_workers_and_launcher_may_launch_a_job_that_runs_as_itself():
    account = RESOURCES["google_service_account_iam_member.launcher"]
    assert (account["role"], account["service_account_id"]) == (
        "roles/iam.serviceAccountUser",
        "${google_service_account.worker.name}",
    )
    assert account["member"] == "${google_service_account.worker.member}"


@pytest.mark.parametrize("config", ["batch_gcs_dataflow_gpu.yaml", "streaming_pubsub_dataflow_gpu.yaml"])
def test_the_alarm_hears_of_the_jobs_that_the_documented_commands_start(config):
    (policy,) = [each for name, each in RESOURCES.items() if name.startswith("google_monitoring_alert_policy.")]
    text = policy["conditions"][0]["condition_threshold"][0]["filter"].replace('\\\\"', '"').replace('\\"', '"')
    (prefix,) = re.findall(r'job_name = starts_with\("(.*?)"\)', text)
    (name,) = re.findall(r"--job_name (\S+)", (REPO / "configs" / config).read_text())
    default = blocks("variable")["name"]["default"]
    assert name.startswith(prefix.replace("${var.name}", default)) and default in prefix.replace("${var.name}", default)
