"""TensorFlow as jobs import it: without Keras, whose import takes two seconds of a core in each process of the suite."""

from pipeline.detect.tensorflow_internals import import_without_keras

tf = import_without_keras()
