"""Compare models merged from parts of 20 Newsgroups with one model trained on all of it, by held-out loss.

Each round is a pass over every part, followed by a merge. The ways to merge differ in θ only; the rest is
`vsgd.linear.merging`.
VSGD_DATA names the folder of the data sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from vsgd.algorithms.columns import COLUMNS
from vsgd.linear import Model, Task, Training, as_rows, new_model, train_on
from vsgd.linear.losses import LOG
from vsgd.linear.merging import mean_over, merge
from vsgd.linear.model import CURV, SEEN, THETA
from vsgd_bench.datasets import skipped_without_data
from vsgd_bench.sparse.data import Split, newsgroups
from vsgd_bench.sparse.problems import one_vs_rest_loss

Theta = Callable[[Sequence[Model], Model], np.ndarray]
TRAINING = Training(Task(LOG, one_vs_rest=True), COLUMNS, batch_size=16)


def field(models: Sequence[Model], index: int) -> list[np.ndarray]:
    return [model.table[:, index] for model in models]


def plain(models: Sequence[Model], base: Model) -> np.ndarray:
    return np.mean(field(models, THETA), axis=0)


def by_count(models: Sequence[Model], base: Model) -> np.ndarray:
    return mean_over([seen - base.table[:, SEEN] for seen in field(models, SEEN)], field(models, THETA))


def by_precision(models: Sequence[Model], base: Model) -> np.ndarray:
    new = [seen - base.table[:, SEEN] for seen in field(models, SEEN)]
    precision = [d * curvature for d, curvature in zip(new, field(models, CURV), strict=True)]
    return mean_over(precision, field(models, THETA))


def summed(models: Sequence[Model], base: Model) -> np.ndarray:
    return base.table[:, THETA] + sum(theta - base.table[:, THETA] for theta in field(models, THETA))


def from_base_by_count(models: Sequence[Model], base: Model) -> np.ndarray:
    total = merge(models, base).table[:, SEEN]
    steps = (
        seen / np.maximum(total, 1) * (theta - base.table[:, THETA])
        for seen, theta in zip(field(models, SEEN), field(models, THETA), strict=True)
    )
    return base.table[:, THETA] + sum(steps)


def from_base_by_precision(models: Sequence[Model], base: Model) -> np.ndarray:
    return merge(models, base).table[:, THETA]


WAYS: dict[str, Theta] = {
    "plain average": plain,
    "average, weighted by count": by_count,
    "average, weighted by count × curvature": by_precision,
    "sum of all changes": summed,
    "base and changes, by count": from_base_by_count,
    "base and changes, by count × curvature (`merge`)": from_base_by_precision,
}


def copy_of(model: Model) -> Model:
    return Model(*(array.copy() for array in model))


def learn(model: Model, data: Split, rows: np.ndarray, seed: tuple[int, ...]) -> None:
    """Train for one pass over some rows in random order."""
    order = np.random.default_rng(seed).permutation(rows)
    train_on(model, as_rows(data.X), order, data.y.astype(float), np.ones(len(data.y)), TRAINING)


def held_out(model: Model, data: Split) -> float:
    theta = model.table[:, THETA]
    return one_vs_rest_loss(data.X_test @ theta[:-1] + theta[-1], data.y_test)


def fresh(data: Split, seed: int) -> Model:
    return new_model(data.X.shape[1] + 1, int(data.y.max()) + 1, TRAINING.task, COLUMNS, seed)


def in_rounds(data: Split, theta_of: Theta, parts: Sequence[np.ndarray], rounds: int, seed: int) -> list[float]:
    """Return the held-out loss after each round."""
    base, losses = fresh(data, seed), []
    for number in range(rounds):
        models = [copy_of(base) for _ in parts]
        for k, (model, rows) in enumerate(zip(models, parts, strict=True)):
            learn(model, data, rows, (seed, number, k))
        merged = merge(models, base)
        merged.table[:, THETA] = theta_of(models, base)
        base = merged
        losses.append(held_out(base, data))
    return losses


def in_sequence(data: Split, rounds: int, seed: int) -> list[float]:
    model, losses = fresh(data, seed), []
    for number in range(rounds):
        learn(model, data, np.arange(len(data.y)), (seed, number))
        losses.append(held_out(model, data))
    return losses


@skipped_without_data()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for name, tfidf in (("tf-idf", True), ("counts", False)):
        data = newsgroups(tfidf)
        goal = np.array([in_sequence(data, arguments.rounds, seed) for seed in range(arguments.seeds)])
        print(f"\n20 Newsgroups, {name}; one model, pass by pass: {', '.join(f'{x:.5f}' for x in goal.mean(axis=0))}\n")
        print(
            "| " + " | ".join([f"{arguments.parts} parts", *(f"round {r + 1}" for r in range(arguments.rounds))]) + " |"
        )
        print("|---" * (arguments.rounds + 1) + "|")
        for way, theta_of in WAYS.items():
            losses = []
            for seed in range(arguments.seeds):
                rows = np.random.default_rng(seed).permutation(len(data.y))
                losses.append(in_rounds(data, theta_of, np.array_split(rows, arguments.parts), arguments.rounds, seed))
            excess = np.mean(np.array(losses) / goal[:, -1:] - 1, axis=0)
            print(f"| {way} | " + " | ".join(f"{100 * x:+.1f} %" for x in excess) + " |", flush=True)


if __name__ == "__main__":
    main()
