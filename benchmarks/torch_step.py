"""Measure the cost of a step of the PyTorch optimizer, as ratios between optimizers that alternate.

    VSGD_DATA=... python benchmarks/torch_step.py [--quick]

Networks of the large suite are skipped if their data are missing, SOAP if pytorch_optimizer is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vsgd import NETWORKS
from vsgd.torch import VSGD, is_probing
from vsgd_bench.compare import networks
from vsgd_bench.compare.data import Split
from vsgd_bench.compare.large import LARGE_WORKLOADS
from vsgd_bench.compare.methods import Method, Setting
from vsgd_bench.compare.opponents import MUON_COSINE, SOAP_COSINE, from_package
from vsgd_bench.compare.ours import DEFAULT
from vsgd_bench.compare.train import Learner
from vsgd_bench.compare.workloads import Task, Workload
from vsgd_bench.datasets import MissingData

TURNS = 24
EVERY_STEP = NETWORKS._replace(probe_interval=1)
NEVER = NETWORKS._replace(probe_interval=1e9)
WITHOUT_BASIS = NETWORKS._replace(eigenbasis=False)


def medians(tasks: dict[str, Callable[[], object]], turns: int = TURNS, warm_up: int = 12) -> dict[str, float]:
    """Return the median seconds of each task. Every turn runs all tasks once."""
    for task in tasks.values():
        for _ in range(warm_up):
            task()
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(turns):
        for name, task in tasks.items():
            started = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(title: str, seconds: dict[str, float], against: str) -> None:
    print(f"\n{title}")
    for name, value in seconds.items():
        print(f"  {name:<52}{1e3 * value:>9.2f} ms{value / seconds[against]:>8.2f}x")


def step_of(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return a function that takes one training step of a classifier."""

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: opt.step(closure)


def update_alone() -> None:
    """Print the time of the update of 5 million coordinates, without computing gradients."""
    size = 5_000_000

    def given(parameter: Tensor, gradients: list[Tensor]) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            parameter.grad = gradients[is_probing()]
            return parameter.detach()[0]

        return closure

    def task(make: Callable[[Tensor], torch.optim.Optimizer]) -> Callable[[], object]:
        parameter = torch.randn(size, requires_grad=True)
        first = torch.randn(size)
        gradients = [first, first * 1.001]  # the optimizer checks that the first step is repeatable
        opt = make(parameter)
        closure = given(parameter, gradients)
        return lambda: opt.step(closure)

    tasks = {
        "torch.optim.Adam(fused=True)": task(lambda p: torch.optim.Adam([p], fused=True)),
        "VSGD, probe and update": task(lambda p: VSGD([p], algorithm=EVERY_STEP)),
        "VSGD, update without a second gradient": task(lambda p: VSGD([p], algorithm=NEVER)),
    }
    report(f"update alone, {size:,} float32 parameters", medians(tasks), "torch.optim.Adam(fused=True)")


