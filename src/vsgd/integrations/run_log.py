"""Monitor a training run with a log for `vsgd watch`, or with a progress bar.

    from vsgd.integrations.run_log import RunLog, progress

    opt = VSGD(model.named_parameters())
    RunLog(opt, "run.jsonl")        # in another terminal: vsgd watch run.jsonl

    for x, y in progress(loader, opt):
        opt.minimize(lambda: F.cross_entropy(model(x), y))

Both use hooks of the optimizer, so they work in any loop and in any trainer. They read `opt.info()` and the losses of
closures, and do not affect training.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vsgd.errors import needs_extra
from vsgd.integrations.alarms import alarms
from vsgd.integrations.run_file import HEADER, Record, TensorRecord, is_run, to_line

with needs_extra("vsgd.integrations.run_log", "torch"):
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from vsgd.torch import VSGD, is_probing
    from vsgd.torch.devices import read_numbers
    from vsgd.torch.diagnostics import step_number

Item = TypeVar("Item")

MAX_RECORDS = 200
"""Number of records that the alarms of a progress bar use."""


class StepMeter:
    """Collect the losses and evaluations of an optimizer's steps, and call `due` at every multiple of `every` steps.

    Steps are counted by the optimizer, so a resumed run has records at the same steps as an uninterrupted one.
    """

    def __init__(self, opt: VSGD, every: int, due: Callable[[Record], None]):
        if every < 1:
            raise ValueError(f"every is {every}, it must be at least 1")
        self._opt, self._every, self._due = opt, every, due
        self._forget()
        self._handles = [opt.register_step_pre_hook(self._before), opt.register_step_post_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _forget(self) -> None:
        self._losses: list[Tensor] = []
        self._steps, self._evaluations = 0, 0.0

    def _before(self, opt: VSGD, args: Any, kwargs: Any) -> Any:
        """Replace the closures of a step by closures that are counted."""
        if len(args) > 1:
            return (args[0], self._counted(args[1]), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._counted(kwargs.get("closure"))}

    def _counted(self, closure: Any) -> Any:
        if isinstance(closure, Sequence):
            return [self._count(each, len(closure)) for each in closure]
        return self._count(closure, 1)

    def _count(self, closure: Any, micro_batches: int) -> Any:
        if not callable(closure):  # the optimizer raises an error
            return closure

        def counted() -> Any:
            loss = closure()
            self._evaluations += 1 / micro_batches
            if isinstance(loss, Tensor) and not is_probing():
                self._losses.append(loss.detach())
            return loss

        return counted

    def _after(self, opt: VSGD, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if step_number(opt.param_groups) % self._every == 0:
            self._due(self._record())
            self._forget()

    def _record(self) -> Record:
        info = self._opt.info()
        losses = torch.tensor(
            read_numbers([loss.flatten()[0] for loss in self._losses]), dtype=torch.float64, device="cpu"
        )
        finite = losses[losses.isfinite()]
        return Record(
            step=self._opt.param_groups[0]["steps"],
            time=time.time(),
            steps=self._steps,
            loss=float(finite.mean()) if len(finite) else math.nan,
            gradients=self._evaluations / self._steps,
            skipped=info.skipped,
            batch=info.batch_worth_using if info.samples_per_step > 1 else math.nan,
            tensors=tuple(
                TensorRecord(t.name, t.basis, *t.rate, t.memory.median, t.signal_to_noise.median, t.outliers)
                for t in info.tensors
            ),
        )


class RunLog:
    """Write a log of a training run for `vsgd watch`.

        RunLog(opt, "run.jsonl")    # in another terminal: vsgd watch run.jsonl

    In distributed training, only the first process writes. If writing fails later, a warning is issued, and training
    continues.

    Args:
        opt: the optimizer. `VSGD(model.named_parameters())` sets the names of tensors.
        path: the file. If it already contains a log, new lines are appended.
        every: steps between lines. A line takes about as long as `opt.info()`.

    Raises:
        ValueError: if the file exists and is not a log, or if `every` is below 1.
        OSError: if the file cannot be created.
    """

    def __init__(self, opt: VSGD, path: str | Path, every: int = 20):
        self._path = Path(path)
        self._before: Record | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            return
        self._begin()
        self._meter = StepMeter(opt, every, self._write)

    def _begin(self) -> None:
        start = HEADER
        if self._path.exists() and self._path.stat().st_size:
            if not is_run(self._path):
                raise ValueError(f"{self._path} exists and is not the log of a run; choose another name")
            start = "\n" + start  # the last line may have been cut
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._append(start)

    def _append(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write(self, record: Record) -> None:
        try:
            self._append(to_line(record, self._before))
        except OSError as error:
            warnings.warn(f"the log {self._path} ends here: {error.strerror}", stacklevel=2)
            self._meter.close()
        self._before = record


def in_one_line(record: Record, messages: list[str]) -> str:
    """Return the text of a progress bar: a record, and the first of the alarms."""
    words = [] if math.isnan(record.loss) else [f"loss {record.loss:.4g}"]
    if record.tensors:
        rates = sorted(tensor.rate for tensor in record.tensors)
        noises = sorted(tensor.signal_to_noise for tensor in record.tensors)
        words += [f"rate {rates[len(rates) // 2]:.2g}", f"signal/noise {noises[len(noises) // 2]:.2g}"]
    else:
        words.append("starting")
    words.append(f"{record.gradients:.2f} gradients/step")
    if not math.isnan(record.batch):
        words.append(f"batch worth using ×{record.batch:.2g}")
    return ", ".join(words) + "".join(f" ! {alarm}" for alarm in messages[:1])


def progress(loader: Iterable[Item], opt: VSGD, every: int = 20, **options: Any) -> Iterator[Item]:
    """Iterate with a `tqdm` progress bar that shows loss, median learning rate, signal-to-noise ratio, and an alarm.

        for x, y in progress(loader, opt):
            opt.minimize(lambda: F.cross_entropy(model(x), y))

    Args:
        loader: an iterable, usually a `DataLoader`.
        opt: the optimizer that takes a step for each item.
        every: number of steps between updates of the text.
        options: arguments of `tqdm`, such as `desc="epoch 1"`.

    Yields:
        The items of `loader`.

    Raises:
        ModuleNotFoundError: if tqdm is not installed.
        ValueError: if `every` is below 1.
    """
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the progress bar needs tqdm: pip install tqdm") from None
    records: list[Record] = []
    with tqdm(loader, **options) as bar:

        def show(record: Record) -> None:
            records.append(record)
            del records[:-MAX_RECORDS]
            bar.set_postfix_str(in_one_line(record, alarms(records)), refresh=False)

        meter = StepMeter(opt, every, show)
        try:
            yield from bar
        finally:
            meter.close()
