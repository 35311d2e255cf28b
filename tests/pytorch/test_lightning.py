"""Lightning's automatic optimization passes a closure, so nothing special is needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from vsgd.torch import VSGD

lightning = pytest.importorskip("lightning.pytorch")


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return VSGD(self.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains(tmp_path):
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    model = Digits()
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
    assert sum(model.losses[-40:]) / 40 < 0.5 * model.losses[0]
