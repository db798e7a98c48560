"""TensorFlow as jobs import it: without Keras, whose import takes two seconds of a core in each process of the suite."""

from models.base.quiet import gc_paused
from pipeline.detect.tensorflow_internals import import_without_keras

with gc_paused():
    tf = import_without_keras()
