variable "project" {
  description = "The Google Cloud project that pays for it."
  type        = string
}

variable "region" {
  description = "Where the bucket, the workers and the schedule are: images should not leave their region."
  type        = string
  default     = "europe-west1"
}

variable "name" {
  description = "Names all that is made here; several may stand beside each other in a project."
  type        = string
  default     = "detection"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{3,20}$", var.name))
    error_message = "Expected 4 to 21 lowercase letters, digits and dashes, a letter first."
  }
}

variable "images_prefix" {
  description = "Folder of the bucket where new images arrive; each is notified to the stream."
  type        = string
  default     = "images/"
}

variable "nightly_input" {
  description = "What the nightly job reads, below images_prefix; {date} stands for each of the last seven days."
  type        = string
  default     = "{date:%Y/%m/%d}/**"
}

variable "model" {
  description = "A SavedModel or a folder of versions: gs://, or /models/<name> where it is in the image; digits: the bundled one."
  type        = string
}

variable "image_tag" {
  description = "Tag of the image built from deploy/Dockerfile and pushed as <repository>/worker:<tag>."
  type        = string
  default     = "gpu"
}

variable "workers" {
  description = "Workers that the nightly job starts with; Dataflow adds more as it finds that they pay."
  type        = number
  default     = 2
}

variable "max_workers" {
  description = "Most workers of the nightly job, within your GPU quota."
  type        = number
  default     = 20
}

variable "network" {
  description = "VPC network of the nightly job's workers; empty: the one of the subnetwork, or default."
  type        = string
  default     = ""
}

variable "subnetwork" {
  description = "Their subnetwork, regions/<region>/subnetworks/<name>; of a shared VPC, its whole URL."
  type        = string
  default     = ""
}

variable "use_public_ips" {
  description = "Whether they have public addresses; without, their subnetwork needs Private Google Access."
  type        = bool
  default     = true
}

variable "schedule" {
  description = "When the nightly job starts, as cron writes it; empty: never."
  type        = string
  default     = "0 3 * * *"
}

variable "time_zone" {
  description = "Time zone of the schedule, and of the days that it reads."
  type        = string
  default     = "Etc/UTC"
}

variable "alert_channels" {
  description = "Notification channels of Cloud Monitoring that hear when a job failed or was not started: projects/<project>/notificationChannels/<id>."
  type        = list(string)
  default     = []
}
