"""What this package and the pipeline both stand on."""
