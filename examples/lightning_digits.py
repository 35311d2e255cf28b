"""Train on handwritten digits with Lightning, without a learning rate.

    python examples/lightning_digits.py

Gradients of four batches of 16 are accumulated; each is a micro-batch. Metrics and logs count every sample once.
Requires `pip install '.[integrations,sklearn]'`.
"""

from __future__ import annotations

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from vsgd.integrations.lightning import VSGDMixin
from vsgd.torch import VSGD


class Digits(VSGDMixin, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.layers(x)
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("held-out loss", F.cross_entropy(self.layers(x), y), batch_size=len(x))

    def on_train_epoch_end(self) -> None:
        print(", ".join(f"{name} {value:.3f}" for name, value in sorted(self.trainer.callback_metrics.items())))

    def configure_optimizers(self) -> VSGD:
        return VSGD(self.parameters())


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, held_out = random_split(digits, [1500, len(digits) - 1500])
    trainer = Trainer(
        max_epochs=10,
        accumulate_grad_batches=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Digits(), DataLoader(train, 16, shuffle=True), DataLoader(held_out, len(held_out)))


if __name__ == "__main__":
    main()
