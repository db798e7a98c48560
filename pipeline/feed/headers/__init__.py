"""Reads the headers of JPEG, PNG and WebP files in a few microseconds, without memory for pixels.

`formats.py` picks the format by the first bytes, and a module for each format reads the header. The result is a `Header` (size,
cost of decoding, and the bytes that a decoder may see) or an `ImageError`.
"""
