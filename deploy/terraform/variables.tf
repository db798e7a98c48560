variable "project" {
  description = "The Google Cloud project that pays for it."
  type        = string
}

variable "region" {
  description = "Where the bucket and the workers are: images should not leave their region."
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

variable "image_tag" {
  description = "Tag of the image built from deploy/Dockerfile and pushed as <repository>/worker:<tag>."
  type        = string
  default     = "gpu"
}

variable "alert_channels" {
  description = "Notification channels of Cloud Monitoring that hear when a job failed: projects/<project>/notificationChannels/<id>."
  type        = list(string)
  default     = []
}
