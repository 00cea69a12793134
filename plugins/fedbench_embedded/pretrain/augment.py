"""Mild augmentation of a batch of images, and the pixel scale that the encoders expect."""

import math

import torch
import torch.nn.functional as F
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import Tensor

# Half-widths of the uniform draws.
ZOOM, SHIFT, ROTATION, CONTRAST, BRIGHTNESS = 0.06, 0.06, 0.06, 0.06, 0.03


def normalise(images: Tensor) -> Tensor:
    """uint8 (n, 3, 32, 32), or float already in [0, 1], to open_clip's normalised float32."""
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images
    mean, std = torch.tensor(OPENAI_DATASET_MEAN), torch.tensor(OPENAI_DATASET_STD)
    return (pixels - mean[:, None, None]) / std[:, None, None]


def rotate_hues(pixels: Tensor, angles: Tensor) -> Tensor:
    """Rotate the colours of each image about the gray axis: (n, 3, h, w) and angles in radians (n,)."""
    cosine, sine = angles.cos().view(-1, 1, 1), angles.sin().view(-1, 1, 1) / math.sqrt(3)
    turn = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    matrix = cosine * torch.eye(3) + (1 - cosine) / 3 * torch.ones(3, 3) + sine * turn
    return torch.einsum("nij,njhw->nihw", matrix, pixels).clamp(0, 1)


def augment(images: Tensor, hue_rotated: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Random flip, zoom, shift, small rotation, contrast and brightness, and new hues where marked.

    Takes uint8 (n, 3, 32, 32) and bool (n,); returns normalised float32 (n, 3, 32, 32). At `strength` 0 only flips and
    hues remain.
    """
    count = len(images)

    def draw(half_width: float) -> Tensor:
        return (torch.rand(count, generator=generator) * 2 - 1) * half_width

    pixels = rotate_hues(images.float() / 255, draw(math.pi) * hue_rotated)
    flip, zoom, angle = draw(1).sign(), 1 + draw(ZOOM * strength), draw(ROTATION * strength)
    warp = torch.stack(
        [
            torch.stack([zoom * flip * angle.cos(), -zoom * angle.sin(), draw(SHIFT * strength)], dim=1),
            torch.stack([zoom * flip * angle.sin(), zoom * angle.cos(), draw(SHIFT * strength)], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(warp, list(pixels.shape), align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    pixels = (pixels - 0.5) * (1 + draw(CONTRAST * strength)).view(-1, 1, 1, 1) + 0.5
    pixels = pixels + draw(BRIGHTNESS * strength).view(-1, 1, 1, 1)
    return normalise(pixels)
