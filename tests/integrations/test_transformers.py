"""`VSGDTrainer` equals a plain loop, with all features of Trainer."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict, deque
from functools import partial

import peft
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from vsgd.integrations.transformers import VSGDTrainer, VSGDTrainerMixin
from vsgd.torch import VSGD, is_probing

WORDS, LENGTH, ROWS = 17, 8, 48


class Sentences(Dataset):
    """Sentences that count in constant steps. BERT classifies whether the step is even."""

    def __init__(self, classify=False):
        generator = torch.Generator().manual_seed(0)
        start, stride = torch.randint(WORDS, (2, ROWS, 1), generator=generator)
        self.words = (start + stride * torch.arange(LENGTH)) % WORDS
        self.labels = (stride[:, 0] % 2) if classify else self.words

    def __len__(self):
        return ROWS

    def __getitem__(self, k):
        return {"input_ids": self.words[k], "labels": self.labels[k]}


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "n_positions": LENGTH,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def bert():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return BertForSequenceClassification(BertConfig(**sizes, hidden_dropout_prob=0.1, max_position_embeddings=LENGTH))


def arguments(path, **given):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    return TrainingArguments(
        output_dir=str(path), **{**quiet, "per_device_train_batch_size": 8, "max_steps": 14, "seed": 3, **given}
    )


class Evaluations:
    """Counts all evaluations: only plain attributes of the trainer are restored after a second one."""

    def __init__(self):
        self.count, self.first_losses = 0, []


class Recording(VSGDTrainer):
    """Record inputs and outputs of first evaluations, and count their samples."""

    def __init__(self, *args, **kwargs):
        self.batches, self.losses, self.samples = [], [], 0
        self.evaluations = Evaluations()
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        kept = {**inputs, "num_items_in_batch": num_items_in_batch}
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.evaluations.count += 1
        if not is_probing():
            self.batches.append(kept)
            self.losses.append(loss.item())
            self.samples += len(kept["labels"])
        return loss


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one, other, tolerance=0.0):
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=tolerance, atol=tolerance), name


def plain_loop(model, batches, micro_batches=1, max_norm=1.0, steps_per_epoch=None):
    """Train in a plain loop. Return the optimizer and the norms of the first gradients."""
    opt = VSGD(model.parameters(), steps_per_epoch=steps_per_epoch)
    model.train()
    norms = []

    def closure(batch):
        loss = model(**{**batch, "num_items_in_batch": batch["num_items_in_batch"] / micro_batches}).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm) if max_norm else None
        if not is_probing():
            norms.append(norm)
        return loss

    for start in range(0, len(batches), micro_batches):
        opt.step([partial(closure, batch) for batch in batches[start : start + micro_batches]])
    return opt, norms


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_run_equals_a_plain_loop(tmp_path, micro_batches):
    model = gpt2()
    twin = copy.deepcopy(model)
    args = arguments(tmp_path, gradient_accumulation_steps=micro_batches, per_device_train_batch_size=2)
    trainer = Recording(model=model, args=args, train_dataset=Sentences())
    trainer.train()
    assert len(trainer.batches) == 14 * micro_batches
    epoch = {1: None, 4: 6}[micro_batches]  # 14 steps of one micro-batch are less than an epoch, which has 24
    opt, norms = plain_loop(twin, trainer.batches, micro_batches, steps_per_epoch=epoch)
    assert_equal(weights(model), weights(twin), 1e-6)
    assert opt.param_groups[0]["samples"] == trainer.vsgd.param_groups[0]["samples"] == micro_batches
    if micro_batches == 1:
        assert logged(trainer, "grad_norm") == pytest.approx([norm.item() for norm in norms], rel=1e-5)


def test_what_is_logged_is_of_the_first_evaluations(tmp_path):
    trainer = Recording(model=bert(), args=arguments(tmp_path), train_dataset=Sentences(classify=True))
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(trainer.losses, rel=1e-3)  # Trainer rounds logged values
    assert trainer.samples == 14 * 8
    assert trainer.evaluations.count > 14, "some evaluations were at probed parameters"


class CountingTrainer(Trainer):
    """Collects metrics in `compute_loss` as TRL's trainers do, and averages them when it logs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0
        self._recent = deque(maxlen=4)
        self._total_loss = torch.zeros(())
        self.evaluations = Evaluations()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.evaluations.count += 1
        if not is_probing():
            self.evaluations.first_losses.append(loss.item())
        tokens = inputs["input_ids"].numel()
        self._total_train_tokens += tokens
        self.state.num_input_tokens_seen += tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        self._metrics["train"]["batch_loss"].append(loss.item())
        self._recent.append(loss.item())
        self._total_loss += loss.detach()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        means = {name: sum(values) / len(values) for name, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        super().log({**logs, **means}, start_time)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_counters_of_a_trainer_see_the_first_evaluations_only(tmp_path, micro_batches):
    class Mixed(VSGDTrainerMixin, CountingTrainer):
        pass

    args = arguments(tmp_path, gradient_accumulation_steps=micro_batches)
    trainer = Mixed(model=bert(), args=args, train_dataset=Sentences(classify=True))
    trainer.train()
    tokens = 8 * LENGTH * micro_batches
    assert trainer.evaluations.count > 14 * micro_batches, "some evaluations were at probed parameters"
    assert trainer.state.num_input_tokens_seen == trainer._total_train_tokens == 14 * tokens
    assert logged(trainer, "num_tokens") == [tokens * (k + 1) for k in range(14)]
    losses = trainer.evaluations.first_losses
    means = [sum(losses[k : k + micro_batches]) / micro_batches for k in range(0, len(losses), micro_batches)]
    assert logged(trainer, "batch_loss") == pytest.approx(means)
    assert list(trainer._recent) == losses[-4:]
    assert trainer._total_loss.item() == pytest.approx(sum(losses), rel=1e-5)


def test_settings_of_other_optimizers_are_named_in_one_warning(tmp_path):
    args = arguments(tmp_path, optim="adafactor", learning_rate=3e-4, adam_beta2=0.98, max_steps=1)
    with pytest.warns(UserWarning, match="ignored") as found:
        trainer = VSGDTrainer(model=bert(), args=args, train_dataset=Sentences(classify=True))
    (message,) = [str(each.message) for each in found if "VSGDTrainer" in str(each.message)]
    assert message.startswith(
        "ignored in TrainingArguments: learning_rate=0.0003, optim='adafactor', adam_beta2=0.98. "
        "VSGDTrainer trains with VSGD"
    )
    trainer.train()
    assert trainer.vsgd.param_groups[0]["lr"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VSGDTrainer(model=bert(), args=arguments(tmp_path), train_dataset=Sentences(classify=True))


def test_the_log_has_a_factor_and_no_learning_rate(tmp_path):
    trainer = VSGDTrainer(
        model=bert(), args=arguments(tmp_path, warmup_steps=4), train_dataset=Sentences(classify=True)
    )
    trainer.train()
    assert logged(trainer, "lr_factor") == [0.0, 0.25, 0.5, 0.75] + [1.0] * 10
    assert not logged(trainer, "learning_rate")


def test_weight_decay_applies_to_the_parameters_that_trainer_decays(tmp_path):
    given = {"model": bert(), "args": arguments(tmp_path, weight_decay=0.01), "train_dataset": Sentences(True)}
    ours = VSGDTrainer(**given).create_optimizer()
    theirs = Trainer(**given).create_optimizer()
    for group, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert group["weight_decay"] == expected["weight_decay"]
        assert [id(p) for p in group["params"]] == [id(p) for p in expected["params"]]
    names = dict(given["model"].named_parameters())
    assert all(names[n] is p for g in ours.param_groups for n, p in zip(g["param_names"], g["params"], strict=True))


class Stream(IterableDataset):
    """The same rows in a data set without a length."""

    def __iter__(self):
        return iter([Sentences()[k] for k in range(ROWS)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_train_epochs": 2}, 6),
        ({"num_train_epochs": 1.5, "gradient_accumulation_steps": 4}, 2),
        ({"max_steps": 7}, 6),
        ({"max_steps": 6}, None),
        ({"num_train_epochs": 1}, None),
        ({"max_steps": 7, "train_dataset": Stream()}, None),
        ({"max_steps": 7, "weight_decay": 0.01}, None),
        ({"max_steps": 7, "optimizer_cls_and_kwargs": (VSGD, {"steps_per_epoch": None})}, None),
        ({"max_steps": 7, "optimizer_cls_and_kwargs": (VSGD, {"steps_per_epoch": 3})}, 3),
    ],
)
def test_steps_per_epoch_are_known_if_data_are_repeated(tmp_path, given, expected):
    options = {name: given[name] for name in ("train_dataset", "optimizer_cls_and_kwargs") if name in given}
    args = arguments(tmp_path, **{"max_steps": -1, **{name: given[name] for name in given if name not in options}})
    trainer = VSGDTrainer(model=gpt2(), args=args, **{"train_dataset": Sentences(), **options})
    trainer.train()
    assert {group["steps_per_epoch"] for group in trainer.vsgd.param_groups} == {expected}


def test_weights_decay_by_the_estimate(tmp_path):
    trainer = VSGDTrainer(model=gpt2(), args=arguments(tmp_path, max_steps=40), train_dataset=Sentences())
    trainer.train()
    assert any(tensor.weight_decay > 0 for tensor in trainer.vsgd.info().tensors)


def test_optimizer_of_the_user_keeps_its_settings(tmp_path):
    model = gpt2()
    optimizers = (VSGD(model.parameters()), None)
    trainer = VSGDTrainer(model=model, args=arguments(tmp_path), train_dataset=Sentences(), optimizers=optimizers)
    trainer.train()
    assert trainer.vsgd.param_groups[0]["steps_per_epoch"] is None


def test_the_norm_that_is_logged_is_of_the_mean_over_micro_batches(tmp_path):
    model = gpt2()
    twin = copy.deepcopy(model)
    given = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 1, "max_grad_norm": 0.01}
    trainer = Recording(model=model, args=arguments(tmp_path, **given), train_dataset=Sentences())
    trainer.train()
    rows = {name: torch.cat([batch[name] for batch in trainer.batches]) for name in ("input_ids", "labels")}
    loss = twin(**rows, num_items_in_batch=trainer.batches[0]["num_items_in_batch"]).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in twin.parameters()]).norm()
    assert logged(trainer, "grad_norm") == pytest.approx([norm.item()], rel=1e-4)
    assert logged(trainer, "loss") == pytest.approx([loss.item()], rel=1e-3)


