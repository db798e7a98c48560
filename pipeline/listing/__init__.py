"""What an input names: from patterns, folders and manifests to names of images, and from containers to images."""
