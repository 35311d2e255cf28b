"""Muon for hidden matrices and AdamW for the other parameters, as recommended by the author of Muon.

https://kellerjordan.github.io/posts/muon: AdamW trains embeddings, the input layer, the output layer, and parameters
that are not matrices. The filters of a convolution are a matrix with one row per output channel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention, *EMBEDDINGS)


class Parameters(NamedTuple):
    hidden: list[nn.Parameter]
    other: list[nn.Parameter]


def split_parameters(model: nn.Module) -> Parameters:
    """Return hidden matrices and other parameters. The first and the last matrix of the network are not hidden."""
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    matrices = [(layer, p) for layer in layers for p in layer.parameters(recurse=False) if p.ndim > 1]
    inside = {p for layer, p in matrices[1:-1] if not isinstance(layer, EMBEDDINGS)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Parameters([p for p in trainable if p in inside], [p for p in trainable if p not in inside])


def muon_and_adamw(model: nn.Module, lr: float, weight_decay: float) -> list[Optimizer]:
    """Return both optimizers, or one if the other has no parameters. Muon's steps are scaled to those of AdamW."""
    hidden, other = split_parameters(model)
    optimizers: list[Optimizer] = []
    if other:
        optimizers.append(AdamW(other, lr=lr, weight_decay=weight_decay))
    if hidden:
        # torch's Muon accepts matrices only; the matrices of filters share their memory
        matrices = [p if p.ndim == 2 else nn.Parameter(p.detach().view(len(p), -1)) for p in hidden]

        def pass_gradients(*_: Any) -> None:
            for parameter, matrix in zip(hidden, matrices, strict=True):
                if matrix is not parameter:
                    matrix.grad = None if parameter.grad is None else parameter.grad.view_as(matrix)

        muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        muon.register_step_pre_hook(pass_gradients)
        optimizers.append(muon)
    return optimizers
