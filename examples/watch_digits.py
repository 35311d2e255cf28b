"""Train on digits from scikit-learn with a progress bar and a log for `vsgd watch`.

python examples/watch_digits.py run.jsonl
vsgd watch run.jsonl        # in another terminal, during or after training
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from vsgd.integrations.run_log import RunLog, progress
from vsgd.torch import VSGD

EPOCHS, BATCH = 10, 16


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help such a small network
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = VSGD(model.named_parameters())
    RunLog(opt, sys.argv[1] if len(sys.argv) > 1 else "run.jsonl")

    for epoch in range(EPOCHS):
        for x, y in progress(loader, opt, desc=f"epoch {epoch}"):
            opt.minimize(lambda x=x, y=y: F.cross_entropy(model(x), y))


if __name__ == "__main__":
    main()
