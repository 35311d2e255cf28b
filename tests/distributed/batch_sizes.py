"""Run by test_batch_sizes.py in every process: train with `BatchSizer`. One process is slower than the others."""

from __future__ import annotations

import json
import time
from functools import partial

import torch
from processes import this_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vsgd.torch import VSGD, BatchSizer, Replicas

torch.set_num_threads(1)
process = this_process()
process.join()
torch.manual_seed(0)
data = torch.randn(4000, 6)
model = nn.Linear(6, 1)
replicas = process.arguments[0] == "replicas"
wrapped = model if replicas else DistributedDataParallel(model)
opt = VSGD(model.parameters(), distributed=Replicas(as_samples=replicas))
sizer = BatchSizer(data, opt, start=16)
parts = []
for part, _ in zip(sizer, range(70), strict=False):

    def loss(x):
        time.sleep(1e-3 * process.rank)
        return (wrapped(x) - x.sum(1, keepdim=True)).square().mean()

    half = len(part) // 2
    opt.minimize([partial(loss, data[part[:half]]), partial(loss, data[part[half:]])])
    parts.append(part)
(process.folder / f"parts-{process.rank}.json").write_text(json.dumps(parts))
