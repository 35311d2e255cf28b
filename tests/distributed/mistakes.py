"""Run by test_mistakes.py in every process: make one mistake after the other, each in the last process."""

from __future__ import annotations

import json
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import this_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vsgd
from vsgd.torch import VSGD, Replicas, is_probing
from vsgd.torch.distributed import messages

SETTINGS = {
    "other lr": {"lr": 0.5},
    "other weight decay": {"weight_decay": 0.25},
    "other algorithm": {"algorithm": vsgd.PAPER},
    "other constant": {"algorithm": vsgd.NETWORKS._replace(bootstrap=4.0)},
    "other precision of state": {"compact": True},
    "other direction": {"maximize": True},
    "other samples": {"distributed": Replicas()},
}
"""Arguments of VSGD that only the last process has."""

UNWRAPPED = ("other weights", "other shapes", "not averaged", "more micro-batches", "raises", "draws noise")
REPLICAS = ("other weights", "other shapes", "averaged twice", "more micro-batches", "raises", "draws noise")
ENDING = ("raises in backward", "raises before synchronized statistics")
"""Mistakes that break the connections between processes, so that the processes end."""


class RaisingLayer(nn.Identity):
    """A layer that raises an error in the forward pass on request."""

    raises = False

    def forward(self, x):
        if self.raises:
            fail()
        return x


class Synchronized(nn.Module):
    """A layer that waits for the other processes in its forward pass, like synchronized BatchNorm on GPUs."""

    def forward(self, x):
        total = x.detach().sum(0)
        dist.all_reduce(total)
        return x - 1e-3 * total


def build(mistake: str, guilty: bool):
    torch.manual_seed(1 if guilty and mistake == "other weights" else 0)
    model: nn.Module = nn.Linear(4, 3, bias=not (guilty and mistake == "other shapes"))
    if "statistics" in mistake:
        norm = Synchronized() if mistake == "raises before synchronized statistics" else nn.BatchNorm1d(3)
        model = nn.Sequential(model, RaisingLayer(), norm)
    wrapped = model if mistake in UNWRAPPED else DistributedDataParallel(model)
    settings = {"distributed": Replicas()} if mistake in REPLICAS else {}
    if mistake == "empty rows":
        settings["per_sample"] = model
    opt = VSGD(model.parameters(), **(settings | (SETTINGS.get(mistake, {}) if guilty else {})))
    return model, wrapped, opt


def change(mistake: str, model, opt) -> None:
    """Make a change in one process between two steps that all processes should make."""
    if mistake == "clears state":
        opt.state.clear()
    elif mistake == "loads alone":
        opt.load_state_dict(opt.state_dict())
    elif mistake == "sets weights":
        with torch.no_grad():
            model.weight.mul_(2)
    elif mistake == "schedules lr":
        opt.param_groups[0]["lr"] = 0.75
    elif mistake == "schedules weight decay":
        opt.param_groups[0]["weight_decay"] = 0.125
    elif mistake == "adds a group":
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    elif mistake == "no closure":
        opt.step()


def train(mistake: str, rank: int, guilty: bool) -> None:
    model, wrapped, opt = build(mistake, guilty)
    torch.manual_seed(rank)
    own = torch.Generator().manual_seed(rank)
    for step in range(20):
        rows = 0 if guilty and step > 1 and "empty" in mistake else 8
        x, y = torch.randn(rows, 4), torch.randint(3, (rows,))
        now = guilty and step == 4
        if now:
            change(mistake, model, opt)

        def closure(x=x, y=y, step=step, now=now):
            fails = now and "raises" in mistake
            if fails and ("raises before" in mistake) and "synchronized" not in mistake:
                fail()
            if guilty and step > 4 and is_probing() and mistake == "raises in a probe of running statistics":
                fail()
            if fails and mistake in ("raises in the forward pass of statistics", ENDING[1]):
                model[1].raises = True
            opt.zero_grad()
            hidden = wrapped(x)
            noise = torch.rand((), generator=own) if guilty and mistake == "draws noise" else 1
            loss = noise * F.cross_entropy(hidden, y)
            if fails and mistake == "raises in backward":
                model.weight.register_post_accumulate_grad_hook(fail)
            loss.backward()
            if fails:
                fail()
            if now and mistake == "gradient that is NaN":
                model.weight.grad.fill_(torch.nan)
            return loss * torch.nan if now and mistake == "loss that is NaN" else loss

        count = 2 if (guilty and mistake == "more micro-batches") or "micro-batches of" in mistake else 1
        loss = opt.step([closure] * count)
        if "NaN" in mistake and step == 4:
            raise AssertionError(f"loss {float(loss):.3f}, skipped {opt.info().skipped}")


def fail(*_):
    raise ValueError("the data are gone")


if __name__ == "__main__":
    torch.set_num_threads(1)
    process = this_process()
    ends = process.arguments[0] in ENDING
    process.join()
    # where connections break, no process answers the one that has failed: it closes its connections at once, and then
    # waits for the others as long as the test does
    messages.NOTIFY_TIMEOUT = timedelta(milliseconds=1) if ends else timedelta(seconds=300)
    messages.READ_TIMEOUT = timedelta(seconds=300)
    told = {}
    for mistake in process.arguments:
        try:
            train(mistake, process.rank, process.rank == process.world - 1)
        except Exception as error:
            if ends:
                raise
            told[mistake] = "".join(traceback.format_exception_only(error))
    (process.folder / f"told-{process.rank}.json").write_text(json.dumps(told))
