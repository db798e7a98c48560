"""Small files that cost their reader far more than they show: each kept a decoder busy for seconds to minutes, took gigabytes,
started a program, or passed the limits with a decoy.
"""

from __future__ import annotations

import io
import re
import struct
import zlib

from PIL import Image


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    """An image in one of Pillow's formats."""
    file = io.BytesIO()
    image.copy().save(file, file_format, **options)  # Pillow leaves settings of one format on the image
    return file.getvalue()


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", 2 + len(body)) + body


def jpeg_of_many_scans(wh: tuple[int, int], scans: int) -> bytes:
    """A progressive JPEG whose last scan, 23 bytes that refine all of luma by nothing, comes again and again."""
    content = encoded(Image.new("L", wh, 99), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    tables = content.rindex(b"\xff\xc4", 0, last)
    return content[:-2] + content[tables:-2] * scans + b"\xff\xd9"


def jpeg_of_many_planes(wh: tuple[int, int], scans: int) -> bytes:
    """A baseline JPEG of three components, of which only the first comes, again and again."""
    content = encoded(Image.new("RGB", wh, "teal"), "JPEG", subsampling=0)
    scan = content.index(b"\xff\xda")
    return content[:scan] + jpeg_segment(0xDA, bytes([1, 1, 0, 0, 63, 0])) * scans + b"\xff\xd9"


def jpeg_with_two_frames() -> bytes:
    """The first frame is large, the second one is small."""
    content = encoded(Image.new("RGB", (60, 40), "teal"), "JPEG")
    frame = content.index(b"\xff\xc0")
    body = content[frame + 4 : frame + 2 + int.from_bytes(content[frame + 2 : frame + 4], "big")]
    large = body[:1] + struct.pack(">HH", 60000, 60000) + body[5:]
    return content[:frame] + jpeg_segment(0xC0, large) + jpeg_segment(0xC0, body) + content[frame + 4 + len(body) :]


def jpeg_with_much_exif(segments: int) -> bytes:
    """Each Exif segment has 5,400 descriptions of 60 KB, all at one place."""
    entries = 5400
    tiff = struct.pack("<4sIH", b"II*\0", 8, entries) + struct.pack("<HHII", 0x010E, 2, 60000, 0) * entries + bytes(4)
    content = encoded(Image.new("RGB", (60, 40), "teal"), "JPEG")
    return content[:2] + jpeg_segment(0xE1, b"Exif\0\0" + tiff) * segments + content[2:]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(wh: tuple[int, int], bits: int, colour: int, data: bytes, *, before: bytes = b"", interlaced: bool = False) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *wh, bits, colour, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + header + before + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def png_of_texts(texts: int) -> bytes:
    """A PNG of one pixel, and texts that unpack to 7.9 MB each."""
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(7_900_000), 9))
    return png((1, 1), 8, 2, zlib.compress(bytes(4)), before=text * texts)


def png_with_two_headers() -> bytes:
    """The first one is large, the second one is small."""
    second = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 1, 0, 0, 0, 0))
    return png((11000, 11000), 1, 0, zlib.compress(bytes(1376 * 11000), 9), before=second)


