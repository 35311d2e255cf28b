"""The data of the workloads: bundled with scikit-learn, or read from the folder that VSGD_DATA names."""

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
def shakespeare() -> tuple[Any, Tensor]:
    """The characters that there are, and the text as their numbers."""
    symbols, codes = np.unique(np.frombuffer(read("shakespeare.txt.gz"), np.uint8), return_inverse=True)
    return symbols, torch.tensor(codes)


def characters(seed: int, length: int, train: int, test: int = 200) -> tuple[Split, int]:
    """Random passages to learn from the first nine tenths, others to be judged on from the last."""
    symbols, text = shakespeare()
    border = len(text) * 9 // 10
    return passages(text[:border], text[border:], seed, length, train, test), len(symbols)


def passages(learned: Tensor, held_out: Tensor, seed: int, length: int, train: int, test: int) -> Split:
    """Random passages of two texts; the target is the character after each."""
    rng = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for text, count in ((learned, train), (held_out, test)):
        starts = torch.randint(len(text) - length, (count, 1), generator=rng)
        codes = text[starts + torch.arange(length + 1)]
        parts += [codes[:, :-1], codes[:, 1:]]
    return Split(*parts)


@functools.cache
def newsgroup_text(part: str) -> Tensor:
    """The posts of "train" or "test" as one text in Shakespeare's characters."""
    symbols, _ = shakespeare()
    lines = read(f"20newsgroups/{part}.tsv.gz").splitlines()
    text = np.frombuffer(b"\n".join(line.partition(b"\t")[2] for line in lines), np.uint8)
    return torch.tensor(np.searchsorted(symbols, text))


def newsgroup_characters(seed: int, length: int, train: int, test: int = 200) -> tuple[Split, int]:
    """The same as `characters` from posts, for models that know Shakespeare's characters."""
    learned, held_out = newsgroup_text("train"), newsgroup_text("test")
    return passages(learned, held_out, seed, length, train, test), len(shakespeare()[0])


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


@functools.cache
def adult() -> tuple[Tensor, Tensor]:
    """The census: columns of numbers standardized, one column for each value of the others; earns more than 50K?"""
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
