"""The networks of the large suite: a transformer for text and for images, a ResNet, a GRU, a denoiser, adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and two linear layers, each after a LayerNorm and around a skip connection."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        change: Tensor = self.narrow(F.gelu(self.widen(self.norm_mlp(x))))
        return x + change


class GPT(nn.Module):
    """A transformer that predicts the next symbol from all symbols before it."""

    def __init__(self, symbols: int, length: int, width: int = 128, heads: int = 4, depth: int = 6):
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for layer in (self.embed, self.place, self.read):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.read(self.norm(self.blocks(self.embed(codes) + self.place.weight)))
        return logits.transpose(1, 2)


class Adapted(nn.Linear):
    """A frozen linear layer plus the product of two thin matrices, the second of which starts at zero (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 8, scale: float = 2.0):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model: nn.Module) -> nn.Module:
    """Freeze a transformer and add adapters to the linear layers of its blocks. Names of weights do not change."""
    model.requires_grad_(False)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


class ViT(nn.Module):
    """A transformer that classifies 28×28 images from patches of 4×4 pixels."""

    def __init__(self, classes: int = 10, width: int = 64, heads: int = 4, depth: int = 4):
        super().__init__()
        self.embed = nn.Conv2d(1, width, 4, stride=4)
        self.place = nn.Parameter(0.02 * torch.randn(49, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.place
        logits: Tensor = self.read(self.norm(self.blocks(patches)).mean(1))
        return logits


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a skip connection. If the shape changes, the latter has a convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.change(x))


def resnet(classes: int = 10, width: int = 16) -> nn.Sequential:
    """Return a ResNet for 28×28 images: a convolution with stride 2, then three stages of two residual blocks."""
    stages = [(width, 1), (width, 1), (2 * width, 2), (2 * width, 1), (4 * width, 2), (4 * width, 1)]
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs, stride in stages:
        layers.append(Residual(inputs, outputs, stride))
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class RowGRU(nn.Module):
    """A GRU that reads a 28×28 image row by row."""

    def __init__(self, classes: int = 10, width: int = 128):
        super().__init__()
        self.gru = nn.GRU(28, width, num_layers=2, batch_first=True)
        self.read = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.read(self.gru(images.squeeze(1))[0][:, -1])
        return logits


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution of a U-Net with normalization."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class Denoiser(nn.Module):
    """A U-Net of two resolutions. It returns the noise of an image, whose second channel is the noise level."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.enter = convolution(2, width)
        self.down = convolution(width, 2 * width, stride=2)
        self.middle = nn.Sequential(convolution(2 * width, 2 * width), convolution(2 * width, 2 * width))
        self.up = nn.Sequential(convolution(2 * width, width), nn.Upsample(scale_factor=2))
        self.merge = convolution(2 * width, width)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        fine = self.enter(noisy)
        coarse = self.down(fine)
        coarse = self.up(coarse + self.middle(coarse))
        noise: Tensor = self.leave(self.merge(torch.cat([fine, coarse], 1)))
        return noise
