"""ONNX: the environment of the converter, and the conversion in it; the command is `detect-objects import model.onnx`."""
