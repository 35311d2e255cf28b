"""Run by test_distributed.py in two processes: train, and check that the weights are bit-for-bit equal."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from test_lightning import Module, data
from test_transformers import Sentences, arguments, bert, gpt2, logged
from torch.utils.data import DataLoader

from vsgd.integrations.transformers import VSGDTrainer

MICRO_BATCHES = 2


def check_replicas(model):
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(copies, parameter.detach())
        assert torch.equal(*copies)


def check_loss(losses):
    quarter = len(losses) // 4
    assert sum(losses[-quarter:]) < sum(losses[:quarter])


def transformers_trainer(path):
    for model, dataset in ((gpt2(dropout=0.1), Sentences()), (bert(), Sentences(classify=True))):
        args = arguments(path, gradient_accumulation_steps=MICRO_BATCHES, per_device_train_batch_size=4, max_steps=24)
        trainer = VSGDTrainer(model=model, args=args, train_dataset=dataset)
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        assert trainer.vsgd.param_groups[0]["steps"] == 24
        check_replicas(model)
        check_loss(logged(trainer, "loss"))


def lightning_trainer(path):
    module = Module(dropout=0.1)
    trainer = lightning.Trainer(
        max_epochs=4, accumulate_grad_batches=MICRO_BATCHES, strategy="ddp", devices=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(), 8))
    assert trainer.world_size == 2
    assert trainer.optimizers[0].param_groups[0]["steps"] == 20
    check_replicas(module)
    check_loss(module.losses)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"transformers": transformers_trainer, "lightning": lightning_trainer}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()  # without this call, processes sometimes abort at exit
    print("replicas are equal")