def small_steps() -> None:
    """Print the time of small steps, which depends on Python overhead: 5,000 weights, and many small tensors."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))

    def network(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 25), nn.ReLU(), nn.Linear(25, 10))
        return step_of(model, make(model), x, y)

    tasks = {
        "SGD with momentum": network(lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)),
        "Adam": network(lambda m: torch.optim.Adam(m.parameters())),
        "VSGD without a second gradient": network(lambda m: VSGD(m.parameters(), algorithm=NEVER)),
        "VSGD without a second gradient or a basis": network(
            lambda m: VSGD(m.parameters(), algorithm=NEVER._replace(eigenbasis=False))
        ),
    }
    report("step of an MLP of 5,000 weights", medians(tasks, turns=200), "SGD with momentum")

    def many(count: int) -> Callable[[], object]:
        parameters = [nn.Parameter(torch.randn(10)) for _ in range(count)]
        gradients = [torch.randn(10) for _ in range(count)]
        opt = VSGD(parameters, algorithm=NEVER)

        def closure() -> Tensor:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            return parameters[0].detach().sum()

        return lambda: opt.step(closure)

    seconds = medians({str(count): many(count) for count in (20, 220)}, turns=100)
    print(f"  each further tensor: {1e6 * (seconds['220'] - seconds['20']) / 200:.1f} µs, including its gradient")


def memory() -> None:
    """Print the bytes of state per parameter in a checkpoint."""
    for name, options in {"VSGD": {}, "VSGD, compact": {"compact": True}}.items():
        model = nn.Linear(1000, 1000, bias=False)
        opt = VSGD(model.parameters(), algorithm=WITHOUT_BASIS, **options)

        def closure(model: nn.Module = model, opt: torch.optim.Optimizer = opt) -> Tensor:
            opt.zero_grad()
            loss: Tensor = model(torch.ones(4, 1000)).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
        used = sum(part.numel() * part.element_size() for part in opt.state[model.weight].values())
        print(
            f"  {name:<52}{used / model.weight.numel():>9.1f} bytes of state per parameter, without a basis; Adam has 8"
        )


def whole_step() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(128, 784), torch.randint(10, (128,))

    def task(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], object]:
        sizes = (784, 1024, 1024, 10)
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*layers[:-1])
        return step_of(model, make(model), x, y)

    def four(step: Callable[[], object]) -> Callable[[], object]:
        return lambda: [step() for _ in range(4)]

    tasks = {
        "SGD": task(lambda m: torch.optim.SGD(m.parameters(), lr=0.01)),
        "VSGD, a second gradient at every step": task(lambda m: VSGD(m.parameters(), algorithm=EVERY_STEP)),
        "VSGD, the default": task(lambda m: VSGD(m.parameters())),
        "VSGD, the default without a basis": task(lambda m: VSGD(m.parameters(), algorithm=WITHOUT_BASIS)),
        "VSGD, a row is a sample": task(lambda m: VSGD(m.parameters(), per_sample=m)),
    }
    seconds = medians({name: four(step) for name, step in tasks.items()}, turns=12, warm_up=4)
    report("whole step (four at a time), MLP 784-1024-1024-10, batch 128", seconds, "SGD")


def random_mlp(widths: tuple[int, ...], seed: int, sparse: bool) -> Task:
    """Return a classifier of random rows."""
    x, y = torch.randn(2000, widths[0]), torch.randint(widths[-1], (2000,))
    return Task(networks.mlp(*widths), Split(x, y, x[:10], y[:10]), F.cross_entropy)


NETWORKS_TO_TIME = (
    Workload("mlp-large", "MLP 784-1024-1024-10", partial(random_mlp, (784, 1024, 1024, 10)), 128, 100),
    Workload("mlp-small", "MLP of 5,000 weights", partial(random_mlp, (64, 50, 25, 10)), 32, 100),
    *(each for each in LARGE_WORKLOADS if each.name in ("gpt", "resnet", "vit", "gru", "lora", "adult")),
)

ADAMW = Method("adamw", "AdamW", partial(from_package, "torch.optim", "AdamW"), "its default")
OPTIMIZERS_TO_TIME = (
    (ADAMW, Setting()),
    (Method("sgd", "SGD", partial(from_package, "torch.optim", "SGD"), "no momentum"), Setting(1e-3)),
    (Method("momentum", "momentum", partial(from_package, "torch.optim", "SGD", momentum=0.9), "0.9"), Setting(1e-3)),
    (SOAP_COSINE._replace(title="SOAP"), Setting(1e-3, 0.01)),
    (MUON_COSINE._replace(title="Muon"), Setting(1e-3, 0.01)),
    (DEFAULT, DEFAULT.default),
)
STEPS = 10
"""Number of consecutive steps of one optimizer: the interval of second gradients."""


def against_others(turns: int) -> None:
    """Print milliseconds per step of each optimizer and network, and median ratios to AdamW in the same turn."""
    methods = [(method, setting) for method, setting in OPTIMIZERS_TO_TIME if importlib.util.find_spec(method.module)]
    print(f"\n{'ms of a step, and ratio to AdamW':<34}" + "".join(f"{method.title:>16}" for method, _ in methods))
    for workload in NETWORKS_TO_TIME:
        start = workload._replace(pretraining=None)
        try:
            learners = [Learner(start, method, setting, 0) for method, setting in methods]
        except MissingData as error:
            print(f"{workload.title:<34}{error}")
            continue
        seconds = [time_turns(learner, 2) and [] for learner in learners]
        for _ in range(turns):
            for learner, own in zip(learners, seconds, strict=True):
                own += time_turns(learner, 1)
        cells = []
        for own in seconds:
            ratio = statistics.median(mine / base for mine, base in zip(own, seconds[0], strict=True))
            cells.append(f"{1e3 * statistics.median(own):>9.2f}{ratio:>6.2f}x")
        print(f"{workload.title:<34}" + "".join(cells), flush=True)


def time_turns(learner: Learner, turns: int) -> list[float]:
    """Return the seconds per step of each turn. Minibatches are used in order, repeatedly."""
    found = []
    for _ in range(turns):
        batches, learner.batches = learner.batches[:STEPS], learner.batches[STEPS:] + learner.batches[:STEPS]
        started = time.perf_counter()
        for rows in batches:
            learner.update(rows)
        found.append((time.perf_counter() - started) / STEPS)
    return found


def sparse_table() -> None:
    def task(rows: int) -> Callable[[], object]:
        table = nn.Embedding(rows, 16, sparse=True)
        opt = VSGD(table.parameters())
        index = torch.randint(rows, (1024,), generator=torch.Generator().manual_seed(0))

        def closure() -> Tensor:
            opt.zero_grad()
            loss = table(index).abs().mean()
            loss.backward()
            return loss

        return lambda: opt.step(closure)

    tasks = {f"{rows:,} x 16": task(rows) for rows in (10_000, 10_000_000)}
    report("step of a sparse embedding, 1,024 rows looked up", medians(tasks), "10,000 x 16")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the cost of a step, as ratios.")
    parser.add_argument("--quick", action="store_true", help="fewer turns and fewer tables")
    quick = parser.parse_args().quick
    print(f"torch {torch.__version__}; medians of {TURNS} turns")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        print(f"\n=== {threads} thread{'s' * (threads > 1)}")
        update_alone()
        against_others(turns=3 if quick else 12)
        if not quick:
            whole_step()
    if not quick:
        torch.set_num_threads(1)
        small_steps()
        memory()
        sparse_table()
