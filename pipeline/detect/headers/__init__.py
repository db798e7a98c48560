"""What an image file says of itself, read in a few microseconds by code that takes no memory for pixels.

`formats.py` decides which format a file has; one module a format family reads it. A file ends as a `Header` (its one size, what
decoding it costs, and the bytes that a decoder may see) or as an `ImageError`.
"""
