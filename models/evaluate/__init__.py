"""How good the detections of an output are: COCO average precision, errors by kind, and agreement with another output."""

from models.evaluate.agreement import compare
from models.evaluate.average_precision import FIGURES, evaluate

__all__ = ["FIGURES", "compare", "evaluate"]
