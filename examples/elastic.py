"""Train on handwritten digits with a changing number of workers.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:4 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 examples/elastic.py digits.pt

Run the same command on up to four machines, or in four terminals with HOST = localhost. If a worker dies or joins,
torchrun restarts all workers, and training continues from the last checkpoint. The global minibatches do not depend on
the number of workers, and there is no learning rate to scale with it. The environment variable prevents restarted
workers from reading the addresses of earlier ones (pytorch issue 135712).
"""

from __future__ import annotations

import argparse
import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vsgd.torch import VSGD

TRAIN, BATCH = 1500, 60
"""Number of training rows, and the global batch size over all workers."""


def global_batch(step: int) -> torch.Tensor:
    """Return the rows of a step. They depend only on its number."""
    epoch, place = divmod(step, TRAIN // BATCH)
    order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
    return order[place * BATCH : (place + 1) * BATCH]


def save(path: Path, model: nn.Module, opt: VSGD, step: int) -> None:
    """Write a checkpoint atomically."""
    beside = path.with_name(path.name + ".new")
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, beside)
    os.replace(beside, path)


def checksum(model: nn.Module) -> int:
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt, first = VSGD(model.parameters()), 0
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        first = saved["step"]
    replica = DistributedDataParallel(model)
    print(f"worker {rank} of {workers}, process {os.getpid()}: from step {first}", flush=True)

    for step in range(first, arguments.steps):
        rows = global_batch(step)[rank::workers]
        loss = opt.minimize(lambda rows=rows: F.cross_entropy(replica(x[rows]), y[rows]))
        if rank == 0:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)
            if (step + 1) % arguments.every == 0:
                save(arguments.checkpoint, model, opt, step + 1)

    with torch.no_grad():
        held_out = F.cross_entropy(model(x[TRAIN:]), y[TRAIN:])
    print(f"worker {rank} of {workers}: held-out loss {held_out:.4f}, checksum {checksum(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