@pytest.mark.parametrize(
    "given",
    [
        {"bf16": True},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"max_grad_norm": 0.0, "weight_decay": 1e-3},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_options_of_trainer(tmp_path, given):
    model = gpt2(dropout=0.1)
    trainer = VSGDTrainer(model=model, args=arguments(tmp_path, max_steps=30, **given), train_dataset=Sentences())
    trainer.train()
    losses = logged(trainer, "loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert trainer.vsgd.info().skipped == 0
    rates = logged(trainer, "lr_factor")
    assert (rates[-1] < 0.01) if "lr_scheduler_type" in given else (set(rates) == {1.0})


class Comparisons(Dataset):
    """Random words. The label is whether the first has a higher index than the last."""

    def __init__(self, rows, seed):
        self.words = torch.randint(20, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.labels = (self.words[:, 0] > self.words[:, -1]).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, k):
        return {"input_ids": self.words[k], "labels": self.labels[k]}


@pytest.mark.slow
def test_usual_weight_decay_costs_little_accuracy(tmp_path):
    def accuracy(weight_decay):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=LENGTH, **sizes))
        given = {"max_steps": 500, "per_device_train_batch_size": 32, "logging_steps": 100, "seed": 42}
        trainer = VSGDTrainer(
            model=model,
            args=arguments(tmp_path, weight_decay=weight_decay, **given),
            train_dataset=Comparisons(2000, seed=0),
            eval_dataset=Comparisons(1000, seed=1),
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        )
        trainer.train()
        return trainer.evaluate()["eval_accuracy"]

    without, decayed = accuracy(0.0), accuracy(0.01)
    assert without > 0.95
    assert decayed > without - 0.02


