"""The data of the workloads: bundled with scikit-learn, or read from the folder that VSGD_DATA names."""

from __future__ import annotations

import functools
import gzip
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsgd.bench.datasets import MissingData, locate


class Split(NamedTuple):
    """Rows to learn from and rows to be judged on. Each seed shuffles anew."""

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
    """1,797 handwritten digits of 8×8 pixels between 0 and 1."""
    from sklearn.datasets import load_digits  # takes as long to import as torch, and few workloads need it

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


@functools.cache
def fashion(part: str) -> tuple[Tensor, Tensor]:
    """Clothes, 28×28 pixels between 0 and 1; `part` is "train" or "t10k"."""
    pixels = np.frombuffer(read(f"fashion-mnist/{part}-images-idx3-ubyte.gz"), np.uint8, offset=16).copy()
    labels = np.frombuffer(read(f"fashion-mnist/{part}-labels-idx1-ubyte.gz"), np.uint8, offset=8).copy()
    return torch.tensor(pixels.reshape(-1, 1, 28, 28)), torch.tensor(labels, dtype=torch.int64)


def fashion_split(seed: int, train: int = 6000, test: int = 1000) -> Split:
    """Few enough of the published training and test images for a run of seconds."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for part, size in (("train", train), ("t10k", test)):
        images, labels = fashion(part)
        chosen = torch.randperm(len(images), generator=rng)[:size]
        parts += [images[chosen].float() / 255, labels[chosen]]
    return Split(*parts)


@functools.cache
def shakespeare() -> tuple[Tensor, int]:
    """The text as numbers, and how many different characters there are."""
    symbols, codes = np.unique(np.frombuffer(read("shakespeare.txt.gz"), np.uint8), return_inverse=True)
    return torch.tensor(codes), len(symbols)


def characters(seed: int, length: int, train: int, test: int = 200) -> tuple[Split, int]:
    """Random passages to learn from the first nine tenths, others to be judged on from the last."""
    text, symbols = shakespeare()
    rng = torch.Generator().manual_seed(seed)
    border = len(text) * 9 // 10
    starts = torch.randint(border - length - 1, (train,), generator=rng)
    held_out = torch.randint(border, len(text) - length - 1, (test,), generator=rng)

    def passages(at: Tensor) -> tuple[Tensor, Tensor]:
        codes = text[at[:, None] + torch.arange(length + 1)]
        return codes[:, :-1], codes[:, 1:]

    return Split(*passages(starts), *passages(held_out)), symbols


@functools.cache
def movielens() -> tuple[Tensor, Tensor]:
    """User and item of 100,000 ratings; the ratings."""
    table = np.loadtxt(read("movielens-100k/u.data.gz").decode().splitlines(), dtype=np.int64)
    return torch.tensor(table[:, :2] - 1), torch.tensor(table[:, 2], dtype=torch.float32)


@functools.cache
def numbers(name: str) -> tuple[Tensor, Tensor]:
    """A CSV file of numbers, the target last."""
    values = np.loadtxt(read(name).decode().splitlines(), delimiter=",", skiprows=1)
    return torch.tensor(values[:, :-1], dtype=torch.float32), torch.tensor(values[:, -1], dtype=torch.float32)


def standardized(split: Split) -> Split:
    """Columns of mean 0 and deviation 1 over the rows to learn from, as one would for any network."""
    mean, deviation = split.x.mean(0), split.x.std(0)
    return split._replace(x=(split.x - mean) / deviation, x_test=(split.x_test - mean) / deviation)


WORDS = 10_000
"""The newsgroups' most frequent words that are told apart."""


@functools.cache
def newsgroups(length: int = 120) -> Split:
    """The first words of each post, the rest of the row being `WORDS`; the group it was sent to."""
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
