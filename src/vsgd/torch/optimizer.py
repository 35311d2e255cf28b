"""`VSGD`, a `torch.optim.Optimizer` with no learning rate to choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsgd.options import NETWORKS, Options
from vsgd.reweight import effective_count, sample_weights
from vsgd.torch.averaging import Mark, iterates_in_place
from vsgd.torch.checks import Closure, check_loss, check_parameters, checked_closures
from vsgd.torch.diagnostics import Diagnosis, diagnose
from vsgd.torch.evidence import (
    Grad,
    Observed,
    along,
    as_rows,
    expected_squared_lengths,
    of_minibatches,
    of_samples,
    squared_lengths,
)
from vsgd.torch.moving import Place, new_scratch, options_of, put_back, shift_group, update_group
from vsgd.torch.replay import Replay, living_normalisations
from vsgd.torch.samples import Recorder
from vsgd.torch.window import by_rows, precision

PATIENCE = 10
"""Steps in a row that may be skipped because something was not finite."""


class NotFinite(Exception):
    """A loss or gradient was infinite or NaN."""

    def __init__(self, loss: Tensor):
        self.loss = loss


class Evaluation(NamedTuple):
    """What one call of a closure gave."""

    loss: Tensor
    grads: dict[Tensor, Grad]
    squared_lengths: dict[Tensor, float]
    recording: Any


class VSGD(Optimizer):
    """Stochastic gradient descent whose rates set themselves, one for each coordinate (Schaul & LeCun 2013).

    Args:
        params: parameters or groups of them, as for any optimizer: the minibatch is then the sample. Or a model: every
            row of the minibatch is then a sample, as in the paper.
        lr: a factor on the rates, for those who want a schedule or groups that learn more slowly. Not needed.
        weight_decay: pulls parameters towards zero with the rate of each; not part of the statistics.
        options: constants of the rule; `vsgd.NETWORKS` unless told. `vsgd.PAPER` is the published pseudocode.
        curvature_every: take the second gradient in every so many steps, and where the first is unusually long.
            4 unless told; 1, which is always, with `vsgd.PAPER`.
        maximize: climb instead of descend.
        reduction: with a model, whether its loss is the "mean" or the "sum" over the rows.
        reweight: with a model, weigh each row by one over the number of others whose gradients interfere with its own
            (section 4.1 of the paper). Worth its cost for small minibatches of dissimilar rows.

    `step(closure)` calls the closure once or twice, the second time with shifted parameters, the same random numbers
    and running statistics left as they were. Gradients are cleared before each call. Afterwards the parameters are the
    weights to evaluate and save; there is no mode to switch.
    """

    _normalisations: Iterable[Any] | None

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1.0,
        weight_decay: float = 0.0,
        *,
        options: Options = NETWORKS,
        curvature_every: int | None = None,
        maximize: bool = False,
        reduction: Literal["mean", "sum"] = "mean",
        reweight: bool = False,
    ):
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}, it must be 'mean' or 'sum'")
        self._recorder = Recorder(params) if isinstance(params, nn.Module) else None
        if reweight and self._recorder is None:
            raise ValueError(
                "reweight=True weighs the rows of the minibatch, so give the model: VSGD(model, reweight=True)"
            )
        self._reduction = reduction
        self._reweight = reweight
        self._forget()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "options": options,
            "curvature_every": curvature_every,
            "maximize": maximize,
            "steps": 0,
            "skipped": 0,
            "skipped_in_a_row": 0,
            "samples": 1.0,
        }
        super().__init__(params.named_parameters() if isinstance(params, nn.Module) else params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        if group["curvature_every"] is None:
            group["curvature_every"] = int(options_of(group).curvature_every)
        for name, least in (("lr", 0), ("weight_decay", 0), ("curvature_every", 1)):
            if not group[name] >= least:
                raise ValueError(f"{name} is {group[name]}, it must be at least {least}")
        # a plain dict, so that checkpoints hold nothing but numbers and tensors
        group["options"] = options_of(group)._asdict()
        if self.param_groups:
            group["steps"] = self.param_groups[0]["steps"]
        super().add_param_group(group)
        self._normalisations = None  # there may be new layers
        try:
            check_parameters(self._parameters())
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _forget(self) -> None:
        """Drop what is not worth saving."""
        self._marks: dict[Tensor, Mark] = {}
        self._scratch = new_scratch()
        self._normalisations = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_recorder", "_reduction", "_reweight")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    # --- a step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure] | None = None, *, scaler: Any = None) -> Any:
        """Evaluate the closure, learn from it, and move the parameters.

        Args:
            closure: clears gradients, computes the loss, calls backward and returns the loss. A list of closures is a
                list of micro-batches: each is a sample, and the step goes along their mean gradient.
            scaler: the `torch.amp.GradScaler` by which the closure multiplies its loss before it calls backward. The
                optimizer unscales; call `scaler.update()` afterwards as usual.

        Returns:
            The loss as it was before the step; with micro-batches, their mean.
        """
        closures = checked_closures(closure)
        with iterates_in_place(self.state, self._marks):
            return self._step(closures, scaler)

    def _step(self, closures: list[Closure], scaler: Any) -> Any:
        if self._recorder is not None and len(closures) > 1:
            raise TypeError("VSGD(model) takes every row as a sample; for micro-batches use VSGD(model.parameters())")
        if self._normalisations is None:
            self._normalisations = living_normalisations()
        replays = [Replay(self._devices(), self._normalisations) for _ in closures]
        places: dict[Tensor, Place] = {}
        try:
            loss, observed = self._observe(closures, replays, places, scaler)
            for group in self.param_groups:
                update_group(group, self.state, self._scratch, observed, places)
        except NotFinite as error:
            for replay in replays:
                replay.undo()
            return self._skip(error.loss)
        finally:
            put_back(places)  # where something went wrong, or the second evaluation did not reach
        for group in self.param_groups:
            group["steps"] += 1
            group["skipped_in_a_row"] = 0
        return loss

    def _observe(
        self, closures: list[Closure], replays: list[Replay], places: dict[Tensor, Place], scaler: Any
    ) -> tuple[Any, dict[Tensor, Observed]]:
        """Gradients at θ and, if it is time, at θ + δ: `places` then says where each parameter was."""
        here = [self._evaluate(r.first, c, scaler) for r, c in zip(replays, closures, strict=True)]
        raw = {parameter: parameter.grad for parameter in self._parameters()}
        there: list[Evaluation] | None = None
        cold = self._is_cold(here)
        due = cold or any(group["steps"] % group["curvature_every"] == 0 for group in self.param_groups)
        if due or any(self._is_unusual(evaluation) for evaluation in here):
            observed = self._weigh(here, None, scaler, exact=cold)
            seeds = {p: _seed(self.param_groups[0]["steps"], place) for place, p in enumerate(self._parameters())}
            for group in self.param_groups:
                shift_group(group, self.state, self._scratch, observed, seeds, places)
            there = [self._evaluate(r.again, c, scaler) for r, c in zip(replays, closures, strict=True)]
        observed = self._weigh(here, there, scaler)
        if scaler is not None:
            scaler.unscale_(self)
        if there is not None:
            for parameter, grad in raw.items():
                parameter.grad = grad if grad is None or scaler is None else grad.div_(_scale_of(scaler))
        loss = here[0].loss if len(here) == 1 else torch.stack([e.loss for e in here]).mean()
        return loss, observed

    def _evaluate(self, run: Callable[[Closure], Any], closure: Closure, scaler: Any) -> Evaluation:
        """Run a closure, and see whether what it did makes sense."""
        for parameter in self._parameters():
            parameter.grad = None
        with nullcontext() if self._recorder is None else self._recorder.record() as recording:
            loss = run(closure)
            check_loss(loss)
        grads = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    values, rows = as_rows(parameter.grad, parameter)
                    scale = _scale_of(scaler) * (-1 if group["maximize"] else 1)
                    grads[parameter] = Grad(values if scale == 1 else values / scale, rows)
        if not grads:
            raise RuntimeError(
                "the closure left no gradient: it must call loss.backward(), on a loss that depends on the parameters "
                "given to VSGD"
            )
        lengths = squared_lengths(loss, grads.values())
        if not lengths:
            if scaler is not None:
                scaler.unscale_(self)
            raise NotFinite(loss.detach())
        squares = dict(zip(grads, lengths, strict=True))
        return Evaluation(loss=loss.detach().reshape(()), grads=grads, squared_lengths=squares, recording=recording)

    def _is_unusual(self, evaluation: Evaluation) -> bool:
        """Is the gradient of a tensor as long as that of an outlier? Its curvature is then not the usual one either."""
        samples = 1 if self._recorder is None else evaluation.recording.count
        scale = 1 if self._reduction == "mean" else samples
        for group in self.param_groups:
            reached = [p for p in group["params"] if p in evaluation.grads and p in self._scratch.warm]
            known = [p for p in reached if not by_rows(self.state[p])]
            if known:
                limit = (options_of(group).outlier_sigmas * scale) ** 2
                expected = expected_squared_lengths([self.state[p] for p in known], samples)
                if any(evaluation.squared_lengths[p] > limit * e for p, e in zip(known, expected, strict=True)):
                    return True
        return False

    def _weigh(
        self, here: list[Evaluation], there: list[Evaluation] | None, scaler: Any, exact: bool = True
    ) -> dict[Tensor, Observed]:
        """What the evaluations say about each parameter: the micro-batches that reached it count, twice if need be.

        Squares over single rows cost most of the time, and the shift needs them only while averages are being started.
        """
        pairs = (
            [(e.grads, None) for e in here]
            if there is None
            else [(first.grads, second.grads) for first, second in zip(here, there, strict=True)]
        )
        observed = {}
        for p in dict.fromkeys(p for e in here for p in e.grads):
            both = [(a[p], b if b is None else b[p]) for a, b in pairs if p in a and (b is None or p in b)]
            if both:
                second_grads = [after for _, after in both if after is not None]
                observed[p] = of_minibatches([before for before, _ in both], second_grads or None)
        reached = list(observed)
        if self._recorder is None:
            return observed
        first, second = here[0].recording, None if there is None else there[0].recording
        tables = {p for p in reached if not self.state.get(p) or by_rows(self.state[p])}
        sums = self._recorder.sums(first, second, self._reduction, _scale_of(scaler), only=None if exact else tables)
        scale = first.count if self._reduction == "mean" else 1
        observed.update({p: of_samples(here[0].grads[p], scale, sums[p], first.count, p) for p in reached if p in sums})
        if self._reweight and exact:
            observed.update(self._reweighted(first, observed, scale / _scale_of(scaler)))
        return observed

    def _reweighted(self, recording: Any, observed: dict[Tensor, Observed], scale: float) -> dict[Tensor, Observed]:
        """Let the step go along Σ w_j ∇⁽ʲ⁾. Rows of tables have the sparse form of the same idea already."""
        assert self._recorder is not None
        weights = sample_weights(self._recorder.gram(recording))
        count = effective_count(weights)
        dense = {
            p: group
            for group in self.param_groups
            for p in group["params"]
            if p in observed and not observed[p].by_rows
        }
        directions = self._recorder.weighted(recording, weights, set(dense))
        return {
            p: along(observed[p], directions[p] * (-scale if group["maximize"] else scale), count)
            for p, group in dense.items()
        }

    def _skip(self, loss: Tensor) -> Tensor:
        """Leave a step out; too many in a row are an error."""
        for group in self.param_groups:
            group["skipped"] += 1
            group["skipped_in_a_row"] += 1
        if self.param_groups[0]["skipped_in_a_row"] >= PATIENCE:
            raise FloatingPointError(
                f"the loss or its gradient was infinite or NaN in {PATIENCE} steps in a row (loss {float(loss):g}); "
                "nothing has been changed in them. Look at the data, or at the model's last layers."
            )
        return loss

    def info(self) -> Diagnosis:
        """Rates, memory and noise of every tensor, and the batch size worth using. `print` shows it as a table."""
        return diagnose(self, self._scratch.outliers)

    # --- state ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self._parameters()}

    def _is_cold(self, here: list[Evaluation]) -> bool:
        """Are averages just being started? Rare rows of a table may be so for ever, and are not asked."""
        cold = False
        reached = {parameter for evaluation in here for parameter in evaluation.grads} - self._scratch.warm
        for group in self.param_groups if reached else []:
            for parameter in reached.intersection(group["params"]):
                state = self.state.get(parameter)
                if not state:
                    cold = True
                elif not by_rows(state):
                    warm = float(state["seen"]) >= options_of(group).bootstrap
                    self._scratch.warm.update([parameter] if warm else [])
                    cold = cold or not warm
        return cold

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where `state_dict` left off, to the bit. A state of another model is refused and nothing changes."""
        if not all("curvature_every" in group for group in state_dict["param_groups"]):
            raise ValueError("the state is not one of VSGD; nothing was loaded")
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = self._parameters()
        if len(saved) == len(own):
            for parameter, index in zip(own, saved, strict=True):
                memory = state_dict["state"].get(index, {}).get("memory")
                if memory is not None and memory.shape != parameter.shape:
                    raise ValueError(
                        f"the state is of another model: parameter {index} has shape {tuple(parameter.shape)}, "
                        f"its state {tuple(memory.shape)}. Nothing was loaded."
                    )
        super().load_state_dict(state_dict)
        for parameter, index in zip(own, saved, strict=True):
            # the base class rounds state to the parameter's precision
            for name, value in state_dict["state"].get(index, {}).items():
                dtype = parameter.dtype if name == "iterate" else precision(parameter)
                self.state[parameter][name] = value.to(parameter.device, dtype, copy=True)


def _seed(steps: int, place: int) -> int:
    """Different for every step and every parameter."""
    return (steps * 0x9E3779B97F4A7C15 + place * 0xBF58476D1CE4E5B9) % (1 << 63)


def _scale_of(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())