def test_a_loss_of_ones_own(tmp_path):
    class Own(VSGDTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    trainer = Own(model=bert(), args=arguments(tmp_path, max_steps=20), train_dataset=Sentences(classify=True))
    trainer.train()
    losses = logged(trainer, "loss")
    assert sum(losses[-5:]) < sum(losses[:5])


def test_resumes_to_the_bit(tmp_path):
    def trained(path, **given):
        args = arguments(path, max_steps=42, save_strategy="steps", save_steps=21, gradient_accumulation_steps=2)
        trainer = VSGDTrainer(model=gpt2(dropout=0.1), args=args, train_dataset=Sentences())
        trainer.train(**given)
        return trainer

    through = trained(tmp_path)
    again = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-21"))
    assert again.state.global_step == 42
    assert through.vsgd.param_groups[0]["steps_per_epoch"] == again.vsgd.param_groups[0]["steps_per_epoch"] == 3
    assert_equal(weights(through.model), weights(again.model))
    assert logged(through, "loss")[-21:] == logged(again, "loss")[-21:]
    assert any(tensor.weight_decay > 0 for tensor in again.vsgd.info().tensors)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-42")
    assert_equal(weights(through.model), weights(saved))
    with through.vsgd.iterates():
        iterates = weights(through.model)
    assert any(not torch.equal(value, iterates[name]) for name, value in weights(saved).items()), "averages are saved"


def test_evaluates_and_loads_the_best(tmp_path):
    given = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "steps",
        "save_steps": 5,
        "load_best_model_at_end": True,
    }
    trainer = VSGDTrainer(
        model=gpt2(), args=arguments(tmp_path, **given), train_dataset=Sentences(), eval_dataset=Sentences()
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(logged(trainer, "eval_loss")))
    trainer.train()  # continue with the same optimizer
    assert trainer.vsgd.param_groups[0]["steps"] == 28


