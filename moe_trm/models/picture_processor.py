"""Pictures as both engines get them, and the processor of a checkpoint that makes patches of them.

A picture is decoded once, turned as its EXIF data say, laid on white where it is transparent, and travels as an RGB
PNG: engines decode JPEG in several ways (on a GPU with other pixels than Pillow), and fill transparency differently.

Shape letters: N pictures, P patches of all of them, C values of a patch.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_trm.errors import CheckpointError, ConfigError

MAX_BYTES, MAX_PIXELS, MAX_ASPECT = 32 << 20, 64 << 20, 200
"""A picture may have so many bytes and pixels at most, and one side at most so many times the other: what the
processors of Qwen take."""
PACKAGES = ("PIL", "torchvision")


def check_packages() -> None:
    """Raise `ConfigError` where the environment lacks what reads pictures."""
    missing = [{"PIL": "pillow"}.get(name, name) for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "pictures cannot be read in this environment",
            where="task.image_field",
            got=f"no {' and no '.join(missing)}",
            expected="pillow and torchvision",
            fix=f"pip install {' '.join(missing)}",
        )


def as_png(data: bytes) -> tuple[bytes, tuple[int, int]]:
    """The picture in `data`, a file of any format that Pillow reads, as an RGB PNG, and its height and width.

    Raises `ValueError` for what is no picture, or one beyond `MAX_BYTES`, `MAX_PIXELS` or `MAX_ASPECT`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, at most {MAX_BYTES} are taken")
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
                raise ValueError(
                    f"{width} x {height} pixels, at most {MAX_PIXELS} are taken, and a side at most {MAX_ASPECT} times "
                    "the other"
                )
            plain = image.format == "PNG" and image.mode == "RGB" and "transparency" not in image.info
            plain = plain and getattr(image, "n_frames", 1) == 1 and not image.getexif()
            turned = ImageOps.exif_transpose(image)
            turned.load()
            if plain:
                return data, (height, width)
            if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
                turned = turned.convert("RGBA")
                turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned)
            stream = io.BytesIO()
            turned.convert("RGB").save(stream, "PNG")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no picture that can be decoded: {error}") from error
    return stream.getvalue(), (turned.height, turned.width)


class PictureProcessor:
    """The image processor of a checkpoint folder.

    Raises `CheckpointError` for a folder without one, `ConfigError` where packages are missing.
    """

    def __init__(self, folder: str | Path) -> None:
        check_packages()
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
            self._merge = int(self._processor.merge_size) ** 2
        except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
            raise CheckpointError(
                "the checkpoint has no image processor that can be read",
                where=str(folder),
                got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                expected="preprocessor_config.json of the release",
                fix="Copy the processor's files of the original model into the folder.",
            ) from error

    def num_tokens(self, height: int, width: int) -> int:
        """Image tokens of a picture of this size, which is not looked at itself."""
        return int(self._processor.get_number_of_image_patches(height, width)) // self._merge

    def patches(self, pictures: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """`[P, C]` float32 values of the patches of N PNGs, and their grids `[N, 3]` int64."""
        from PIL import Image

        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
        made = self._processor(images=images, return_tensors="pt")
        return made["pixel_values"].float(), made["image_grid_thw"].long()

    def tokens_of(self, grid: Sequence[int]) -> int:
        """Image tokens of a picture with this grid."""
        frames, rows, columns = grid
        return frames * rows * columns // self._merge
