"""What Terraform makes: parsed, each name in it leads somewhere, and nobody may more than their work needs."""

import json
import re
import shutil
import subprocess

import pytest

from tests.conftest import REPO

hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is not installed; get it with `pip install python-hcl2`")
FOLDER = REPO / "deploy" / "terraform"
ON_THE_PROJECT = {"worker": "roles/dataflow.worker", "scheduler": "roles/dataflow.developer"}


def unquoted(value):
    """The parser leaves quotes around texts and names."""
    if isinstance(value, dict):
        return {unquoted(key): unquoted(part) for key, part in value.items() if key not in ("__is_block__", "__comments__")}
    if isinstance(value, list):
        return [unquoted(part) for part in value]
    return value[1:-1] if isinstance(value, str) and re.fullmatch(r'".*"', value, re.DOTALL) else value


PARSED = [unquoted(hcl2.loads(path.read_text())) for path in sorted(FOLDER.glob("*.tf"))]


def blocks(kind: str) -> dict[str, dict]:
    """`resource` or `data` blocks by `<type>.<name>`, others by name."""
    found: dict[str, dict] = {}
    for block in (block for file in PARSED for block in file.get(kind, ())):
        for name, inner in block.items():
            found |= {f"{name}.{below}": part for below, part in inner.items()} if kind in ("resource", "data") else {name: inner}
    return found


def resources(kind: str) -> dict[str, dict]:
    return {name.partition(".")[2]: block for name, block in blocks("resource").items() if name.startswith(f"{kind}.")}


def test_it_is_formatted_as_terraform_does():
    if not shutil.which("terraform"):
        pytest.skip("terraform is not installed")
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", FOLDER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_reference_leads_somewhere():
    """As `terraform validate` would say first, without the provider that it needs."""
    text = json.dumps(PARSED)
    assert set(re.findall(r"\bvar\.(\w+)", text)) == set(blocks("variable"))
    (named,) = [file["locals"][0] for file in PARSED if "locals" in file]
    assert set(re.findall(r"\blocal\.(\w+)", text)) == set(named)
    assert set(re.findall(r"(?<!data\.)\b(google_\w+\.\w+)\.", text)) <= set(blocks("resource"))
    assert set(re.findall(r"\bdata\.(google_\w+\.\w+)", text)) == set(blocks("data"))


def test_each_file_that_it_reads_is_there():
    read = re.findall(r'(?:file|templatefile)\(\\*"\$\{path\.module\}/([^"\\]+)\\*"', json.dumps(PARSED))
    assert sorted(read) == ["../flex_template/metadata.json", "../flex_template/nightly.json.tftpl"]
    assert [name for name in read if not (FOLDER / name).is_file()] == []


def test_the_nightly_request_gets_every_place_that_it_has():
    (job,) = resources("google_cloud_scheduler_job").values()
    given = re.search(r"templatefile\(.*?, \{(.*)\}\)", job["http_target"][0]["body"], re.DOTALL)[1]
    wanted = re.findall(r"\$\{(\w+)\}", (FOLDER / "../flex_template/nightly.json.tftpl").read_text())
    assert set(re.findall(r"(?:^|, )\s*(\w+) = ", given)) == set(wanted)


def test_a_message_that_nobody_can_take_is_kept():
    """The stream's subscription has a dead-letter policy, whose topic has a subscription; none of them expires."""
    subscriptions = resources("google_pubsub_subscription")
    (policy,) = subscriptions["images"]["dead_letter_policy"]
    assert policy["dead_letter_topic"] == "${google_pubsub_topic.undeliverable.id}"
    assert subscriptions["undeliverable"]["topic"] == policy["dead_letter_topic"]
    assert [each["expiration_policy"] for each in subscriptions.values()] == [[{"ttl": ""}]] * 2
    moved_by_pubsub = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
    moving = (resources("google_pubsub_topic_iam_member"), resources("google_pubsub_subscription_iam_member"))
    assert [each["undeliverable"]["member"] for each in moving] == [moved_by_pubsub] * 2
    assert [each["undeliverable"]["role"] for each in moving] == ["roles/pubsub.publisher", "roles/pubsub.subscriber"]


def test_new_images_are_notified_to_the_stream():
    (notification,) = resources("google_storage_notification").values()
    assert notification["event_types"] == ["OBJECT_FINALIZE"]
    assert notification["payload_format"] == "JSON_API_V1"
    assert notification["topic"] == resources("google_pubsub_subscription")["images"]["topic"]


def test_on_the_whole_project_an_account_may_only_be_what_it_is():
    """Everything else is granted on the one bucket, subscription, topic, repository or account; nobody edits or owns."""
    on_project = {name: each["role"] for name, each in resources("google_project_iam_member").items()}
    assert on_project == ON_THE_PROJECT
    roles = set(re.findall(r"roles/[\w.]+", json.dumps(PARSED)))
    assert not [role for role in roles if re.search(r"(?i)owner|editor|admin$", role)]


def test_the_bucket_is_closed_to_the_public():
    (bucket,) = resources("google_storage_bucket").values()
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["public_access_prevention"] == "enforced"


