"""Lightning with `VSGDMixin`: first evaluations are logged and counted, and batches accumulate as micro-batches."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial

import lightning.pytorch as lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection

from vsgd import NETWORKS
from vsgd.integrations.lightning import VSGDMixin
from vsgd.torch import VSGD, is_probing

ROWS, BATCH = 160, 8


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


class Evaluations:
    """Counts all evaluations: only plain attributes of the module are restored after a second one."""

    count = 0


class Module(VSGDMixin, lightning.LightningModule):
    def __init__(self, skipped=(), dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
        self.mean = MeanMetric()
        self.metrics = MetricCollection({"mean": MeanMetric()})
        self.skipped = skipped
        self.losses, self.samples, self.calls = [], 0, 0
        self.evaluations = Evaluations()

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.evaluations.count += 1
        if batch_idx in self.skipped:
            return None
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        if not is_probing():
            self.losses.append(loss.item())
            self.samples += len(x)
        self.mean(loss.detach())
        self.metrics["mean"].update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return VSGD(self.parameters())


class Watch(lightning.Callback):
    def __init__(self):
        self.logged, self.outputs, self.before_steps = [], [], 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.outputs.append(outputs["loss"].item() if outputs else None)
        if outputs:
            self.logged.append(trainer.callback_metrics["loss_step"].item())

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.before_steps += 1


def fit(module, path, dataset=None, callbacks=(), checkpoint=None, watched=True, **given):
    torch.manual_seed(1)
    watch = Watch()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        **{"max_epochs": 1, "enable_checkpointing": False, **quiet, **given},
        callbacks=[*callbacks, *([watch] if watched else [])],
        default_root_dir=path,
    )
    trainer.fit(module, DataLoader(dataset or data(), BATCH), ckpt_path=checkpoint)
    return trainer, watch


def plain_loop(module, micro_batches=1, max_norm=None):
    opt = VSGD(module.parameters())
    torch.manual_seed(1)

    def closure(x, y):
        loss = F.cross_entropy(module.layers(x.to(module.layers[0].weight)), y)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return loss

    batches = list(DataLoader(data(), BATCH))
    for start in range(0, len(batches), micro_batches):
        opt.step([partial(closure, *batch) for batch in batches[start : start + micro_batches]])
    return opt


def assert_equal(module, other, tolerance=0.0):
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=tolerance, atol=tolerance)


def test_everything_sees_the_first_evaluation_only(tmp_path):
    module = Module(dropout=0.3)
    trainer, watch = fit(module, tmp_path)
    batches = ROWS // BATCH
    assert module.evaluations.count > batches, "some evaluations were at probed parameters"
    assert module.samples == ROWS
    assert watch.logged == pytest.approx(module.losses)
    assert watch.outputs == pytest.approx(module.losses)
    assert watch.before_steps == trainer.global_step == batches
    mean = sum(module.losses) / batches
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(mean)
    assert trainer.callback_metrics["mean"].item() == pytest.approx(mean)
    assert module.metrics["mean"].compute().item() == pytest.approx(mean)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("micro_batches", [1, 4, 3])
def test_a_run_equals_a_plain_loop(tmp_path, micro_batches, max_norm, dropout):
    """The last step of 20 batches has two micro-batches instead of three. Lightning divides by three, which rounds."""
    module = Module(dropout=dropout)
    twin = copy.deepcopy(module).to(torch.float64 if micro_batches == 3 else torch.float32)
    given = {"accumulate_grad_batches": micro_batches, "precision": "64-true" if micro_batches == 3 else "32-true"}
    trainer, watch = fit(module, tmp_path, gradient_clip_val=max_norm, **given)
    opt = plain_loop(twin, micro_batches, max_norm)
    assert_equal(module, twin, 1e-6)
    assert trainer.global_step == opt.param_groups[0]["steps"] == -(-ROWS // BATCH // micro_batches)
    assert watch.logged == pytest.approx(module.losses)
    assert module.samples == ROWS


@pytest.mark.parametrize(
    ("algorithm", "moves"),
    [(NETWORKS, 30), (NETWORKS._replace(average_iterates=False), 60)],
    ids=["averaged", "not averaged"],
)
def test_running_statistics_are_those_of_the_averaged_weights(tmp_path, algorithm, moves):
    """Only the last batch of each step changes them, since the optimizer evaluates only this one."""

    class Chosen(Normalized):
        def configure_optimizers(self):
            return VSGD(self.parameters(), algorithm=algorithm)

    module = Chosen()
    trainer, _ = fit(module, tmp_path, max_epochs=3, accumulate_grad_batches=2)
    assert trainer.global_step == 30
    assert module.layers[1].num_batches_tracked == moves


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_batch_without_a_loss_is_left_out(tmp_path, micro_batches):
    module = Module(skipped=(2, 7, 12, 13, 14, 15))
    trainer, watch = fit(module, tmp_path, accumulate_grad_batches=micro_batches)
    assert [k for k, loss in enumerate(watch.outputs) if loss is None] == [2, 7, 12, 13, 14, 15]
    assert trainer.optimizers[0].param_groups[0]["steps"] == (14 if micro_batches == 1 else 4)
    assert module.samples == ROWS - 6 * BATCH


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision(tmp_path, precision):
    module = Module()
    fit(module, tmp_path, precision=precision, max_epochs=5, accumulate_grad_batches=2)
    assert sum(module.losses[-20:]) < 0.8 * sum(module.losses[:20])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_scaler_changes_nothing(tmp_path, micro_batches):
    """float16 with a scaler, as `precision="16-mixed"` does on a GPU."""

    class Scaled(MixedPrecision):
        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)  # only the scale differs

    given = {"accumulate_grad_batches": micro_batches, "gradient_clip_val": 0.1}
    module, scaled = Module(), Module()
    fit(module, tmp_path, **given)
    plugin = Scaled("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    fit(scaled, tmp_path, plugins=[plugin], **given)
    assert_equal(module, scaled, 1e-6)


class SaveAfterFirstEpoch(lightning.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_resumes_to_the_bit(tmp_path):
    through, resumed = Module(), Module()
    given = {"max_epochs": 4, "accumulate_grad_batches": 2}  # weights decay from step 30 of 40
    fit(through, tmp_path, callbacks=[SaveAfterFirstEpoch(tmp_path / "half.ckpt")], **given)
    trainer, _ = fit(resumed, tmp_path, checkpoint=tmp_path / "half.ckpt", **given)
    assert_equal(through, resumed)
    assert resumed.losses == through.losses[20:]
    assert steps_per_epoch(trainer) == [10]


def test_a_run_of_one_epoch_resumes_to_the_bit(tmp_path):
    """Weight decay is not estimated in the second epoch, in which it would begin."""

    class Plain(Module):
        estimates_weight_decay = False

    through, again, resumed = Plain(), Plain(), Plain()
    fit(through, tmp_path, max_epochs=2, accumulate_grad_batches=2)
    trainer, _ = fit(again, tmp_path, accumulate_grad_batches=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, tmp_path, checkpoint=tmp_path / "half.ckpt", max_epochs=2, accumulate_grad_batches=2)
    assert_equal(through, resumed)
    assert resumed.losses == through.losses[20:]


def steps_per_epoch(trainer):
    return [group["steps_per_epoch"] for group in trainer.optimizers[0].param_groups]


class Stream(IterableDataset):
    """The same rows in a data set without a length."""

    def __iter__(self):
        return iter(data())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_epochs": 2}, 20),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 5),
        ({"max_epochs": 2, "accumulate_grad_batches": 50}, 1),
        ({"max_epochs": -1, "max_steps": 21}, 20),
        ({"max_epochs": -1, "max_steps": 20}, None),
        ({"max_epochs": 1}, None),
        ({"max_epochs": 2, "dataset": Stream()}, None),
        ({"max_epochs": 2, "limit_train_batches": 4}, None),
        ({"max_epochs": 2, "limit_train_batches": 1}, None),
    ],
)
def test_steps_per_epoch_are_known_if_data_are_repeated(tmp_path, given, expected):
    trainer, _ = fit(Module(), tmp_path, **given)
    assert steps_per_epoch(trainer) == [expected]


def test_estimated_decay_equals_that_of_a_plain_loop(tmp_path):
    module, twin = Module(), Module()
    fit(module, tmp_path, max_epochs=2)
    opt = VSGD(twin.parameters(), steps_per_epoch=ROWS / BATCH)
    for _ in range(2):
        for x, y in DataLoader(data(), BATCH):
            opt.minimize(lambda x=x, y=y: F.cross_entropy(twin.layers(x), y))
    assert_equal(module, twin)
    assert any(tensor.weight_decay > 0 for tensor in opt.info().tensors)


@pytest.mark.parametrize("settings", [{"steps_per_epoch": 3}, {"weight_decay": 0.1}], ids=str)
def test_settings_of_the_user_are_not_changed(tmp_path, settings):
    class Chosen(Module):
        def configure_optimizers(self):
            return VSGD([{"params": self.layers[0].parameters(), **settings}, {"params": self.layers[3].parameters()}])

    trainer, _ = fit(Chosen(), tmp_path, max_epochs=2)
    assert steps_per_epoch(trainer) == [settings.get("steps_per_epoch"), None]


class Normalized(Module):
    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(16))


@pytest.mark.parametrize(("rows", "micro_batches"), [(ROWS, 1), (ROWS, 2), (BATCH, 1)])
def test_weight_averaging_updates_batch_norm_in_a_pass_without_backward(tmp_path, rows, micro_batches):
    """Lightning adds an epoch without backward, to compute the statistics of BatchNorm at the averaged weights."""
    averages = []

    class Recording(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            averages[:] = [copy.deepcopy(module.layers)]

    module = Normalized()
    callbacks = [StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=2), Recording()]
    dataset = Subset(data(), range(rows))
    trainer, _ = fit(module, tmp_path, dataset, callbacks, max_epochs=4, accumulate_grad_batches=micro_batches)
    batches = rows // BATCH
    opt = trainer.optimizers[0]
    assert opt.param_groups[0]["steps"] == 4 * batches // micro_batches
    assert module.samples == 5 * rows, "each batch is evaluated once in the last epoch"
    assert_equal(module.layers, averages[0])
    norm = module.layers[1]
    assert norm.num_batches_tracked == batches
    inputs = [module.layers[0](x).detach() for x, _ in DataLoader(dataset, BATCH)]
    torch.testing.assert_close(norm.running_mean, torch.stack([each.mean(0) for each in inputs]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([each.var(0) for each in inputs]).mean(0))


def test_weight_averaging_without_the_mixin_names_it(tmp_path):
    class Plain(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return VSGD(self.parameters())

    averaging = StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=1)
    with pytest.raises(RuntimeError, match=r"left no gradient(.|\n)*vsgd\.integrations\.lightning\.VSGDMixin"):
        fit(Plain(), tmp_path, callbacks=[averaging], watched=False, max_epochs=2)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_attributes_of_the_module_see_the_first_evaluation_only(tmp_path, micro_batches):
    class Counting(Module):
        def __init__(self):
            super().__init__()
            self.outputs, self.rows = [], {"train": defaultdict(int)}

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.outputs.append(loss.detach())
            self.rows["train"]["seen"] += len(batch[0])
            return loss

    module = Counting()
    fit(module, tmp_path, accumulate_grad_batches=micro_batches)
    assert module.evaluations.count > ROWS // BATCH, "some evaluations were at probed parameters"
    assert module.calls == ROWS // BATCH
    assert [float(loss) for loss in module.outputs] == pytest.approx(module.losses)
    assert module.rows == {"train": {"seen": ROWS}}


def test_validation_between_micro_batches_sees_the_averaged_weights(tmp_path):
    seen = []

    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            seen.append(self.layers[0].weight.detach().clone())

        def on_train_batch_start(self, batch, batch_idx):
            self.between = self.layers[0].weight.detach().clone()

    module = Validated()
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=4, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(), BATCH), DataLoader(data(), BATCH))
    assert torch.equal(seen[-1], module.layers[0].weight)
    assert not torch.equal(seen[-2], module.between), "in the middle of a step, training is at the iterates"
    assert torch.equal(seen[-2], seen[-3]), "no step between these two"


def test_other_optimizers_are_left_alone(tmp_path):
    class Other(Module):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = Other()
    trainer, _ = fit(module, tmp_path, accumulate_grad_batches=2)
    assert trainer.global_step == 10
    assert module.evaluations.count == 20


def test_manual_optimization_with_a_closure(tmp_path):
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            def closure():
                loss = Module.training_step(self, batch, batch_idx)
                self.manual_backward(loss)
                return loss

            return self.optimizers().step(closure)

    module, twin = Manual(), Module()
    fit(module, tmp_path)
    fit(twin, tmp_path)
    assert_equal(module, twin)
    assert module.losses == twin.losses


@pytest.mark.parametrize(("accumulate", "error"), [(4, RuntimeError), (1, TypeError)])
def test_without_the_mixin_the_error_names_it(tmp_path, accumulate, error):
    class Plain(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def training_step(self, batch, batch_idx):
            if accumulate == 1:
                return None
            loss = F.cross_entropy(self.layer(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return VSGD(self.parameters())

    with pytest.raises(error, match=r"vsgd\.integrations\.lightning\.VSGDMixin"):
        fit(Plain(), tmp_path, accumulate_grad_batches=accumulate)
