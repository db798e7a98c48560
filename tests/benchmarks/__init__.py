"""How fast the pipeline is, beside other ways to do the same work on the same machine. Nothing here is a test.

`make bench` runs most; BENCHMARKS.md names each command. throughput.py compares the contenders of contenders.py, which run in
turns (rounds.py) over the same images (images.py) with the same detector (model.py). `make bench-peers` runs peers/ likewise.
Everything that is made lies in `.bench/`; all commands run from the repository's root.
"""
