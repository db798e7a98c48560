"""Detectors: what they say of themselves, importers and exporters, geometry, and the bundled one.

Needs nothing of `pipeline`.
"""
