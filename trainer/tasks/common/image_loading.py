"""Decoding of pictures: cells of a data set become arrays, some of them ahead of the step that needs them."""

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from trainer.dataset import cells
from trainer.dataset.archives import BadArchive, Picture
from trainer.dataset.prompts import DataError

Array = npt.NDArray[np.uint8]
Row = dict[str, Any]
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 100_000_000
"""Largest number of pixels of one picture (300 MB decoded), because a file of a few bytes may declare more."""
FLOATS = ("I", "F")
"""Modes of Pillow without a defined value for white."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""Turn that shows a picture upright, by its EXIF orientation."""
MAX_THREADS = 8
"""Largest number of decoding threads of one process."""
CACHE_BYTES = 1024**3
"""Bytes of decoded pictures that one process caches; other pictures are decoded at each use."""


def image_of(row: dict[str, Any], column: str, where: str, number: int) -> Image.Image:
    """Return the picture of a row in RGB, turned by its EXIF orientation.

    Raises DataError, and OSError if the machine could not read the file.
    """
    cell = cells.required("picture", row, column, where, number)
    try:
        return decode(cell)
    except MemoryError:
        raise
    except Exception as e:  # Pillow's readers raise nearly any exception for invalid bytes.
        if isinstance(e, OSError) and e.errno is not None:  # Only errors of the system have an errno.
            raise
        file = f" ({cell.name})" if isinstance(cell, Picture) else ""
        unknown = isinstance(e, UnidentifiedImageError)  # Its message contains a memory address.
        reason = "not a known picture format" if unknown else (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise DataError(f"{where} row {number}{file}: does not decode ({reason}); mend or remove it") from None


def decode(cell: Any) -> Image.Image:
    """Return the picture of a cell of `cells.picture` in RGB. Raises Pillow's exceptions, ValueError, OSError."""
    if isinstance(cell, list):
        return Image.fromarray(np.asarray(cell).round().astype(np.uint8)).convert("RGB")
    data = cell.read() if isinstance(cell, Picture) else cell
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise BadArchive(f"{width} x {height} pixels are more than {MAX_PIXELS:,}")
        if image.mode in FLOATS:
            raise BadArchive(f"its pixels are numbers of 32 bits, mode {image.mode}; save it with 8 or 16")
        turn = TURNS.get(_orientation(image))
        upright = image if turn is None else image.transpose(turn)
        return (_scaled_to_8_bits(upright) if upright.mode.startswith("I;16") else upright).convert("RGB")


def _orientation(image: Image.Image) -> Any:
    """Return the EXIF orientation; None if it is absent or the EXIF is damaged, which other readers ignore too."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except MemoryError:
        raise
    except Exception:  # Pillow's reader of EXIF raises nearly any exception for invalid bytes.
        return None
    return orientation if isinstance(orientation, int) else None


def _scaled_to_8_bits(picture: Image.Image) -> Image.Image:
    """Return a picture with 16 bits per pixel scaled to 8; Pillow would clip all values above 255 to white."""
    return Image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))


def spare_threads() -> int:
    """Return the number of decoding threads: this process's share of the cores, less one for training.

    Threads suffice, because Pillow decodes without the GIL.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // processes - 1))


class ImagePrefetcher:
    """Pictures of the current and the next step, decoded by threads while a step trains."""

    def __init__(self, load: Callable[[Row, int], Array], threads: int = 1) -> None:
        """Start no thread yet. `load`: pure function of a row and its number that returns the array."""
        self._load, self._threads = load, threads
        self._now: dict[int, Future[Array]] = {}
        self._next: dict[int, Future[Array]] = {}

    def begin(self, rows: Mapping[int, Row]) -> None:
        """Start to load the next step's rows, by number. The current step's rows are those of the previous call."""
        self._now, self._next = self._next, {number: Future() for number in rows}
        queue = deque(rows.items())
        for _ in range(min(self._threads, len(queue))):
            threading.Thread(target=self._work, args=(queue, self._next), daemon=True).start()

    def _work(self, queue: deque[tuple[int, Row]], results: Mapping[int, "Future[Array]"]) -> None:
        while True:
            try:
                number, row = queue.popleft()
            except IndexError:
                return
            try:
                results[number].set_result(self._load(row, number))
            except BaseException as e:  # `get` raises it in the training thread.
                results[number].set_exception(e)

    def get(self, number: int) -> Array | None:
        """Return the array of a row, or None for a row of another step. Raises the exception of `load`."""
        future = self._now.get(number) or self._next.get(number)
        return None if future is None else future.result()


class ImageCache:
    """Cache of decoded pictures by row number, up to `CACHE_BYTES`."""

    def __init__(self) -> None:
        self._pixels: dict[int, Array] = {}
        self._free = CACHE_BYTES

    def offer(self, number: int, pixels: Array) -> None:
        """Cache a picture if there is space for it."""
        if pixels.nbytes <= self._free:
            self._free -= pixels.nbytes
            self._pixels[number] = pixels

    def get(self, number: int) -> Array | None:
        return self._pixels.get(number)
