"""Photographs for the demo: the user's own, or those that scikit-image ships."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from mmgraph.errors import ConfigError

__all__ = ["load_photos", "pan"]

_SHIPPED = ("chelsea.png", "astronaut.png", "rocket.jpg", "motorcycle_left.png", "coffee.png")


_MAX_ASPECT = 200


def load_photos(paths: Sequence[str]) -> list[Image.Image]:
    """Open the pictures at `paths`, or five photographs of different sizes if there are none.

    Raises:
        ConfigError: A file is no picture, or scikit-image, which ships the photographs, is missing.
    """
    return [_open(Path(path)) for path in paths] or [_open(path) for path in _shipped()]


def pan(photo: Image.Image, num_frames: int, size: int) -> list[Image.Image]:
    """Return the frames of a short video: a square window that moves across the photograph."""
    scale = size / min(photo.size)
    wide = photo.resize((max(size, round(photo.width * scale)), round(photo.height * scale)))
    room = max(0, wide.width - size)
    lefts = [room * i // max(1, num_frames - 1) for i in range(num_frames)]
    return [wide.crop((left, 0, left + size, size)) for left in lefts]


def _shipped() -> list[Path]:
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the demo's photographs come with scikit-image: pip install 'mmgraph[demo]', or give "
            "pictures of your own with --image"
        )
    return [Path(spec.origin).parent / "data" / name for name in _SHIPPED]


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            photo = image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"{path} can't be opened as a picture: {error}") from error
    if max(photo.size) >= _MAX_ASPECT * min(photo.size):  # image processors refuse it
        raise ConfigError(f"{path} has {photo.width}x{photo.height} pixels, which is too narrow")
    return photo
