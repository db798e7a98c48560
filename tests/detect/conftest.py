"""Detectors of several versions."""

import contextlib

import pytest

from pipeline.config import ModelConfig
from pipeline.detect.load_detector import load_detector
from tests.detect.versioned_models import FAST


@pytest.fixture
def open_detector():
    """Loads detectors that look for versions only when told to (`look`); closes them all."""
    with contextlib.ExitStack() as stack:

        def load(path, version=None, detect=FAST):
            model = ModelConfig(path=str(path), model_version=version, model_poll_s=1e6)
            return stack.enter_context(contextlib.closing(load_detector(model, detect)))

        yield load