def test_lora_trains_its_own_parameters_only(tmp_path):
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    before = weights(model)
    trainer = VSGDTrainer(model=model, args=arguments(tmp_path, max_steps=20), train_dataset=Sentences())
    trainer.train()
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert len(trainer.vsgd.state) == sum(p.requires_grad for p in model.parameters())
    losses = logged(trainer, "loss")
    assert sum(losses[-5:]) < sum(losses[:5])


def test_options_of_the_optimizer(tmp_path):
    model = gpt2()
    args = arguments(tmp_path, max_steps=2)
    kwargs = (VSGD, {"compact": True})
    trainer = VSGDTrainer(model=model, args=args, train_dataset=Sentences(), optimizer_cls_and_kwargs=kwargs)
    trainer.train()
    assert any(v.dtype == torch.bfloat16 for state in trainer.vsgd.state.values() for v in state.values())
    opt = VSGD(model.parameters())
    trainer = VSGDTrainer(model=model, args=args, train_dataset=Sentences(), optimizers=(opt, None))
    trainer.train()
    assert trainer.vsgd is opt
    assert opt.param_groups[0]["steps"] == 2


def test_a_trainer_of_ones_own(tmp_path):
    class Own(Trainer):
        pass

    class OwnVSGD(VSGDTrainerMixin, Own):
        pass

    trainer = OwnVSGD(model=gpt2(), args=arguments(tmp_path, max_steps=3), train_dataset=Sentences())
    trainer.train()
    assert trainer.vsgd.param_groups[0]["steps"] == 3


def test_what_is_refused(tmp_path):
    model, data = gpt2(), Sentences()
    plain = Trainer(model, arguments(tmp_path), train_dataset=data, optimizers=(VSGD(model.parameters()), None))
    with pytest.raises(TypeError, match=r"vsgd\.integrations\.transformers\.VSGDTrainer"):
        plain.train()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match="VSGDTrainer trains with VSGD; its optimizer is Adam"):
        VSGDTrainer(model, arguments(tmp_path), train_dataset=data, optimizers=(adam, None)).train()
    args = arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(ValueError, match="bf16=True"):
        VSGDTrainer(model, args, train_dataset=data)
