"""The large suite: nine networks with modern architectures, trained for one to three minutes each.

The number of updates was chosen by the measured time of 20 updates with each optimizer on one core. On the autoencoder
and on Adult, SOAP takes several times as long as AdamW; there, only SOAP takes minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsgd_bench.compare import data, large_networks, networks
from vsgd_bench.compare.data import Split
from vsgd_bench.compare.workloads import FASHION, Task, Workload

LENGTH = 64
"""Length of a passage, in characters."""

PADDING = 2
"""Maximum shift of an augmented image, in pixels."""


def shakespeare_gpt(seed: int, sparse: bool) -> Task:
    split, symbols = data.characters(seed, LENGTH, train=16 * 500)
    return Task(large_networks.GPT(symbols, LENGTH), split, F.cross_entropy)


def newsgroups_gpt(seed: int, sparse: bool) -> Task:
    split, symbols = data.newsgroup_characters(seed, LENGTH, train=16 * 400)
    return Task(large_networks.GPT(symbols, LENGTH), split, F.cross_entropy)


def newsgroups_lora(seed: int, sparse: bool) -> Task:
    task = newsgroups_gpt(seed, sparse)
    return task._replace(model=large_networks.add_adapters(task.model))


def augment(images: Tensor, labels: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mirror half of the images, and shift each by up to `PADDING` pixels."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=rng) < 0.5
    padded = F.pad(torch.where(mirrored, images.flip(-1), images), (PADDING,) * 4)
    windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    down, right = torch.randint(2 * PADDING + 1, (2, len(images)), generator=rng)
    return windows[torch.arange(len(images)), :, down, right], labels


def fashion_resnet(seed: int, sparse: bool) -> Task:
    return Task(large_networks.resnet(), fashion_images(seed), F.cross_entropy, augment)


def fashion_vit(seed: int, sparse: bool) -> Task:
    return Task(large_networks.ViT(), fashion_images(seed), F.cross_entropy)


def fashion_gru(seed: int, sparse: bool) -> Task:
    return Task(large_networks.RowGRU(), fashion_images(seed), F.cross_entropy)


def fashion_images(seed: int) -> Split:
    return data.fashion_split(seed, train=20_000, test=2_000)


def fashion_autoencoder(seed: int, sparse: bool) -> Task:
    split = fashion_images(seed)
    x, x_test = split.x.flatten(1), split.x_test.flatten(1)
    widths = (784, 400, 200, 100, 30, 100, 200, 400, 784)
    return Task(networks.mlp(*widths), Split(x, x, x_test, x_test), F.mse_loss)


def add_noise(images: Tensor, _: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images with noise of a random level, with the level as a second channel. The target is the noise."""
    level = torch.rand(len(images), 1, 1, 1, generator=rng)
    noise = torch.randn(images.shape, generator=rng)
    noisy = (1 - level.square()).sqrt() * (2 * images - 1) + level * noise
    return torch.cat([noisy, level.expand_as(noisy)], 1), noise


def fashion_denoiser(seed: int, sparse: bool) -> Task:
    split = fashion_images(seed)
    x_test, y_test = add_noise(split.x_test, split.y_test, torch.Generator().manual_seed(seed))
    return Task(large_networks.Denoiser(), split._replace(x_test=x_test, y_test=y_test), F.mse_loss, add_noise)


def adult_mlp(seed: int, sparse: bool) -> Task:
    split = data.shuffled(*data.adult(), seed, test=0.18)
    model = nn.Sequential(networks.mlp(split.x.shape[1], 128, 128, 1), nn.Flatten(0))
    return Task(model, split, F.binary_cross_entropy_with_logits)


SHAKESPEARE = ("shakespeare.txt.gz",)
BOTH_TEXTS = (*SHAKESPEARE, "20newsgroups/train.tsv.gz", "20newsgroups/test.tsv.gz")

GPT = Workload("gpt", "Shakespeare, GPT", shakespeare_gpt, 16, 1, SHAKESPEARE)
PRETRAINED = GPT._replace(name="gpt-pretraining", epochs=3)

LARGE_WORKLOADS = (
    GPT,
    Workload("resnet", "Fashion-MNIST, ResNet, augmented", fashion_resnet, 64, 5, FASHION),
    Workload("vit", "Fashion-MNIST, ViT", fashion_vit, 64, 3, FASHION),
    Workload("gru", "Fashion-MNIST, GRU over rows", fashion_gru, 64, 5, FASHION),
    Workload("autoencoder", "Fashion-MNIST, deep autoencoder", fashion_autoencoder, 200, 15, FASHION),
    Workload("adult", "Adult, MLP, 20,000 updates", adult_mlp, 16, 8, ("adult.csv.gz",)),
    Workload("denoiser", "Fashion-MNIST, denoiser", fashion_denoiser, 32, 2, FASHION),
    Workload("fine-tuning", "20 Newsgroups, fine-tuned GPT", newsgroups_gpt, 16, 1, BOTH_TEXTS, pretraining=PRETRAINED),
    Workload("lora", "20 Newsgroups, GPT with LoRA", newsgroups_lora, 16, 1, BOTH_TEXTS, pretraining=PRETRAINED),
)
