"""How long `models.evaluate` takes beside pycocotools, and faster-coco-eval if it is installed; equal figures.

python -m tests.benchmarks.evaluation --images 2000 --rounds 3
"""

import argparse
import copy
import statistics
import time

from models.evaluate import FIGURES, evaluate
from tests.models.test_evaluate_as_pycocotools import by_pycocotools, random_case, rows_of


def by_faster_coco_eval(truth, results):
    from faster_coco_eval import COCO, COCOeval_faster

    coco = COCO(truth)
    evaluation = COCOeval_faster(coco, coco.loadRes(results), "bbox")
    evaluation.run()
    return evaluation.stats


def seconds(work, *data):
    data = copy.deepcopy(data)  # the libraries write into theirs
    started = time.perf_counter()
    result = work(*data)
    return time.perf_counter() - started, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    truth, results = random_case(1, args.images, classes=80, most=15, grid=1, extra=40, digits=5)
    by_image = {image["id"]: [] for image in truth["images"]}
    for one in results:
        by_image[one["image_id"]].append(one)
    rows = [row for image in truth["images"] for row in rows_of({"images": [image]}, by_image[image["id"]])]
    ways = {
        "models.evaluate": lambda truth, _: evaluate(rows, truth, multi_label=True),
        "pycocotools": lambda truth, results: by_pycocotools(truth, results)[0],
        "faster-coco-eval": by_faster_coco_eval,
    }
    times = {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            try:
                took, result = seconds(way, truth, results)
            except ImportError:
                continue
            times.setdefault(name, []).append(took)
            ap = result[next(iter(FIGURES))] if isinstance(result, dict) else result[0]
            print(f"{name:<18} {took:6.2f} s  AP {ap:.6f}", flush=True)
    own = statistics.median(times.pop("models.evaluate"))
    for name, taken in times.items():
        print(f"{name} takes {statistics.median(taken) / own:.1f} times as long")


if __name__ == "__main__":
    main()
