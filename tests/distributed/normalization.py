"""Run by test_replicas.py in every process: train a network with BatchNorm, whose statistics DDP copies to all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from processes import this_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vsgd.torch import VSGD

if __name__ == "__main__":
    torch.set_num_threads(1)
    process = this_process()
    process.join()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))
    opt = VSGD(model.parameters())
    for step in range(30):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(100 * step + process.rank))
        opt.minimize(lambda x=x: (model(x) - x[:, :1]).square().mean())
    mean, var = (getattr(model.module[1], name) for name in ("running_mean", "running_var"))
    with opt.iterates(), torch.no_grad():
        hidden = model.module[0](torch.randn(4000, 4, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(mean, hidden.mean(0), rtol=0, atol=0.3)
    torch.testing.assert_close(var, hidden.var(0), rtol=0.5, atol=0)
    dist.destroy_process_group()
