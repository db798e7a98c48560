"""Which format an image file has; and what a JPEG, PNG or WebP file says of itself, read in a few microseconds.

`formats.py` decides which format a file has by its first bytes. One module a format reads the header of what is decoded in this
process, by code that takes no memory for pixels. A file ends as a `Header` (its one size, what decoding it costs, and the bytes
that a decoder may see) or as an `ImageError`.
"""
