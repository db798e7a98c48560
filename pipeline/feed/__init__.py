"""The feeder: processes that read, decode and fit images into memory shared with the process that detects."""
