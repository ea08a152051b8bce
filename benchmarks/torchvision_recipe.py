"""The recipe of torchvision's ImageNet reference, written by hand: torchvision's CUDA build loads beside no CPU torch.

Line by line what torchvision 0.28 does for ImageFolder with RandomResizedCrop(224), RandomHorizontalFlip, ToTensor and
Normalize on Pillow images; B images of a batch.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolder(Dataset):
    """datasets.ImageFolder: a list of paths and classes; samples are float32 [3, 224, 224]."""

    def __init__(self, root: Path) -> None:
        classes = sorted(one.name for one in root.iterdir() if one.is_dir())
        self.samples = [
            (str(file), label) for label, name in enumerate(classes) for file in sorted((root / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as stream:  # noqa: PTH123 (as pil_loader does)
            image = Image.open(stream).convert("RGB")
        left, top, width, height = random_resized_crop(*image.size)
        image = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return normalize(to_tensor(image)), label


def random_resized_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params: left, top, width and height."""
    log_ratio = torch.log(torch.tensor((3 / 4, 4 / 3)))
    for _ in range(10):
        target = height * width * torch.empty(1).uniform_(0.08, 1).item()
        ratio = torch.exp(torch.empty(1).uniform_(log_ratio[0].item(), log_ratio[1].item())).item()
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, size=(1,)).item())
            return int(torch.randint(0, width - w + 1, size=(1,)).item()), top, w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def to_tensor(image: Image.Image) -> Tensor:
    """functional.to_tensor: float32 [3, H, W] of 0 to 1."""
    pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(image.size[1], image.size[0], 3)
    return pixels.permute((2, 0, 1)).contiguous().to(dtype=torch.float32).div(255)


def normalize(image: Tensor) -> Tensor:
    """functional.normalize."""
    image = image.clone()
    mean, std = (torch.as_tensor(one, dtype=image.dtype).view(-1, 1, 1) for one in (MEAN, STD))
    return image.sub_(mean).div_(std)
