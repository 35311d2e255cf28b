"""Files with the initial weights of workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vsgd.errors import UserError
from vsgd_bench import store


def save_weights(path: Path, model: nn.Module, origin: dict[str, Any]) -> None:
    store.save(path, {name: value.numpy() for name, value in model.state_dict().items()}, origin)


def load_weights(path: Path, model: nn.Module) -> None:
    """Load weights into a model. Only adapters may be missing in the file."""
    if (found := store.load(path, {})) is None:
        raise UserError(f"there is no checkpoint {path}")
    weights = {name: torch.tensor(value) for name, value in found[0].items()}
    new, unknown = model.load_state_dict(weights, strict=False)
    if unknown or any("lora_" not in name for name in new):
        raise UserError(f"the checkpoint {path} is that of another model")
