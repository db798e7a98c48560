"""What people run on a GPU by hand: YOLOv8n compiled by PyTorch behind its DataLoader, and suppression on the device.

    python -m tests.benchmarks.torch_loader --images FOLDER    # prints images per second

A worker for each core reads, decodes and letterboxes with OpenCV, as Ultralytics does. Pixels go to the device as bytes; the
best 300 boxes of an image stay there and are suppressed there, 60 of them sure, since the weights are random. On a GPU the
network computes in float16. The first batches, in which PyTorch compiles, do not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torchvision
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from pipeline.limits import available_cpus

SIDE, CLASSES, PICKED, SURE = 640, 80, 300, 60
_WARM = 3  # batches


class Conv(nn.Module):
    """A convolution, with its batch normalisation folded into it."""

    def __init__(self, before: int, after: int, kernel: int = 1, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, kernel // 2)

    def forward(self, x: Any) -> Any:
        """Activates, too."""
        return functional.silu(self.conv(x))


class C2f(nn.Module):
    """Ultralytics' block of bottlenecks, all of whose outputs are joined."""

    def __init__(self, before: int, after: int, blocks: int = 1, *, adds: bool = False):
        super().__init__()
        half, self.adds = after // 2, adds
        self.first, self.last = Conv(before, after), Conv((2 + blocks) * half, after)
        self.blocks = nn.ModuleList(nn.Sequential(Conv(half, half, 3), Conv(half, half, 3)) for _ in range(blocks))

    def forward(self, x: Any) -> Any:
        """Joins the halves and the outputs of all blocks."""
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]) if self.adds else block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class YoloV8n(nn.Module):
    """YOLOv8n from uint8 images `(n, H, W, 3)` to the best boxes `(n, 300, 6)`: xyxy in pixels, score, class."""

    def __init__(self) -> None:
        super().__init__()
        stem = Conv(3, 16, 3, 2), Conv(16, 32, 3, 2), C2f(32, 32, adds=True)
        self.stage3 = nn.Sequential(*stem, Conv(32, 64, 3, 2), C2f(64, 64, 2, adds=True))
        self.stage4 = nn.Sequential(Conv(64, 128, 3, 2), C2f(128, 128, 2, adds=True))
        self.stage5 = nn.Sequential(Conv(128, 256, 3, 2), C2f(256, 256, adds=True), Conv(256, 128))
        self.pooled = Conv(512, 256)
        self.up4, self.up3, self.down4, self.down5 = C2f(384, 128), C2f(192, 64), C2f(192, 128), C2f(384, 256)
        self.half3, self.half4 = Conv(64, 64, 3, 2), Conv(128, 128, 3, 2)
        self.boxes, self.classes = (
            nn.ModuleList(nn.Sequential(Conv(c, w, 3), Conv(w, w, 3), nn.Conv2d(w, out, 1)) for c in (64, 128, 256))
            for w, out in ((64, 64), (80, CLASSES))
        )

    def forward(self, pixels: Any) -> Any:
        """Casts and scales on the device, too."""
        p3 = self.stage3(pixels.permute(0, 3, 1, 2).to(self.pooled.conv.weight.dtype) / 255)
        p4 = self.stage4(p3)
        p5 = [self.stage5(p4)]
        for _ in range(3):
            p5.append(functional.max_pool2d(p5[-1], 5, 1, 2))
        top = self.pooled(torch.cat(p5, 1))
        middle = self.up4(torch.cat([functional.interpolate(top, scale_factor=2.0), p4], 1))
        n3 = self.up3(torch.cat([functional.interpolate(middle, scale_factor=2.0), p3], 1))
        n4 = self.down4(torch.cat([self.half3(n3), middle], 1))
        n5 = self.down5(torch.cat([self.half4(n4), top], 1))
        heads = zip((n3, n4, n5), self.boxes, self.classes, strict=True)
        boxes, scores = zip(*(_decoded(boxes(x), classes(x)) for x, boxes, classes in heads), strict=True)
        best, ids = torch.cat(scores, 1).max(-1)
        sure, places = best.topk(PICKED, 1)
        picked = torch.cat(boxes, 1).gather(1, places[..., None].expand(-1, -1, 4))
        return torch.cat([picked, sure[..., None], ids.gather(1, places)[..., None].float()], -1)


def _decoded(distances: Any, logits: Any) -> tuple[Any, Any]:
    """Boxes `(n, cells, 4)` and scores `(n, cells, classes)` of one grid, in float32."""
    n, _, height, width = logits.shape
    bins = torch.arange(16, device=logits.device, dtype=torch.float32)
    left_top_right_bottom = (distances.float().view(n, 4, 16, -1).softmax(2) * bins[:, None]).sum(2).transpose(1, 2)
    ys, xs = torch.meshgrid(*(torch.arange(many, device=logits.device) + 0.5 for many in (height, width)), indexing="ij")
    centres = torch.stack([xs, ys], -1).view(1, -1, 2)
    corners = [centres - left_top_right_bottom[..., :2], centres + left_top_right_bottom[..., 2:]]
    return torch.cat(corners, -1) * (SIDE / width), logits.float().view(n, CLASSES, -1).sigmoid().transpose(1, 2)


class Photos(Dataset):
    """Images as the network takes them: `(640, 640, 3) uint8` RGB, letterboxed."""

    def __init__(self, folder: Path):
        self.paths = sorted(map(str, folder.iterdir()))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> np.ndarray:
        image = cv2.imdecode(np.fromfile(self.paths[number], np.uint8), cv2.IMREAD_COLOR_RGB)
        scale = SIDE / max(image.shape[:2])
        height, width = (round(side * scale) for side in image.shape[:2])
        fitted, y, x = np.full((SIDE, SIDE, 3), 114, np.uint8), (SIDE - height) // 2, (SIDE - width) // 2
        fitted[y : y + height, x : x + width] = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        return fitted


def one_thread(_worker: int) -> None:
    """OpenCV's own threads only take turns with the other workers."""
    cv2.setNumThreads(1)


@torch.no_grad()
def rate(folder: Path, batch: int = 32) -> float:
    """Images per second from the files of a folder to boxes in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = YoloV8n().to(device, torch.float16 if device == "cuda" else torch.float32).to(memory_format=torch.channels_last)
    compiled = torch.compile(network.eval(), mode="reduce-overhead" if device == "cuda" else None)
    for _ in range(_WARM):
        compiled(torch.zeros(batch, SIDE, SIDE, 3, dtype=torch.uint8, device=device))
    how = {"pin_memory": device == "cuda", "worker_init_fn": one_thread, "prefetch_factor": 4, "drop_last": True}
    loader = DataLoader(Photos(folder), batch, num_workers=available_cpus(), **how)
    of = torch.arange(batch, device=device).repeat_interleave(PICKED) * CLASSES
    began, done = 0.0, -batch  # the first batch waits for the workers to start
    for pixels in loader:
        found = compiled(pixels.to(device, non_blocking=True)).flatten(0, 1).clone()
        found, groups = found[sure := found[:, 4] >= found[:, 4].topk(SURE * batch).values[-1]], (of + found[:, 5])[sure]
        found[torchvision.ops.batched_nms(found[:, :4], found[:, 4], groups, 0.45)].cpu()
        began, done = began or time.monotonic(), done + batch
    return done / (time.monotonic() - began)


def main() -> None:
    """Prints images per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    print(f"{rate(args.images, args.batch):.1f} images/s")


if __name__ == "__main__":
    main()
