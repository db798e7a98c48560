"""From encoded images to detections, with one model shared by all bundles of a process."""
