"""Train a small GPT-2 from scratch with the Hugging Face Trainer, without a learning rate.

    python examples/transformers_trainer.py

The sentences are generated: each counts upwards in constant steps. Requires `pip install '.[integrations]'`.
"""

from __future__ import annotations

import math
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from vsgd.integrations.transformers import VSGDTrainer

WORDS, LENGTH = 31, 16


class Counting(Dataset):
    """Sentences such as 3 5 7 9. The first two words determine the others."""

    def __init__(self, rows: int, seed: int):
        start, stride = torch.randint(WORDS, (2, rows, 1), generator=torch.Generator().manual_seed(seed))
        self.words = (start + stride * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[row], "labels": self.words[row]}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            num_train_epochs=8,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            logging_steps=40,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = VSGDTrainer(
            model=model, args=args, train_dataset=Counting(2000, seed=0), eval_dataset=Counting(200, seed=1)
        )
        trainer.train()
        print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}; random guessing: {math.log(WORDS):.3f}")
    print(trainer.vsgd.info())


if __name__ == "__main__":
    main()
