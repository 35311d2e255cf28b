"""Run by test_mistakes.py in every process: makes one mistake after the other, each in the last process."""

from __future__ import annotations

import json
import traceback

import torch
import torch.nn.functional as F
from processes import this_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vsgd.torch import VSGD

AVERAGED = ("empty batch", "empty rows", "averaged twice", "raises averaged", "raises later", "raises in backward")


def train(mistake: str, rank: int, guilty: bool) -> None:
    torch.manual_seed(1 if guilty and mistake == "other weights" else 0)
    model = nn.Linear(4, 3, bias=not (guilty and mistake == "other shapes"))
    wrapped = DistributedDataParallel(model) if mistake in AVERAGED else model
    minibatch = mistake == "not averaged" or (mistake in AVERAGED and mistake != "averaged twice")
    opt = VSGD(
        model.parameters(),
        per_sample=model if mistake == "empty rows" else None,
        samples="minibatch" if minibatch else "replicas",
    )
    torch.manual_seed(rank)
    own = torch.Generator().manual_seed(rank)
    for step in range(20):
        rows = 0 if guilty and step > 1 and "empty" in mistake else 8
        x, y = torch.randn(rows, 4), torch.randint(3, (rows,))

        def closure(x=x, y=y, step=step):
            fails = guilty and step == 4 and "raises" in mistake
            if fails and mistake in ("raises", "raises averaged"):
                fail()
            opt.zero_grad()
            hidden = wrapped(x)
            noise = torch.rand((), generator=own) if guilty and mistake == "draws noise" else 1
            loss = noise * F.cross_entropy(hidden, y)
            if fails and mistake == "raises in backward":
                model.weight.register_post_accumulate_grad_hook(fail)
            loss.backward()
            if fails:
                fail()
            return loss

        opt.step([closure] * (2 if guilty and mistake == "more micro-batches" else 1))


def fail(*_):
    raise ValueError("the data are gone")


if __name__ == "__main__":
    torch.set_num_threads(1)
    process = this_process()
    # one of them waits until this time is over
    process.join(seconds=20 if "raises in backward" in process.arguments else 240)
    told = {}
    for mistake in process.arguments:
        try:
            train(mistake, process.rank, process.rank == process.world - 1)
        except Exception as error:
            if mistake == "raises in backward":
                raise
            told[mistake] = "".join(traceback.format_exception_only(error))
    (process.folder / f"told-{process.rank}.json").write_text(json.dumps(told))