def test_what_is_deleted_by_mistake_can_be_restored():
    """Cloud Storage keeps deleted objects for a week unless a policy says otherwise."""
    (bucket,) = resources("google_storage_bucket").values()
    assert "soft_delete_policy" not in bucket


def test_the_schedule_launches_with_its_own_account():
    (job,) = resources("google_cloud_scheduler_job").values()
    (target,) = job["http_target"]
    assert target["oauth_token"] == [{"service_account_email": "${google_service_account.scheduler.email}"}]
    assert target["uri"].endswith("/locations/${var.region}/flexTemplates:launch")


def test_a_job_that_failed_or_was_not_started_is_told_of():
    policies = resources("google_monitoring_alert_policy")
    assert {each["notification_channels"] for each in policies.values()} == {"${var.alert_channels}"}
    (failed,), (not_started,) = (policies[name]["conditions"] for name in ("failed", "not_started"))
    assert "dataflow.googleapis.com/job/is_failed" in failed["condition_threshold"][0]["filter"]
    assert "${google_cloud_scheduler_job.nightly[0].name}" in not_started["condition_matched_log"][0]["filter"]
    (job,) = resources("google_cloud_scheduler_job").values()
    assert job["name"].startswith("${var.name}")
    request = re.sub(
        r": \$\{\w+\}", ": 1", (FOLDER / "../flex_template/nightly.json.tftpl").read_text()
    )  # the bare ones are numbers
    assert json.loads(request)["launchParameter"]["jobName"].startswith("${name}")


# of each kind of resource or data source the APIs that making or reading it calls, beside that of IAM for accounts' policies
APIS = {
    "google_artifact_registry_repository": {"artifactregistry"},
    "google_artifact_registry_repository_iam_member": {"artifactregistry"},
    "google_cloud_scheduler_job": {"cloudscheduler"},
    "google_monitoring_alert_policy": {"monitoring"},
    "google_project": {"cloudresourcemanager"},
    "google_project_iam_member": {"cloudresourcemanager"},
    "google_project_service": set(),
    "google_pubsub_subscription": {"pubsub"},
    "google_pubsub_subscription_iam_member": {"pubsub"},
    "google_pubsub_topic": {"pubsub"},
    "google_pubsub_topic_iam_member": {"pubsub"},
    "google_service_account": {"iam"},
    "google_service_account_iam_member": {"iam"},
    "google_storage_bucket": {"storage"},
    "google_storage_bucket_iam_member": {"storage"},
    "google_storage_bucket_object": {"storage"},
    "google_storage_notification": {"storage"},
    "google_storage_project_service_account": {"storage"},
}
OF_JOBS = {"compute", "dataflow", "logging"}  # what the jobs themselves call


def declared() -> dict[str, dict]:
    """Resources and data sources, by the names that others refer to them by."""
    return blocks("resource") | {f"data.{name}": block for name, block in blocks("data").items()}


def referred(block: dict) -> set[str]:
    """The resources and data sources that a block names."""
    found = re.findall(r"(?:data\.)?google_\w+\.\w+", json.dumps(block))
    return {name for name in found if name in declared()}


def test_each_api_that_is_called_is_enabled():
    """A new project has none of them: the first `apply` would fail."""
    (named,) = [file["locals"][0] for file in PARSED if "locals" in file]
    enabled = set(re.findall(r"(\w+)\.googleapis\.com", json.dumps(named["apis"])))
    kinds = {name.removeprefix("data.").partition(".")[0] for name in declared()}
    assert enabled == OF_JOBS.union(*(APIS[kind] for kind in kinds))


@pytest.mark.parametrize("name", sorted(set(declared()) - {"google_project_service.this"}))
def test_nothing_is_made_before_the_apis_are_enabled(name):
    """By itself, or since it refers to something that waits for them."""
    waits, names = set(), {name}
    while names:
        waits |= names
        names = set().union(*(referred(declared()[each]) for each in names)) - waits
    assert "google_project_service.this" in waits


def lifecycle() -> list[dict]:
    (bucket,) = resources("google_storage_bucket").values()
    return bucket["lifecycle_rule"]


def test_what_a_job_stages_is_never_deleted_and_what_it_leaves_not_while_it_runs():
    """A worker fetches the staged files when it starts, and a stream has no end; a batch job on Dataflow ends after ten days."""
    (named,) = [file["locals"][0] for file in PARSED if "locals" in file]
    staged = re.search(r"\.name\}/(.*)$", named["staging"])[1] + "/"
    (condition,) = [rule["condition"][0] for rule in lifecycle()]
    assert condition["matches_prefix"] == ["tmp/"] and not staged.startswith("tmp/")
    assert condition["age"] > 10
    (job,) = resources("google_cloud_scheduler_job").values()
    assert re.search(r"staging\s+= local\.staging\b", job["http_target"][0]["body"])


def test_the_workers_network_addresses_and_number_can_be_given():
    (job,) = resources("google_cloud_scheduler_job").values()
    body = job["http_target"][0]["body"]
    for variable in ("network", "subnetwork", "use_public_ips", "workers"):
        assert f"var.{variable}" in body
