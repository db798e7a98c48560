"""Detectors: their description and geometry, exporters, importers, evaluation, and the bundled detector.

Nothing here imports from `pipeline/`.
"""
