"""Run by test_shards.py in every process: train a model sharded by FSDP2, and load or save a checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import this_process
from torch import nn
from torch.distributed.fsdp import fully_shard

import vsgd
from vsgd.torch import VSGD, Replicas

ROWS, STEPS = 16, 24


def make(kind: str, world: int):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()  # not divisible by the number of processes
    if kind == "zero":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    if world > 1:
        fully_shard(model[0])
        fully_shard(model)
    algorithm = vsgd.PAPER if kind == "paper" else vsgd.NETWORKS._replace(eigenbasis=False)
    return model, VSGD(model.parameters(), algorithm=algorithm, weight_decay=1e-3)


def train(model, opt, kind: str, rank: int, world: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        random = torch.Generator().manual_seed(step)
        y = torch.randint(3, (ROWS,), generator=random)
        x = torch.randn(ROWS, 5, generator=random, dtype=torch.float64) + y[:, None]
        if kind == "infinite" and step % 3 == 1:
            x[-1] = torch.inf
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        losses.append(float(opt.minimize(lambda x=x, y=y: F.cross_entropy(model(x), y))))
    return losses


def check_refused() -> None:
    """Check that gradients of shards are averaged over the processes."""
    model, _ = make("networks", 2)
    for settings in ({"distributed": Replicas()}, {"per_sample": model}):
        opt = VSGD(model.parameters(), **settings)
        with pytest.raises(TypeError, match="sharded"):
            opt.minimize(lambda: model(torch.ones(1, 5, dtype=torch.float64)).sum())


def whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    process = this_process()
    rank, world = process.rank, process.world
    task, *kinds = process.arguments
    process.join()
    if world > 1:
        check_refused()
    results = {}
    for kind in kinds:
        model, opt = make(kind, world)
        steps = {"whole": range(STEPS), "first half": range(STEPS // 2), "second half": range(STEPS // 2, STEPS)}[task]
        checkpoint = {"model": model, "opt": opt}
        if task == "second half":
            dcp.load(checkpoint, checkpoint_id=process.folder / kind)
        losses = train(model, opt, kind, rank, world, steps)
        if task == "first half":
            dcp.save(checkpoint, checkpoint_id=process.folder / kind)
        results[kind] = losses, whole(model)
        if world > 1:
            state = opt.state[next(model.parameters())]
            assert state["grad_sq"].to_local().numel() < state["grad_sq"].numel()
        assert "rate" in str(opt.info())
    if rank == 0:
        torch.save(results, process.folder / f"{task}-{world}.pt")
    dist.destroy_process_group()
