"""Run by test_replicas.py in every process: train each kind of model on this process's part of a global batch."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import this_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vsgd
from vsgd.torch import VSGD, Replicas, local_gradients

ROWS, PARTS = 16, 4
"""Number of parts of the global batch. Each process has the same number of parts."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Bags(nn.Module):
    """Words to a class."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(30, 6, mode="mean", sparse=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.words(x))


def global_batch(kind: str, step: int, dtype: torch.dtype):
    random = torch.Generator().manual_seed(step)
    y = torch.randint(3, (ROWS,), generator=random)
    if "embedding" in kind:
        return (torch.randint(30, (ROWS, 4), generator=random) ** 2) // 30, y
    x = torch.randn(ROWS, 5, generator=random, dtype=dtype) + y[:, None]
    if kind == "infinite" and step % 3 == 1:
        x[-1] = torch.inf  # only in the last process
    return x, y


def train(kind: str, rank: int, world: int, steps: int, dtype: torch.dtype):
    torch.manual_seed(0)
    bags = "embedding" in kind
    model = (Bags() if bags else nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))).to(dtype)
    if kind == "zero":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    replicas = "replicas" in kind
    wrapped = model
    if world > 1 and (not replicas or "wrapped" in kind):
        wrapped = DistributedDataParallel(model)
        if replicas:
            wrapped.register_comm_hook(None, local_gradients)
    algorithm = vsgd.PAPER if kind == "paper" else vsgd.NETWORKS._replace(eigenbasis=kind != "dense")
    opt = VSGD(
        model.parameters(),
        algorithm=algorithm,
        per_sample=model if "per sample" in kind else None,
        distributed=Replicas(replicas, torch.bfloat16 if "bfloat16" in kind else None),
    )
    losses = []
    for step in range(steps):
        x, y = (whole.chunk(world)[rank] for whole in global_batch(kind, step, dtype))
        cut = PARTS // world if replicas else 1
        parts = list(zip(x.chunk(cut), y.chunk(cut), strict=True))
        closures = [lambda part=part: F.cross_entropy(wrapped(part[0]), part[1]) for part in parts]
        losses.append(float(opt.minimize(closures)))
    info = opt.info()
    assert info.skipped == sum(kind == "infinite" and step % 3 == 1 for step in range(steps))
    if replicas:
        assert info.samples_per_step == PARTS
    return losses, [parameter.detach() for parameter in model.parameters()]


def check_equal(tensors, kind):
    for tensor in (each.nan_to_num() for each in tensors):
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor)
        assert all(torch.equal(copy, tensor) for copy in copies), kind


if __name__ == "__main__":
    torch.set_num_threads(1)
    process = this_process()
    if process.world > 1:
        process.join()
    results = {}
    steps, dtypes, *kinds = process.arguments
    for kind, dtype in itertools.product(kinds, map(DTYPES.get, dtypes.split(","))):
        losses, parameters = train(kind, process.rank, process.world, int(steps), dtype)
        results[kind, dtype] = losses, parameters
        if process.world > 1:
            check_equal([torch.tensor(losses), *parameters], kind)
    if process.rank == 0:
        torch.save(results, process.folder / f"results-{process.world}.pt")
    if process.world > 1:
        dist.destroy_process_group()
