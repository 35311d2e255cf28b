"""The suite of unseen networks. No constant of vSGD's rates was chosen on them or changed after their first run.

Their architectures differ from those of the other suites. They need no files: data come with scikit-learn, or are
random. Each run takes seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsgd_bench.compare import data, networks
from vsgd_bench.compare.data import Split
from vsgd_bench.compare.large_networks import convolution
from vsgd_bench.compare.workloads import Task, Workload

PIXELS = 64
LATENT = 8


def images(seed: int) -> Split:
    """Return digits as images with one channel."""
    split = data.shuffled(*data.digits(), seed)
    return split._replace(x=split.x.view(-1, 1, 8, 8), x_test=split.x_test.view(-1, 1, 8, 8))


# --- generative and contrastive -----------------------------------------------------------------------------------


class Variational(nn.Module):
    """A variational autoencoder; `forward` returns logits, means and log variances, concatenated."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, 2 * LATENT))
        self.decode = nn.Sequential(nn.Linear(LATENT, width), nn.GELU(), nn.Linear(width, PIXELS))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encode(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_var / 2).exp() if self.training else mean
        return torch.cat([self.decode(code), mean, log_var], 1)


def evidence_bound(output: Tensor, x: Tensor) -> Tensor:
    logits, mean, log_var = output.split([PIXELS, LATENT, LATENT], 1)
    error = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    divergence = (mean.square() + log_var.exp() - log_var - 1).sum(1) / 2
    return torch.mean(error + divergence)


def variational(seed: int, sparse: bool) -> Task:
    split = data.shuffled(*data.digits(), seed)
    return Task(Variational(), Split(split.x, split.x, split.x_test, split.x_test), evidence_bound)


class Similarities(nn.Module):
    """Similarities of each first view in a minibatch to each second view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = networks.mlp(PIXELS, 128, 32)

    def forward(self, views: Tensor) -> Tensor:
        first, second = (F.normalize(self.embed(views[:, k]), dim=1) for k in (0, 1))
        scores: Tensor = first @ second.T / 0.1
        return scores


def two_views(x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return each row twice, with independent noise."""
    rows = x.flatten(1)[:, None].expand(-1, 2, -1)
    return rows + 0.1 * torch.randn(rows.shape, generator=rng), y


def own_partner(scores: Tensor, _: Tensor) -> Tensor:
    """Return the contrastive loss: the two views of a row should be the most similar."""
    return F.cross_entropy(scores, torch.arange(len(scores)))


def contrastive(seed: int, sparse: bool) -> Task:
    split = images(seed)
    x_test, _ = two_views(split.x_test, split.y_test, torch.Generator().manual_seed(seed))
    return Task(Similarities(), split._replace(x_test=x_test), own_partner, two_views)


# --- images -------------------------------------------------------------------------------------------------------


class Segmenter(nn.Module):
    """A U-Net of two resolutions that classifies pixels as ink or background."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.fine, self.coarse = convolution(1, width), convolution(width, 2 * width)
        self.merge, self.read = convolution(3 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = F.interpolate(self.coarse(F.avg_pool2d(fine, 2)), scale_factor=2.0)
        logits: Tensor = self.read(self.merge(torch.cat([fine, coarse], 1)))
        return logits


def hide(x: Tensor, _: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images with noise, and masks of their ink."""
    return x + 0.4 * torch.randn(x.shape, generator=rng), (x > 0.5).float()


def segmentation(seed: int, sparse: bool) -> Task:
    split = images(seed)
    x_test, y_test = hide(split.x_test, split.y_test, torch.Generator().manual_seed(seed))
    split = split._replace(x_test=x_test, y_test=y_test)
    return Task(Segmenter(), split, F.binary_cross_entropy_with_logits, hide)


def depthwise(seed: int, sparse: bool) -> Task:
    def separable(inputs: int, outputs: int) -> list[nn.Module]:
        each = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs)
        return [each, nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU6()]

    enter, leave = nn.Conv2d(1, 16, 3, padding=1), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(enter, *separable(16, 32), nn.MaxPool2d(2), *separable(32, 64), *leave)
    return Task(model, images(seed), F.cross_entropy)


