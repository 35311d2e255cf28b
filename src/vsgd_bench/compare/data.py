"""The data of the workloads. They come with scikit-learn, or from the folder that VSGD_DATA names."""

from __future__ import annotations

import functools
import gzip
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsgd_bench.datasets import MissingData, locate


class Split(NamedTuple):
    """Training rows and held-out rows. The split depends on the seed."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def read(name: str) -> bytes:
    try:
        return gzip.decompress(locate(name).read_bytes())
    except (OSError, EOFError) as error:
        raise MissingData(f"{locate(name)} cannot be read: {error}") from error


def shuffled(x: Tensor, y: Tensor, seed: int, test: float = 0.2) -> Split:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[: int(len(x) * test)], order[int(len(x) * test) :]
    return Split(x[train], y[train], x[held_out], y[held_out])


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 handwritten digits of 8×8 pixels between 0 and 1."""
    from sklearn.datasets import load_digits  # imported here since it takes as long as importing torch

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


@functools.cache
def fashion(part: str) -> tuple[Tensor, Tensor]:
    """Return Fashion-MNIST, 28×28 pixels between 0 and 1. `part` is "train" or "t10k"."""
    pixels = np.frombuffer(read(f"fashion-mnist/{part}-images-idx3-ubyte.gz"), np.uint8, offset=16).copy()
    labels = np.frombuffer(read(f"fashion-mnist/{part}-labels-idx1-ubyte.gz"), np.uint8, offset=8).copy()
    return torch.tensor(pixels.reshape(-1, 1, 28, 28)), torch.tensor(labels, dtype=torch.int64)


def fashion_split(seed: int, train: int = 6000, test: int = 1000) -> Split:
    """Return a random part of the published training and test images."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for part, size in (("train", train), ("t10k", test)):
        images, labels = fashion(part)
        chosen = torch.randperm(len(images), generator=rng)[:size]
        parts += [images[chosen].float() / 255, labels[chosen]]
    return Split(*parts)


@functools.cache
def shakespeare() -> tuple[Any, Tensor]:
    """Return the sorted characters of the text, and the text as indices of characters."""
    symbols, codes = np.unique(np.frombuffer(read("shakespeare.txt.gz"), np.uint8), return_inverse=True)
    return symbols, torch.tensor(codes)


def characters(seed: int, length: int, train: int, test: int = 200) -> tuple[Split, int]:
    """Return random training passages from the first 90 % of the text, and held-out passages from the rest."""
    symbols, text = shakespeare()
    border = len(text) * 9 // 10
    return passages(text[:border], text[border:], seed, length, train, test), len(symbols)


def passages(learned: Tensor, held_out: Tensor, seed: int, length: int, train: int, test: int) -> Split:
    """Return random passages of two texts. The target of each character is the next one."""
    rng = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for text, count in ((learned, train), (held_out, test)):
        starts = torch.randint(len(text) - length, (count, 1), generator=rng)
        codes = text[starts + torch.arange(length + 1)]
        parts += [codes[:, :-1], codes[:, 1:]]
    return Split(*parts)


@functools.cache
def newsgroup_text(part: str) -> Tensor:
    """Return the posts of "train" or "test" as one text with the characters of `shakespeare`."""
    symbols, _ = shakespeare()
    lines = read(f"20newsgroups/{part}.tsv.gz").splitlines()
    text = np.frombuffer(b"\n".join(line.partition(b"\t")[2] for line in lines), np.uint8)
    return torch.tensor(np.searchsorted(symbols, text))


def newsgroup_characters(seed: int, length: int, train: int, test: int = 200) -> tuple[Split, int]:
    """Return passages as `characters` does, from posts, for models trained on Shakespeare."""
    learned, held_out = newsgroup_text("train"), newsgroup_text("test")
    return passages(learned, held_out, seed, length, train, test), len(shakespeare()[0])


@functools.cache
def movielens() -> tuple[Tensor, Tensor]:
    """Return users and items of 100,000 ratings, and the ratings."""
    table = np.loadtxt(read("movielens-100k/u.data.gz").decode().splitlines(), dtype=np.int64)
    return torch.tensor(table[:, :2] - 1), torch.tensor(table[:, 2], dtype=torch.float32)


@functools.cache
def numbers(name: str) -> tuple[Tensor, Tensor]:
    """Return the columns of a CSV file of numbers; the last one is the target."""
    values = np.loadtxt(read(name).decode().splitlines(), delimiter=",", skiprows=1)
    return torch.tensor(values[:, :-1], dtype=torch.float32), torch.tensor(values[:, -1], dtype=torch.float32)


@functools.cache
def adult() -> tuple[Tensor, Tensor]:
    """Return census data and whether a person earns more than 50K. Numbers are standardized; categories are one-hot."""
    head, *rows = (line.split(",") for line in read("adult.csv.gz").decode().splitlines())
    columns = list(zip(*rows, strict=True))
    parts: list[Any] = []
    for column in columns[: len(head) - 1]:
        if all(text.lstrip("-").isdigit() for text in column):
            values = np.array(column, np.float32)
            parts.append((values - values.mean()) / (values.std() or 1.0))
        else:
            parts += [np.array([text == value for text in column], np.float32) for value in sorted(set(column))]
    labels = np.array([text.startswith(">") for text in columns[-1]], np.float32)
    return torch.tensor(np.stack(parts, 1)), torch.tensor(labels)


def standardized(split: Split) -> Split:
    """Return columns with mean 0 and standard deviation 1 over the training rows."""
    mean, deviation = split.x.mean(0), split.x.std(0)
    return split._replace(x=(split.x - mean) / deviation, x_test=(split.x_test - mean) / deviation)


WORDS = 10_000
"""Size of the vocabulary of the newsgroups: the most frequent words."""


@functools.cache
def newsgroups(length: int = 120) -> Split:
    """Return the first words of each post, padded with `WORDS`, and its group."""
    lines = {part: read(f"20newsgroups/{part}.tsv.gz").decode().splitlines() for part in ("train", "test")}
    posts = {part: [line.partition("\t")[::2] for line in lines[part]] for part in lines}
    frequent = Counter(word for _, text in posts["train"] for word in text.split()).most_common(WORDS)
    code = {word: index for index, (word, _) in enumerate(frequent)}
    groups = {label: index for index, label in enumerate(sorted({label for label, _ in posts["train"]}))}
    tensors = []
    for part in posts.values():
        words = torch.full((len(part), length), WORDS)
        for row, (_, text) in enumerate(part):
            known = [code[word] for word in text.split() if word in code][:length]
            words[row, : len(known)] = torch.tensor(known, dtype=torch.int64)
        tensors += [words, torch.tensor([groups[label] for label, _ in part])]
    return Split(*tensors)
