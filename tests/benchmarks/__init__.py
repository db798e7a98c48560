"""How fast the pipeline is, beside other ways to do the same work on the same machine. Nothing here is a test.

images.py            makes the input: 512 JPEGs of about 640x480, 64 of 12 megapixels
model.py             makes the detector: YOLOv4-tiny's layers, random weights
contenders.py        who takes part, and the command that runs each
plain_loop.py        no framework: the upper bound
beam_documented.py   the pipeline that Beam's documentation shows
work.py              what these have in common: rows, times
process_tree.py      memory and CPU of a command
rounds.py            runs commands alternately
throughput.py        images per second          `make bench`
memory.py            1,000 against 20,000 images
streaming.py         throughput, latency and memory of a stream
feeding.py           what a process feeds to a device that costs nothing
on_gpu.py            what was built without a GPU, tried on one
only_new.py          a job over a million images of which most are done
differences.py       what reduced precision and scaled decoding do to boxes and AP
results.py           the tables

Everything that is made lies in `.bench/`; all commands run from the repository's root.
"""
