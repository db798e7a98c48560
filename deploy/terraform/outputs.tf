output "image" {
  description = "Build deploy/Dockerfile under this name, and push it."
  value       = local.image
}

output "job_prefix" {
  description = "The beginning of each --job_name: the alarm hears of these jobs."
  value       = "${var.name}-"
}

output "staging" {
  description = "The --staging_location of jobs: nothing there is deleted while a stream may need it."
  value       = local.staging
}

output "subscription" {
  description = "The stream's --input."
  value       = google_pubsub_subscription.images.id
}

output "topics" {
  description = "The stream's --output (detections) and --dead-letter-topic (dead)."
  value       = local.published
}

output "service_account" {
  description = "The workers' --service_account_email."
  value       = google_service_account.worker.email
}
