"""Pictures as arrays, whatever cell they come from."""

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from trainer.dataset import cells
from trainer.dataset.archives import BadArchive, Picture
from trainer.dataset.prompts import DataError

Array = npt.NDArray[np.uint8]
Row = dict[str, Any]
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_PIXELS = 100_000_000
"""Of one picture: 300 MB once decoded. A file of a few bytes may say that it has more."""
FLOATS = ("I", "F")
"""Modes of Pillow whose numbers do not say what white is."""
MOST_THREADS = 8
"""That decode for one process."""
KEPT_BYTES = 1024**3
"""Of decoded pictures kept by one process; the others are decoded whenever they are wanted."""


def taken(row: dict[str, Any], column: str, where: str, number: int) -> Image.Image:
    """The picture of a row, in RGB, as a camera's note of its orientation has it. Raises DataError, and OSError where
    the machine could not read it.
    """
    cell = cells.taken("picture", row, column, where, number)
    try:
        return opened(cell)
    except MemoryError:
        raise
    except Exception as e:  # of bytes that are no picture Pillow's readers raise nearly anything
        if isinstance(e, OSError) and e.errno is not None:  # the system's word, which Pillow's own errors never have
            raise
        named = f" ({cell.name})" if isinstance(cell, Picture) else ""
        unknown = isinstance(e, UnidentifiedImageError)  # its text has an address of memory
        reason = "it is no picture that is known" if unknown else (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise DataError(f"{where} row {number}{named}: does not decode ({reason}); mend or remove it") from None


def opened(cell: Any) -> Image.Image:
    """Of what `cells.picture` gives. Raises what Pillow raises, ValueError, OSError."""
    if isinstance(cell, list):
        return Image.fromarray(np.asarray(cell).round().astype(np.uint8)).convert("RGB")
    data = cell.read() if isinstance(cell, Picture) else cell
    with Image.open(io.BytesIO(data), formats=FORMATS) as found:
        width, height = found.size
        if width * height > MOST_PIXELS:
            raise BadArchive(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")
        if found.mode in FLOATS:
            raise BadArchive(f"its pixels are numbers of 32 bits, mode {found.mode}; save it with 8 or 16")
        upright = ImageOps.exif_transpose(found)
        return (_halved(upright) if upright.mode.startswith("I;16") else upright).convert("RGB")


def _halved(picture: Image.Image) -> Image.Image:
    """Of 16 bits a pixel: scaled to 8, where Pillow would take everything above 255 for white."""
    return Image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))


def spare_threads() -> int:
    """Cores that this process has beside the one that it trains with; Pillow decodes without Python's lock."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes - 1))


class Ahead:
    """Pictures that are made ready by threads while the step before them trains: of the step that trains, and of the
    next.
    """

    def __init__(self, make: Callable[[Row, int], Array], threads: int = 1) -> None:
        """`make`: of a row and its number; the same array however often and wherever it is called."""
        self._make, self._threads = make, threads
        self._now: dict[int, Future[Array]] = {}
        self._next: dict[int, Future[Array]] = {}

    def begin(self, rows: Mapping[int, Row]) -> None:
        """The next step's, by number; what was begun before is the step's that trains now."""
        self._now, self._next = self._next, {number: Future() for number in rows}
        left = deque(rows.items())
        for _ in range(min(self._threads, len(left))):
            threading.Thread(target=self._work, args=(left, self._next), daemon=True).start()

    def _work(self, left: deque[tuple[int, Row]], coming: Mapping[int, "Future[Array]"]) -> None:
        while True:
            try:
                number, row = left.popleft()
            except IndexError:
                return
            try:
                coming[number].set_result(self._make(row, number))
            except BaseException as e:  # whatever it is, the step raises it
                coming[number].set_exception(e)

    def get(self, number: int) -> Array | None:
        """None where nobody has begun with it. Raises what `make` raised."""
        found = self._now.get(number) or self._next.get(number)
        return None if found is None else found.result()


class ImageCache:
    """Decoded pictures by row, as long as there is room for them."""

    def __init__(self) -> None:
        self._found: dict[int, Array] = {}
        self._left = KEPT_BYTES

    def offer(self, number: int, pixels: Array) -> None:
        if pixels.nbytes <= self._left:
            self._left -= pixels.nbytes
            self._found[number] = pixels

    def get(self, number: int) -> Array | None:
        return self._found.get(number)
