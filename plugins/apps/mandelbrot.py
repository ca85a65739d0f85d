"""mandelbrot: draws the Mandelbrot set; tiles of one picture, put together while they arrive.

A point c of the plane belongs to the set if z -> z * z + c, begun at 0, stays small for ever. A
tile has four samples for each of its pixels, so that the picture has no jagged edges. A sample is
the number of steps until z was large, in units of 1 / UNITS steps, or 0 if it stayed small: two
bytes, low byte first, row by row from the top left.
"""

import math
import os
import struct
import zlib
from functools import lru_cache

about = "Draws the Mandelbrot set, every tile computed by two of you and put into one picture."
returns = "bytes"
min_quorum = 2
delay_bound = 600  # Seconds; short, because the whole picture waits for its last tile.
rsc_fpops_est = 6e6  # about 0.2 s of a usual PC, which does 3e7 Python operations a second
rsc_fpops_bound = 6e8
rsc_memory_bound = 100e6
rsc_disk_bound = 1e6

WIDTH, HEIGHT = 960, 640  # the picture, in pixels
TILE_WIDTH, TILE_HEIGHT = 120, 80  # one workunit, in pixels
CENTRE_RE, CENTRE_IM, HEIGHT_IM = -0.72, 0.0, 2.4  # the part of the plane we look at
LIMIT = 1000  # A point that stays small for so many steps counts as in the set.
UNITS = 64  # LIMIT * UNITS must fit into two bytes.
TOLERANCE = 1  # units

STOPS = [  # (steps, colour): far from the set few steps are enough, at its edge it takes many
    (2.5, (5, 7, 30)), (4, (16, 22, 86)), (7, (58, 40, 146)), (10.5, (134, 46, 158)),
    (16, (222, 68, 118)), (24, (252, 140, 80)), (37, (255, 222, 140)), (60, (255, 253, 240)),
]
SET = (0, 0, 0)
WAITING, FRAME = (19, 21, 30), (27, 30, 42)  # a tile that has not arrived
FAILED, STRIPE = (60, 14, 20), (120, 26, 34)  # a tile that never will