class Mixer(nn.Module):
    """An MLP-Mixer with four layers. Each mixes the rows of an image, then the features of each row."""

    def __init__(self, rows: int = 8, width: int = 48):
        super().__init__()

        def perceptron(size: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

        self.enter = nn.Linear(rows, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(9))
        self.across = nn.ModuleList(perceptron(rows) for _ in range(4))
        self.within = nn.ModuleList(perceptron(width) for _ in range(4))
        self.read = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.squeeze(1))
        for k, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            x = x + across(self.norms[2 * k](x).mT).mT
            x = x + within(self.norms[2 * k + 1](x))
        logits: Tensor = self.read(self.norms[-1](x).mean(1))
        return logits


def mixer(seed: int, sparse: bool) -> Task:
    return Task(Mixer(), images(seed), F.cross_entropy)


# --- sequences ----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A transformer with dropout that classifies sequences of words."""

    def __init__(self, words: int, length: int, width: int = 64):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.read = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.read(self.layers(self.embed(words) + self.place).mean(1))
        return logits


def encoder(seed: int, sparse: bool) -> Task:
    """Classify whether the first 20 of 50 words are more frequent in a sequence than the last 15."""
    words = torch.randint(50, (4000, 16), generator=torch.Generator().manual_seed(seed))
    answers = ((words < 20).sum(1) > (words >= 35).sum(1)).long()
    return Task(Encoder(50, 16), data.shuffled(words, answers, seed), F.cross_entropy)


class Adder(nn.Module):
    """A GRU that returns one number for a sequence."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.gru, self.read = nn.GRU(2, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.read(self.gru(x)[0][:, -1])
        return total.squeeze(1)


def adding(seed: int, sparse: bool) -> Task:
    """Learn the sum of the two marked numbers in a sequence of 30 (Hochreiter & Schmidhuber 1997)."""
    rng = torch.Generator().manual_seed(seed)
    numbers, marks = torch.rand(8000, 30, generator=rng), torch.zeros(8000, 30)
    marks.scatter_(1, torch.rand(8000, 30, generator=rng).topk(2, dim=1).indices, 1.0)
    split = data.shuffled(torch.stack([numbers, marks], 2), (numbers * marks).sum(1), seed)
    return Task(Adder(), split, F.mse_loss)


# --- regression ---------------------------------------------------------------------------------------------------


def waves(seed: int, sparse: bool) -> Task:
    """Fit a wave with a jump, without noise."""
    x = 6 * torch.rand(2500, 1, generator=torch.Generator().manual_seed(seed)) - 3
    split = data.shuffled(x, torch.sin(5 * x) + 0.3 * torch.sign(x), seed)
    return Task(networks.mlp(1, 128, 128, 128, 1), split, F.mse_loss)


def diabetes(seed: int, sparse: bool) -> Task:
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    split = data.standardized(data.shuffled(x, (y - y.mean()) / y.std(), seed))
    return Task(nn.Sequential(networks.mlp(10, 64, 64, 1), nn.Flatten(0)), split, F.smooth_l1_loss)


UNSEEN_WORKLOADS = (
    Workload("vae", "Digits, variational autoencoder", variational, 32, 30),
    Workload("contrastive", "Digits, contrastive", contrastive, 64, 40),
    Workload("segmentation", "Digits in noise, U-Net", segmentation, 32, 12),
    Workload("depthwise", "Digits, depthwise CNN, BatchNorm", depthwise, 32, 10),
    Workload("mixer", "Digits, MLP-Mixer", mixer, 32, 12),
    Workload("encoder", "Counting words, transformer, dropout", encoder, 32, 8),
    Workload("adding", "Adding marked numbers, GRU", adding, 32, 5),
    Workload("waves", "Waves, MLP", waves, 50, 40),
    Workload("diabetes", "Diabetes, MLP, robust loss", diabetes, 16, 20),
)
