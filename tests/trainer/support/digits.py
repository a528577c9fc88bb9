"""The real digits that scikit-learn ships: 8 x 8 pixels, written by 43 people (Alpaydin, Kaynak 1998)."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tests.trainer.support.pack import tar


def drawn(count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (digit, pixels from 0 to 255), equally often for each digit."""
    found = load_digits()
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        if number >= count:
            return
        yield str(label), np.minimum(pixels * 16, 255).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def archive(count: int) -> bytes:
    """Return a .tar of class folders."""
    return tar(folders(count))


def folders(count: int) -> dict[str, bytes]:
    """Return files of class folders."""
    return {f"digits/{label}/{number:04d}.png": png(pixels) for number, (label, pixels) in enumerate(drawn(count))}