def workunit(i):
    """Tile number i of the spiral that begins in the middle; None after the last."""
    tiles = spiral(WIDTH // TILE_WIDTH, HEIGHT // TILE_HEIGHT)
    if i >= len(tiles):
        return None
    left, top = tiles[i][0] * TILE_WIDTH, tiles[i][1] * TILE_HEIGHT
    step = HEIGHT_IM / (2 * HEIGHT)  # Two samples to the height of a pixel, two to its width.
    return {"input": {
        "left": left, "top": top,  # where the tile goes, in pixels
        "re": CENTRE_RE + (2 * left - WIDTH + 0.5) * step,  # the first sample
        "im": CENTRE_IM - (2 * top - HEIGHT + 0.5) * step,
        "step": step, "columns": 2 * TILE_WIDTH, "rows": 2 * TILE_HEIGHT, "limit": LIMIT,
    }}


def spiral(columns, rows):
    """All tiles as (column, row), ring after ring around the middle, each ring clockwise."""
    def place(tile):
        x, y = 2 * tile[0] + 1 - columns, 2 * tile[1] + 1 - rows
        return max(abs(x), abs(y)), math.atan2(y, x)
    return sorted(((x, y) for x in range(columns) for y in range(rows)), key=place)


def compute(input, progress):
    """All samples of one tile, as bytes."""
    samples = []
    for row in range(input["rows"]):
        im = input["im"] - row * input["step"]
        for column in range(input["columns"]):
            samples.append(steps(input["re"] + column * input["step"], im, input["limit"]))
        progress((row + 1) / input["rows"])
    return struct.pack(f"<{len(samples)}H", *samples)


def steps(re, im, limit):
    """Steps until z is large, in units; 0 if it stays small. The fraction makes colours smooth.

    Plain floats and not a complex number: each operation here is one of IEEE 754's and rounded by
    itself, so all machines agree to the last bit, whereas C compilers may fuse the products and
    sums inside a complex multiplication. Only the logarithms are the C library's own.
    """
    near, im2 = re - 0.25, im * im
    q = near * near + im2
    if q * (q + near) <= im2 / 4 or (re + 1) * (re + 1) + im2 <= 0.0625:
        return 0  # inside the heart or the disc to its left: no need to try
    x = y = x2 = y2 = 0.0
    for n in range(1, limit + 1):
        y = 2 * x * y + im
        x = x2 - y2 + re
        x2, y2 = x * x, y * y
        if x2 + y2 > 256:
            return round(UNITS * (n + 1 - math.log2(math.log(x2 + y2) / math.log(256))))
    return 0


def parse(output):
    """Bytes -> tuple of samples."""
    count = 4 * TILE_WIDTH * TILE_HEIGHT
    if not isinstance(output, bytes) or len(output) != 2 * count:
        raise ValueError(f"wanted {2 * count} bytes")
    samples = struct.unpack(f"<{count}H", output)
    if max(samples) > (LIMIT + 1) * UNITS:
        raise ValueError(f"a sample is above {LIMIT + 1} steps")
    return samples


def compare(a, b):
    """Equal, but for logarithms whose last bit differs between C libraries.

    Such a bit is thousands of millions of times smaller than a unit, but may tip the rounding to
    the next one: so one unit is forgiven. In the set (0) and outside (UNITS at least) never mix.
    """
    return a == b or (
        len(a) == len(b) and all(abs(x - y) <= TOLERANCE for x, y in zip(a, b)))


pictures = {}  # path: (stamp of the file, its pixels), so that not every tile reads the file again


def assimilate(workunit, answer):
    """Paint the tile into <app>.png; painting it again after a crash changes nothing [C23].

    `answer` tells success from failure: there may be errors beside an answer [S2-36].
    """
    path = workunit.folder / f"{workunit.app}.png"
    left, top = workunit.input["left"], workunit.input["top"]
    pixels = load(path)
    for y, row in enumerate(failed_rows() if answer is None else coloured_rows(answer)):
        start = (top + y) * (1 + 3 * WIDTH) + 1 + 3 * left
        pixels[start:start + len(row)] = row
    save(path, pixels)
    record = {"tile": workunit.number, "left": left, "top": top}
    if answer is None:
        return {**record, "failed": workunit.errors}
    # All "inside" added up, times the area of a sample (step * step), make the set's area: 1.51.
    return {**record, "inside": answer.count(0)}


def coloured_rows(samples):
    """The rows of a tile, three bytes a pixel; a pixel is the average of its four samples."""
    tables, columns = palette(), 2 * TILE_WIDTH
    for start in range(0, len(samples), 2 * columns):
        upper, lower = samples[start:start + columns], samples[start + columns:start + 2 * columns]
        quads = list(zip(upper[::2], upper[1::2], lower[::2], lower[1::2]))
        row = bytearray(3 * TILE_WIDTH)
        for k, light in enumerate(tables):
            row[k::3] = bytes([(light[a] + light[b] + light[c] + light[d]) // 4
                               for a, b, c, d in quads])
        yield row


@lru_cache(maxsize=None)
def palette():
    """Red, green and blue of every possible sample: three tables of 65536 bytes, made once."""
    tables, last = [], STOPS[-1]
    for k in range(3):
        light = [SET[k]] + [shade(n / UNITS, k) for n in range(1, last[0] * UNITS)]
        tables.append(bytes(light) + bytes([last[1][k]]) * (65536 - len(light)))
    return tables


def shade(n, k):
    """Light k (0 red, 1 green, 2 blue) after n steps: between two stops."""
    if n <= STOPS[0][0]:
        return STOPS[0][1][k]
    (low, a), (high, b) = next((p, q) for p, q in zip(STOPS, STOPS[1:]) if n <= q[0])
    part = math.log(n / low) / math.log(high / low)  # Steps count by ratio: twice as many, as far.
    # Mixed as light, not as the numbers that a screen gets, or the middle would look too dark.
    return round(((1 - part) * a[k] ** 2.2 + part * b[k] ** 2.2) ** (1 / 2.2))


def waiting_rows():
    """The look of a tile that has not arrived: the night sky of the picture, thinly framed."""
    for y in range(TILE_HEIGHT):
        inner = WAITING if 0 < y < TILE_HEIGHT - 1 else FRAME
        yield bytes(FRAME + inner * (TILE_WIDTH - 2) + FRAME)


def failed_rows():
    """The look of a tile that failed: red stripes."""
    for y in range(TILE_HEIGHT):
        stripes = (STRIPE if (x + y) % 16 < 5 else FAILED for x in range(TILE_WIDTH))
        yield b"".join(map(bytes, stripes))


# A PNG is a signature and chunks: size and kind of the picture, the rows compressed, the end. Our
# pixels have in front of each row the 0 that PNG wants there (it means: the bytes as they are).

def chunk(kind, data):
    """Length, kind, data and checksum of one part of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def head():
    """All of our PNG that stands before the pixels: eight bits for each of red, green and blue."""
    size = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size)


def stamp(path):
    """What tells one writing of a file from another; None if there is no file."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


def load(path):
    """The pixels so far: from memory, else from the PNG, else (none, or damaged) empty tiles."""
    known, pixels = pictures.get(path, (None, None))
    if known and known == stamp(path):
        return pixels
    size = HEIGHT * (1 + 3 * WIDTH)
    if stamp(path):
        data = path.read_bytes()
        try:
            pixels = bytearray(zlib.decompress(data[len(head()) + 8:-16]))
        except zlib.error:
            pixels = b""
        if data.startswith(head()) and len(pixels) == size:
            return pixels
    return bytearray(b"".join(
        b"\0" + row * (WIDTH // TILE_WIDTH)
        for _ in range(HEIGHT // TILE_HEIGHT) for row in waiting_rows()))


def save(path, pixels):
    """Write so that a crash or a power cut leaves the old picture or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        f.write(head() + chunk(b"IDAT", zlib.compress(pixels, 1)) + chunk(b"IEND", b""))
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    if os.name == "posix":  # The new name must be on disk before the server notes us as done.
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    pictures[path] = stamp(path), pixels
