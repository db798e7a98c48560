"""Detectors: their description and geometry, exporters, importers, evaluation, and the bundled detector.

`pipeline/` uses `metadata`, `geometry`, `quiet`, `export.suppress`, `digits`, `user_cache`, and `evaluate` without average
precision.
Nothing here imports from `pipeline/`.
"""
