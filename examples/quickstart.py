"""Train a network on handwritten digits, without tuning.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from vsgd.torch import VSGD

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))
x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = VSGD(model.parameters(), steps_per_epoch=1500 / 16)
for epoch in range(5):
    for rows in torch.randperm(1500).split(16):
        opt.minimize(lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows]))
    with torch.no_grad():
        scores, right = model(x[1500:]), y[1500:]
    error = (scores.argmax(dim=1) != right).float().mean().item()
    print(f"epoch {epoch + 1}: held-out loss {F.cross_entropy(scores, right).item():.3f}, error {error:.1%}")