def empty_deflate(size: int) -> bytes:
    """A zlib stream of dynamic blocks that hold nothing, about so many bytes long."""
    code_lengths = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1]

    def number(value: int, width: int) -> str:
        return f"{value:0{width}b}"[::-1]  # the lowest bit comes first

    bits = "0" + number(2, 2) + number(0, 5) + number(0, 5) + number(len(code_lengths) - 4, 4)
    bits += "".join(number(int(symbol in (1, 18)), 3) for symbol in code_lengths)
    bits += "1" + number(138 - 11, 7) + "1" + number(118 - 11, 7) + "0" + "0" + "0"  # 256 times none, end, a distance; end
    eight = bits * 8
    block = bytes(int(eight[at : at + 8][::-1], 2) for at in range(0, len(eight), 8))
    return b"\x78\x9c" + block * (size // len(block))


def long_deflate(size: int) -> bytes:
    """A zlib stream of about so many bytes, each thousand of which hold a million zeros."""
    packer = zlib.compressobj(9)
    begin = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return begin + block * (size // len(block))


def _gif_blocks(body: bytes) -> bytes:
    return b"".join(bytes([len(body[at : at + 255])]) + body[at : at + 255] for at in range(0, len(body), 255)) + b"\0"


def gif(wh: tuple[int, int], data: bytes, *, before: bytes = b"") -> bytes:
    """A GIF of one frame in two colours."""
    screen = struct.pack("<HHBBB", *wh, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + before + b"," + struct.pack("<4HB", 0, 0, *wh, 0) + b"\2" + _gif_blocks(data) + b";"


def gif_of_clear_codes(size: int) -> bytes:
    """Nothing but the code that clears the table (100, three bits)."""
    return gif((1000, 1000), bytes([0b00100100, 0b01001001, 0b10010010]) * (size // 3))


def gif_with_a_frame_beyond_its_canvas() -> bytes:
    content = gif((60000, 60000), b"\x44\x01")
    return content[:6] + struct.pack("<HH", 8, 8) + content[10:]


def gif_with_long_comment(size: int) -> bytes:
    return gif((1, 1), b"\x44\x01", before=b"!\xfe" + _gif_blocks(bytes(size)))


def tiff(tags: list[tuple[int, list[int]]], data: bytes) -> bytes:
    """A TIFF of LONG tags behind its data, which begin at byte 8."""
    at = 8 + len(data)
    values_at = at + 2 + 12 * len(tags) + 4
    directory, values = struct.pack("<H", len(tags)), b""
    for tag, numbers in tags:
        body = struct.pack(f"<{len(numbers)}I", *numbers)
        where = body if len(numbers) == 1 else struct.pack("<I", values_at + len(values))
        values += b"" if len(numbers) == 1 else body
        directory += struct.pack("<HHI", tag, 4, len(numbers)) + where
    return struct.pack("<4sI", b"II*\0", at) + data + directory + bytes(4) + values


def tiff_of_two_pages() -> bytes:
    """The second one says that it is large."""
    content = encoded(Image.new("RGB", (8, 8)), "TIFF", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    for tag in (256, 257):
        content = content.replace(struct.pack("<HHII", tag, 4, 1, 9), struct.pack("<HHII", tag, 4, 1, 50000))
    return content


def tiff_of_equal_tags() -> bytes:
    """The size is given twice: 121 megapixels, then 64 pixels; one reader takes the first, another one the last."""
    strip = zlib.compress(bytes(1375 * 11000), 1)
    tags = {256: [11000], 257: [11000], 258: [1], 259: [8], 262: [1], 273: [8], 277: [1], 278: [11000], 279: [len(strip)]}
    return tiff([*tags.items(), (256, [8]), (257, [8])], strip)


def tiff_of_tags_that_share_their_bytes(tags: int) -> bytes:
    """Each of so many private tags names the same 700 KB."""
    size = 700_000
    plain = {256: (4, 1, 8), 257: (4, 1, 8), 258: (3, 1, 8), 259: (4, 1, 1), 262: (4, 1, 1), 273: (4, 1, 8)}
    plain |= {277: (4, 1, 1), 279: (4, 1, 64)}
    entries = plain | {1000 + tag: (7, size, 8) for tag in range(tags)}
    directory = b"".join(struct.pack("<HHII", tag, *entry) for tag, entry in sorted(entries.items()))
    return struct.pack("<4sI", b"II*\0", 8 + size) + bytes(size) + struct.pack("<H", len(entries)) + directory + bytes(4)


def tiff_of_a_huge_tile() -> bytes:
    data = zlib.compress(bytes(300))
    tags = {256: [10], 257: [10], 258: [8, 8, 8], 259: [8], 262: [2], 277: [3]}
    tags |= {322: [16384], 323: [16384], 324: [8], 325: [len(data)]}
    return tiff([*tags.items()], data)


def radiance_of_three_sizes() -> bytes:
    """Two lines that look like the size, then the size that counts: 121 megapixels."""
    row = b"\2\2" + struct.pack(">H", 11000) + 4 * (b"\xff\0" * (11000 // 127) + bytes([128 + 11000 % 127, 0]))
    return b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n-Y 2 +X 2\n# -Y 3 +X 3\n\n-Y 11000 +X 11000\n" + row * 11000


def radiance_of_a_long_line() -> bytes:
    """A line of 128 bytes, after which a reader of lines of 127 sees an empty one, and a size of its own."""
    line = b"x" * 127 + b"\n-Y 11000 +X 11000\n"
    pixels = b"\2\2\0\x08" + b"\x88\x80" * 4
    return b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n" + line + b"\n-Y 1 +X 8\n" + pixels


def jpeg2000(change: dict[int, bytes], *, tile_wh: tuple[int, int] | None = None, wh: tuple[int, int] = (1000, 1000)) -> bytes:
    """A codestream of so many pixels in 169 bytes; `change` replaces bytes of its coding style (offset within COD -> bytes)."""
    content = bytearray(encoded(Image.new("RGB", (8, 8), "teal"), "JPEG2000", no_jp2=True))
    content[8:16] = struct.pack(">II", *wh)
    content[24:32] = struct.pack(">II", *(tile_wh or wh))
    cod = content.index(b"\xff\x52")
    length = 2 + int.from_bytes(content[cod + 2 : cod + 4], "big")
    style = content[cod : cod + length]
    for at, value in change.items():
        style[at : at + len(value)] = value
    style[2:4] = struct.pack(">H", len(style) - 2)
    return bytes(content[:cod] + style + content[cod + length :])


def jpeg2000_of_headers_within_headers(parts: int, segments: int) -> bytes:
    """Each of so many tile parts' headers is one long comment, which ends before the same chain of comments."""
    content = encoded(Image.new("RGB", (8, 8), "teal"), "JPEG2000", no_jp2=True)
    start = content.index(b"\xff\x90")
    part = b"\xff\x90\0\x0a" + bytes(8)
    jumps = b"".join(part + b"\xff\x64" + struct.pack(">H", 2 + 16 * (parts - n - 1)) for n in range(parts))
    return content[:start] + jumps + b"\xff\x64\0\2" * segments + b"\xff\x93\xff\xd9"


def jpeg2000_that_names_avif() -> bytes:
    """A JP2 file that lists AVIF's brand among those that it is compatible with."""
    return encoded(Image.new("RGB", (8, 8), "teal"), "JPEG2000").replace(b"ftypjp2 \0\0\0\0jp2 ", b"ftypjp2 \0\0\0\0avif")


def jpeg2000_of_two_codestreams() -> bytes:
    content = encoded(Image.new("RGB", (8, 8), "teal"), "JPEG2000")
    at = content.index(b"jp2c") - 4
    return content + struct.pack(">I", len(content) - at) + content[at + 4 :]


def avif_of_another_size(wh: tuple[int, int]) -> bytes:
    """The boxes say 2 x 2 pixels, the AV1 stream holds more."""
    content = encoded(Image.new("RGB", wh, "teal"), "AVIF", speed=10)
    return re.sub(rb"(ispe\0\0\0\0).{8}", rb"\g<1>" + struct.pack(">II", 2, 2), content, flags=re.DOTALL)


def avif_whose_items_share_their_bytes(items: int) -> bytes:
    """So many items, each of which is the whole file."""
    content = encoded(Image.new("RGB", (8, 8), "teal"), "AVIF", speed=10) + bytes(1 << 20)

    def box(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I4s", 8 + len(body), kind) + body

    numbers = range(1, items + 1)
    kinds = b"".join(box(b"infe", struct.pack(">BBHHH4sB", 2, 0, 0, number, 0, b"av01", 0)) for number in numbers)
    places = b"".join(struct.pack(">HHHII", number, 0, 1, 0, 1 << 20) for number in numbers)
    iloc, iinf = struct.pack(">IHH", 0, 0x4400, items) + places, struct.pack(">IH", 0, items) + kinds
    meta = content[content.index(b"meta") + 4 : content.index(b"iloc") - 4]
    at = content.index(b"iprp") - 4
    iprp = content[at : at + int.from_bytes(content[at : at + 4], "big")]
    inner = box(b"meta", meta + box(b"iloc", iloc) + box(b"iinf", iinf) + iprp)
    return content[: content.index(b"meta") - 4] + inner + bytes(1 << 20)


def webp_of_another_size(wh: tuple[int, int]) -> bytes:
    """The canvas is larger than the frame."""
    content = bytearray(encoded(Image.new("RGBA", (8, 8), "teal"), "WEBP", lossless=True, xmp=b"<x/>"))
    at = content.index(b"VP8X") + 12
    content[at : at + 6] = (wh[0] - 1).to_bytes(3, "little") + (wh[1] - 1).to_bytes(3, "little")
    return bytes(content)


def ascii_pixels(wh: tuple[int, int]) -> bytes:
    """A PPM as text that ends with its last digit."""
    return b"P3\n%d %d\n255\n" % wh + (b"7 " * (3 * wh[0] * wh[1]))[:-1]


def bmp(wh: tuple[int, int], *, bits: int = 24, compression: int = 0, data: bytes = b"") -> bytes:
    header = struct.pack("<IiiHHIIIIII", 40, *wh, 1, bits, compression, 0, 0, 0, 0, 0)
    palette = bytes(1024) if bits == 8 else b""
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(header) + len(palette)) + header + palette + data


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/tmp/written) (w) file closefile showpage\n%%EOF\n"
)


def iptc(inner: bytes) -> bytes:
    """An IPTC file (IIM, 3) that says that its pixels are packed, and holds a file of any other format as these."""
    fields = [(3, 60, b"\1\0"), (3, 20, b"\x09"), (3, 30, b"\x09"), (3, 120, b"\5"), (8, 10, inner)]
    heads = (struct.pack(">BBBHI", 0x1C, record, dataset, 0x8404, len(body)) + body for record, dataset, body in fields)
    return b"".join(heads) + bytes([0x1C, 9, 9, 0, 0])
