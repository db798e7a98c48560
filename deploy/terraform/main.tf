# What a detection service needs beside its jobs. Jobs are started by commands (see docs/howto-dataflow.md), since an update must replace a stream
# by a command, not by destroying it.

locals {
  image   = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}/worker:${var.image_tag}"
  staging = "gs://${google_storage_bucket.this.name}/staging"
  apis = toset([
    "artifactregistry.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "compute.googleapis.com",
    "dataflow.googleapis.com",
    "iam.googleapis.com",
    "logging.googleapis.com",
    "monitoring.googleapis.com",
    "pubsub.googleapis.com",
    "storage.googleapis.com",
  ])
  published = {
    detections = google_pubsub_topic.detections.id
    dead       = google_pubsub_topic.dead.id
  }
}

data "google_storage_project_service_account" "this" {
  depends_on = [google_project_service.this]
}

resource "google_project_service" "this" {
  for_each           = local.apis
  service            = each.value
  disable_on_destroy = false
}

# ---- Bucket: images, models, results, and what jobs leave for a while

resource "google_storage_bucket" "this" {
  name                        = "${var.project}-${var.name}"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  # No job needs its temporary files for longer: Dataflow ends a batch job after 10 days. What a job stages (staging/) has no such rule: a
  # stream runs for months, and each worker that starts fetches it.
  lifecycle_rule {
    condition {
      age            = 14
      matches_prefix = ["tmp/"]
    }
    action {
      type = "Delete"
    }
  }

  depends_on = [google_project_service.this]
}

resource "google_artifact_registry_repository" "images" {
  repository_id = var.name
  location      = var.region
  format        = "DOCKER"
  depends_on    = [google_project_service.this]
}

# ---- Topics and subscriptions

resource "google_pubsub_topic" "images" {
  name       = "${var.name}-images"
  depends_on = [google_project_service.this]
}

resource "google_pubsub_topic" "detections" {
  name       = "${var.name}-detections"
  depends_on = [google_project_service.this]
}

# images that cannot be detected, each with its reason
resource "google_pubsub_topic" "dead" {
  name       = "${var.name}-dead"
  depends_on = [google_project_service.this]
}

# Dataflow supports neither a retry policy nor a dead-letter topic of Pub/Sub: https://cloud.google.com/pubsub/docs/handling-failures
resource "google_pubsub_subscription" "images" {
  name                       = "${var.name}-images"
  topic                      = google_pubsub_topic.images.id
  ack_deadline_seconds       = 600 # for Dataflow, whose own source acknowledges; give 10 for other runners, where jobs extend it
  message_retention_duration = "604800s"

  expiration_policy {
    ttl = ""
  }
}

# ---- New images are notified

resource "google_pubsub_topic_iam_member" "notified" {
  topic  = google_pubsub_topic.images.id
  role   = "roles/pubsub.publisher"
  member = "serviceAccount:${data.google_storage_project_service_account.this.email_address}"
}

resource "google_storage_notification" "images" {
  bucket             = google_storage_bucket.this.name
  topic              = google_pubsub_topic.images.id
  payload_format     = "JSON_API_V1"
  event_types        = ["OBJECT_FINALIZE"]
  object_name_prefix = var.images_prefix
  depends_on         = [google_pubsub_topic_iam_member.notified]
}

# ---- Workers: this bucket, this subscription, these topics, this repository, and being a worker

resource "google_service_account" "worker" {
  account_id   = "${var.name}-worker"
  display_name = "Workers and launcher of ${var.name}"
  depends_on   = [google_project_service.this]
}

resource "google_project_iam_member" "worker" {
  project    = var.project
  role       = "roles/dataflow.worker"
  member     = google_service_account.worker.member
  depends_on = [google_project_service.this]
}

# the same account launches jobs: it makes them, and lets them run as itself
resource "google_project_iam_member" "launcher" {
  project    = var.project
  role       = "roles/dataflow.developer"
  member     = google_service_account.worker.member
  depends_on = [google_project_service.this]
}

resource "google_service_account_iam_member" "launcher" {
  service_account_id = google_service_account.worker.name
  role               = "roles/iam.serviceAccountUser"
  member             = google_service_account.worker.member
}

resource "google_storage_bucket_iam_member" "worker" {
  bucket = google_storage_bucket.this.name
  role   = "roles/storage.objectUser"
  member = google_service_account.worker.member
}

resource "google_pubsub_subscription_iam_member" "worker" {
  for_each     = toset(["roles/pubsub.subscriber", "roles/pubsub.viewer"])
  subscription = google_pubsub_subscription.images.id
  role         = each.value
  member       = google_service_account.worker.member
}

resource "google_pubsub_topic_iam_member" "publisher" {
  for_each = local.published
  topic    = each.value
  role     = "roles/pubsub.publisher"
  member   = google_service_account.worker.member
}

# the launcher makes sure that they are there before it starts
resource "google_pubsub_topic_iam_member" "viewer" {
  for_each = local.published
  topic    = each.value
  role     = "roles/pubsub.viewer"
  member   = google_service_account.worker.member
}

resource "google_artifact_registry_repository_iam_member" "worker" {
  repository = google_artifact_registry_repository.images.name
  location   = var.region
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.worker.member
}

# ---- Alarms: a job failed, of those whose --job_name begins with var.name, as in the documented commands

resource "google_monitoring_alert_policy" "failed" {
  count                 = length(var.alert_channels) == 0 ? 0 : 1
  display_name          = "A job of ${var.name} failed"
  combiner              = "OR"
  notification_channels = var.alert_channels

  conditions {
    display_name = "A Dataflow job is in the state failed"

    condition_threshold {
      filter          = "resource.type = \"dataflow_job\" AND resource.label.job_name = starts_with(\"${var.name}-\") AND metric.type = \"dataflow.googleapis.com/job/is_failed\""
      comparison      = "COMPARISON_GT"
      threshold_value = 0
      duration        = "0s"

      aggregations {
        alignment_period   = "60s"
        per_series_aligner = "ALIGN_MAX"
      }
    }
  }

  depends_on = [google_project_service.this]
}
