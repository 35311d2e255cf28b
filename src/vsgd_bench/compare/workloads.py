"""Workloads: data, a network and a loss. `WORKLOADS` is the small suite, with runs of a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsgd_bench.compare import data, networks
from vsgd_bench.compare.data import Split
from vsgd_bench.problems import rotated_quadratic

Loss = Callable[[Tensor, Tensor], Tensor]
Transform = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


class Task(NamedTuple):
    """The model, data and loss of a workload for one seed."""

    model: nn.Module
    split: Split
    loss: Loss
    """Returns the mean loss over rows, of the output of the model and the target."""
    transform: Transform | None = None
    """Changes the rows and targets of a training minibatch, for example by augmentation or noise."""


class Workload(NamedTuple):
    """A problem to train on.

    Attributes:
        build: returns the task of a seed. `sparse` is whether the optimizer supports sparse gradients.
        files: required files in the folder of data.
        full_batch: whether every minibatch is the whole training set, so that the loss has no noise.
        online: whether each row is seen once, in order. The loss is that of each part before it is learned.
        pretraining: the workload whose trained weights are the initial weights; None for random initial weights.
        checkpoint: path of these weights; set before a run.
    """

    name: str
    title: str
    build: Callable[[int, bool], Task]
    batch: int
    epochs: int
    files: tuple[str, ...] = ()
    online: bool = False
    pretraining: Workload | None = None
    checkpoint: Path | None = None
    full_batch: bool = False


def digits_logistic(seed: int, sparse: bool) -> Task:
    return Task(networks.mlp(64, 10), data.shuffled(*data.digits(), seed), F.cross_entropy)


def digits_mlp(seed: int, sparse: bool) -> Task:
    return Task(networks.mlp(64, 64, 10), data.shuffled(*data.digits(), seed), F.cross_entropy)


def digits_autoencoder(seed: int, sparse: bool) -> Task:
    split = data.shuffled(*data.digits(), seed)
    return Task(networks.mlp(64, 32, 8, 32, 64), Split(split.x, split.x, split.x_test, split.x_test), F.mse_loss)


def fashion_mlp(seed: int, sparse: bool) -> Task:
    return Task(networks.mlp(784, 64, 10), data.fashion_split(seed), F.cross_entropy)


def fashion_cnn(seed: int, sparse: bool) -> Task:
    return Task(networks.cnn(normalize=False), data.fashion_split(seed), F.cross_entropy)


def fashion_cnn_batchnorm(seed: int, sparse: bool) -> Task:
    return Task(networks.cnn(normalize=True), data.fashion_split(seed), F.cross_entropy)


def shakespeare_transformer(seed: int, sparse: bool) -> Task:
    split, symbols = data.characters(seed, length=32, train=6400)
    return Task(networks.CharTransformer(symbols, length=32), split, F.cross_entropy)


def shakespeare_lstm(seed: int, sparse: bool) -> Task:
    split, symbols = data.characters(seed, length=32, train=6400)
    return Task(networks.CharLSTM(symbols), split, F.cross_entropy)


def movielens_factors(seed: int, sparse: bool) -> Task:
    split = data.shuffled(*data.movielens(), seed)
    return Task(networks.Factors(943, 1682, sparse), split, F.mse_loss)


def housing_absolute(seed: int, sparse: bool) -> Task:
    split = data.standardized(data.shuffled(*data.numbers("california-housing.csv.gz"), seed))
    return Task(nn.Sequential(networks.mlp(8, 64, 64, 1), nn.Flatten(0)), split, F.l1_loss)


def newsgroups_bag(seed: int, sparse: bool) -> Task:
    return Task(networks.WordBag(data.WORDS, 20, sparse), data.newsgroups(), F.cross_entropy)


def elec2_online(seed: int, sparse: bool) -> Task:
    x, y = data.numbers("elec2.csv.gz")
    x = torch.cat([x, torch.cat([torch.zeros(1), 2 * y[:-1] - 1])[:, None]], dim=1)  # the previous label is an input
    return Task(
        nn.Sequential(networks.mlp(7, 16, 1), nn.Flatten(0)), Split(x, y, x, y), F.binary_cross_entropy_with_logits
    )


def rotated_quadratics(seed: int, sparse: bool) -> Task:
    problem = rotated_quadratic(dim=50, condition=100.0, noise=1.0, seed=seed)
    centres = torch.randn(10_000, 50, generator=torch.Generator().manual_seed(seed))
    nowhere = torch.zeros(len(centres))
    split = Split(centres, nowhere, torch.zeros(1, 50), torch.zeros(1))
    hessian = torch.tensor(problem.hessian, dtype=torch.float32)
    return Task(networks.Point(hessian), split, lambda distance, _: distance.mean())


FASHION = tuple(
    f"fashion-mnist/{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)

WORKLOADS = (
    Workload("digits-logistic", "Digits, logistic regression", digits_logistic, 16, 10),
    Workload("digits-mlp", "Digits, MLP", digits_mlp, 16, 10),
    Workload("digits-autoencoder", "Digits, autoencoder", digits_autoencoder, 16, 15),
    Workload("fashion-mlp", "Fashion-MNIST, MLP", fashion_mlp, 32, 5, FASHION),
    Workload("fashion-cnn", "Fashion-MNIST, CNN", fashion_cnn, 32, 4, FASHION),
    Workload("fashion-cnn-bn", "Fashion-MNIST, CNN, BatchNorm", fashion_cnn_batchnorm, 32, 3, FASHION),
    Workload("transformer", "Shakespeare, transformer", shakespeare_transformer, 16, 1, ("shakespeare.txt.gz",)),
    Workload("lstm", "Shakespeare, LSTM", shakespeare_lstm, 16, 1, ("shakespeare.txt.gz",)),
    Workload("movielens", "MovieLens, factors", movielens_factors, 128, 4, ("movielens-100k/u.data.gz",)),
    Workload("housing", "Housing, MLP, absolute loss", housing_absolute, 32, 5, ("california-housing.csv.gz",)),
    Workload(
        "newsgroups",
        "20 Newsgroups, word bag",
        newsgroups_bag,
        32,
        6,
        ("20newsgroups/train.tsv.gz", "20newsgroups/test.tsv.gz"),
    ),
    Workload("elec2", "Elec2, online", elec2_online, 8, 1, ("elec2.csv.gz",), online=True),
    Workload("rotated", "Rotated quadratics", rotated_quadratics, 10, 1),
)
