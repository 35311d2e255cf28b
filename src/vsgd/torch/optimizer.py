"""`VSGD`, a `torch.optim.Optimizer` with no learning rate to choose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsgd.algorithms import networks
from vsgd.algorithms.base import require
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import Paper
from vsgd.reweight import effective_count, sample_weights
from vsgd.torch import engine
from vsgd.torch.closure import FORWARD_OUTSIDE, NOT_REPEATABLE, Closure, Replay, check_closures, check_loss
from vsgd.torch.diagnostics import Diagnosis, diagnose
from vsgd.torch.engine import BatchStatistics, Block, Config, Factors
from vsgd.torch.samples import Recorder, RowSums
from vsgd.torch.statistics import OTHER_ROWS, Grads, RowStatistics, SampleTotals, of_dense, of_table
from vsgd.torch.storage import LARGE, Dense, Storage, Table, as_table, check_state, is_table, new_state, signature

PATIENCE = 10
"""Steps in a row that may be skipped because something was not finite."""

LEFTOVER_LR = 0.05
"""A factor on the rates below this is more likely a learning rate left over from another optimizer."""

ALGORITHMS: dict[str, type] = {kind.__name__: kind for kind in (Networks, Paper)}


class NotFinite(Exception):
    """A loss or gradient was infinite or NaN."""

    def __init__(self, loss: Tensor):
        self.loss = loss


class Evaluation(NamedTuple):
    """What one call of a closure gave."""

    loss: Tensor
    grads: Grads
    recording: Any


class Work(NamedTuple):
    """One block of a step: where it is stored, what the minibatch says, and at which offset it was probed."""

    storage: Storage
    group: dict[str, Any]
    block: Block
    batch: BatchStatistics
    rows: Tensor | None
    delta: Tensor | None = None


class VSGD(Optimizer):
    """Stochastic gradient descent whose rates set themselves, one for each coordinate (Schaul & LeCun 2013).

    `step(closure)` calls the closure once or twice, the second time with probed parameters, the same random numbers and
    buffers left as they were. Gradients are cleared before each call. Afterwards the parameters are the weights to
    evaluate and save; there is no mode to switch.

    Args:
        params: parameters or groups of them, as for any optimizer.
        lr: a factor on the rates, for those who want a schedule or groups that learn more slowly. Not needed.
        weight_decay: λ, pulls parameters towards zero with the rate η of each: θ ← (θ − η∇) / (1 + ηλ).
        algorithm: `vsgd.NETWORKS` by default; `vsgd.PAPER` is the published pseudocode.
        per_sample: a model whose parameters these are. Every row of the minibatch is then a sample, as in the paper;
            otherwise the minibatch is.
        compact: keep all statistics in bfloat16: half the memory.
        maximize: climb instead of descend.
        reduction: with `per_sample`, whether the loss is the "mean" or the "sum" over the rows.
        reweight: with `per_sample`, weigh each row by one over the number of others whose gradients interfere with its
            own (section 4.1 of the paper).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        weight_decay: float = 0.0,
        *,
        algorithm: Config = NETWORKS,
        per_sample: nn.Module | None = None,
        compact: bool = False,
        maximize: bool = False,
        reduction: Literal["mean", "sum"] = "mean",
        reweight: bool = False,
    ):
        if isinstance(params, nn.Module):
            raise TypeError(
                "VSGD takes parameters: VSGD(model.parameters()); for every row of the minibatch as a sample, "
                "VSGD(model.parameters(), per_sample=model)"
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}, it must be 'mean' or 'sum'")
        if reweight and per_sample is None:
            raise ValueError(
                "reweight=True weighs the rows of the minibatch, so name the model: VSGD(model.parameters(), "
                "per_sample=model, reweight=True)"
            )
        if isinstance(lr, float) and 0 < lr < LEFTOVER_LR:
            warnings.warn(
                f"lr={lr:g} multiplies the rates that VSGD finds, which are right as they are; leave lr out",
                stacklevel=2,
            )
        self._recorder = None if per_sample is None else Recorder(per_sample)
        self._reduction = reduction
        self._reweight = reweight
        self._compact = compact
        self._forget()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "algorithm": algorithm,
            "maximize": maximize,
            "steps": 0,
            "skipped": 0,
            "skipped_in_a_row": 0,
            "samples": 1.0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        require(group["algorithm"], Networks, Paper)
        for name in ("lr", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]}, it must be at least 0")
        if self.param_groups:
            group["steps"] = self.param_groups[0]["steps"]
        super().add_param_group(group)
        try:
            check_parameters(self._parameters())
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

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
        closures = check_closures(closure)
        if self._recorder is not None and len(closures) > 1:
            raise TypeError("with per_sample every row is a sample; give one closure, or leave per_sample out")
        known = set(self.state)
        replays = [Replay(each, {p.device for p in self._parameters()}) for each in closures]
        self._arrange()
        try:
            self._open()
            loss = self._evaluate_and_learn(replays, scaler)
        except BaseException as error:
            self._close()
            for parameter in set(self.state) - known:  # made in this step
                del self.state[parameter]
            if not isinstance(error, NotFinite):
                raise
            for replay in replays:
                replay.undo()
            return self._skip(error.loss)
        self._close()
        for group in self.param_groups:
            group["steps"] += 1
            group["skipped_in_a_row"] = 0
        return loss

    def _evaluate_and_learn(self, replays: list[Replay], scaler: Any) -> Tensor:
        """Gradients at θ and, if a probe is due, at θ + δ; then the update."""
        starting = not self.state
        first = [self._evaluate(replay.first, scaler) for replay in replays]
        raw = {p: p.grad for p in self._parameters()}
        totals = self._sample_totals(first, None, scaler, only=self._maybe_tables(first))
        self._admit(first, totals)
        work = self._collect(first, None, totals)
        due = self._probe_is_due(work)
        second = None
        if starting or not due:
            due = self._look_at(first, work, scaler) or due
        if starting:
            again = [self._evaluate(replay.again, scaler, record=False) for replay in replays]
            self._look_at(again, self._collect(again, None, totals), scaler)
            check_repeatable(first, again)
        if due:
            work = self._probe(work)
            second = [self._evaluate(replay.again, scaler) for replay in replays]
            if starting:
                check_probe_is_seen(first, second)
        totals = self._sample_totals(first, second, scaler, only=None)
        work = self._collect(first, second, totals, {id(w.storage): w for w in work})
        if due:
            self._look_at([*first, *second], work, scaler)  # type: ignore[misc]
        if scaler is not None:
            scaler.unscale_(self)
        if due:
            for parameter, grad in raw.items():
                parameter.grad = grad if grad is None or scaler is None else grad.div_(scale_of(scaler))
        self._update(work)
        return first[0].loss if len(first) == 1 else torch.stack([e.loss for e in first]).mean()

    def _evaluate(self, run: Callable[[], Any], scaler: Any, record: bool = True) -> Evaluation:
        """Run a closure and collect the gradients that it leaves."""
        for parameter in self._parameters():
            parameter.grad = None
        recording = self._recorder.record() if self._recorder is not None and record else nullcontext()
        with recording as recorded:
            loss = run()
            check_loss(loss)
        grads = {}
        for group in self.param_groups:
            scale = scale_of(scaler) * (-1 if group["maximize"] else 1)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    grads[parameter] = own_gradient(parameter, scale)
        if not grads:
            raise RuntimeError(
                "the closure left no gradient: it must call loss.backward(), on a loss that depends on the parameters "
                "given to VSGD"
            )
        return Evaluation(loss=loss.detach().reshape(()), grads=grads, recording=recorded)

    # --- statistics -----------------------------------------------------------------------------------------------

    def _maybe_tables(self, evaluations: list[Evaluation]) -> set[Tensor]:
        """Parameters whose rows may have counts of their own."""
        reached = {p for e in evaluations for p in e.grads}
        return {p for p in reached if not self.state.get(p) or is_table(self.state[p])}

    def _sample_totals(
        self, first: list[Evaluation], second: list[Evaluation] | None, scaler: Any, only: set[Tensor] | None
    ) -> SampleTotals | None:
        """Sums over single rows, with `per_sample`. They take most of the time, so not all are taken for a probe."""
        if self._recorder is None:
            return None
        here, there = first[0].recording, None if second is None else second[0].recording
        sums = self._recorder.sums(here, there, self._reduction, scale_of(scaler), only=only)
        scale = here.count if self._reduction == "mean" else 1
        totals = SampleTotals(sums, here.count, scale, {})
        if not self._reweight:
            return totals
        weights = sample_weights(self._recorder.gram(here))
        signs = {p: -1 if group["maximize"] else 1 for group in self.param_groups for p in group["params"]}
        dense = [p for p in first[0].grads if not self.state.get(p) or not is_table(self.state[p])]
        directions = self._recorder.weighted(here, weights, set(dense))
        factor = scale / scale_of(scaler)
        return totals._replace(
            directions={p: d * (signs[p] * factor) for p, d in directions.items()},
            direction_count=float(effective_count(weights)),
        )

    def _collect(
        self,
        first: list[Evaluation],
        second: list[Evaluation] | None,
        totals: SampleTotals | None,
        earlier: dict[int, Work] | None = None,
    ) -> list[Work]:
        """What the evaluations say about each storage; blocks and offsets are those of `earlier` work."""
        grads = [e.grads for e in first]
        probed = None if second is None else [e.grads for e in second]
        work = []
        for group, storage in self._storages:
            before = None if earlier is None else earlier.get(id(storage))
            if isinstance(storage, Dense):
                batch = of_dense(storage, grads, probed, totals)
                found = Work(storage, group, storage.block, batch, None) if bool((batch.count > 0).any()) else None
            else:
                found = self._collect_rows(storage, group, of_table(storage.parameter, grads, probed, totals), before)
            if found is not None:
                work.append(found if before is None else found._replace(delta=before.delta))
        return work

    def _collect_rows(
        self, table: Table, group: dict[str, Any], found: RowStatistics | None, before: Work | None
    ) -> Work | None:
        if found is None:
            if before is not None and before.delta is not None:
                table.move_to(before.rows, before.block.theta)  # type: ignore[arg-type]
            return None
        rows, batch = found
        if before is None:
            return Work(table, group, table.rows(rows), batch, rows)
        if not torch.equal(rows, before.rows):  # type: ignore[arg-type]
            raise RuntimeError(OTHER_ROWS)
        return Work(table, group, before.block, batch, rows)

    # --- decisions and updates ------------------------------------------------------------------------------------

    def _probe_is_due(self, work: list[Work]) -> bool:
        """By the schedule, or because averages are just being started; rows of a table start whenever they come."""

        def is_due(w: Work) -> bool:
            config = w.group["algorithm"]
            if isinstance(config, Paper) or networks.probe_due(w.group["steps"], config):
                return True
            starting = (w.block.seen < config.bootstrap) & (w.batch.count > 0)
            return isinstance(w.storage, Dense) and bool(starting.any())

        return any(map(is_due, work))

    def _look_at(self, evaluations: list[Evaluation], work: list[Work], scaler: Any) -> bool:
        """Raise `NotFinite` if anything is. Is a gradient unusually long? The only place that waits for a device."""
        dense = [engine.verdict(w.block, w.batch, w.group["algorithm"]) for w in work]
        losses = [torch.stack([e.loss.isfinite(), torch.zeros_like(e.loss, dtype=torch.bool)]) for e in evaluations]
        usable, long = torch.stack([each.to(dense[0].device) for each in (*losses, *dense)]).unbind(1)
        answer = torch.stack([usable.all(), long.any()]).tolist()
        if not answer[0]:
            if scaler is not None:
                scaler.unscale_(self)
            raise NotFinite(evaluations[0].loss)
        return bool(answer[1])

    def _probe(self, work: list[Work]) -> list[Work]:
        """Move parameters to θ + δ. δ is what came out, in the precision of the parameter."""
        place = {p: k for k, p in enumerate(self._parameters())}
        probed = []
        for w in work:
            if isinstance(w.storage, Dense):
                seeds = torch.tensor([seed_of(w.group["steps"], place[p]) for p in w.storage.parameters])
                point = w.block.theta + engine.probe(w.block, w.batch, seeds, w.group["algorithm"])
                held = w.storage.move_to(point)
            else:
                point = w.block.theta + engine.probe(w.block, w.batch, None, w.group["algorithm"])
                held = w.storage.move_to(w.rows, point)  # type: ignore[arg-type]
            probed.append(w._replace(delta=held - w.block.theta))
        return probed

    def _update(self, work: list[Work]) -> None:
        factors = [Factors(float(w.group["lr"]), float(w.group["weight_decay"])) for w in work]
        for w, each in zip(work, factors, strict=True):
            outliers = engine.update(w.block, w.batch, w.delta, each, w.group["algorithm"])
            if isinstance(w.storage, Dense):
                self._outliers.update(zip(w.storage.parameters, outliers, strict=True))
            else:
                w.storage.store(w.rows, w.block)  # type: ignore[arg-type]
                self._outliers[w.storage.parameter] = outliers.sum()
            w.group["samples"] = float(w.batch.count.max())

    def _skip(self, loss: Tensor) -> Tensor:
        """Leave a step out; too many in a row are an error."""
        for group in self.param_groups:
            group["skipped"] += 1
            group["skipped_in_a_row"] += 1
        if self.param_groups[0]["skipped_in_a_row"] >= PATIENCE:
            raise FloatingPointError(
                f"the loss or its gradient was infinite, NaN or too large to be squared in {PATIENCE} steps in a row "
                f"(loss {float(loss):g}); nothing has been changed in them. Look at the data, or at the model's last layers."
            )
        return loss

    def info(self) -> Diagnosis:
        """Rates, memory and noise of every tensor, and the batch size worth using. `print` shows it as a table."""
        self._arrange()
        names = {}
        for number, group in enumerate(self.param_groups):
            known = group.get("param_names") or [f"group {number}, parameter {k}" for k in range(len(group["params"]))]
            names.update(zip(group["params"], known, strict=True))
        blocks = {p: (names[p], part, g) for g, s in self._storages for p, part in s.tensors() if len(part.theta)}
        outliers = {names[p]: float(count) for p, count in self._outliers.items()}
        ordered = [blocks[p] for p in self._parameters() if p in blocks]
        return diagnose(ordered, outliers, self.param_groups[0]["skipped"])

    # --- state ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _forget(self) -> None:
        """Drop what is not worth saving."""
        self._storages: list[tuple[dict[str, Any], Storage]] = []
        self._outliers: dict[Tensor, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_recorder", "_reduction", "_reweight", "_compact")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _open(self) -> None:
        for _, storage in self._storages:
            storage.open()

    def _close(self) -> None:
        for _, storage in self._storages:
            storage.close()

    def _admit(self, evaluations: list[Evaluation], totals: SampleTotals | None) -> None:
        """Make state for parameters that have their first gradient, and count rows apart from the first time on."""
        changed = False
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for evaluation in evaluations:
            for parameter, grad in evaluation.grads.items():
                sums = None if totals is None else totals.sums.get(parameter)
                by_rows = grad.is_sparse or isinstance(sums, RowSums) or (sums is not None and sums.count is not None)
                table = by_rows and len(parameter) > 1
                state = self.state.get(parameter)
                if not state:
                    config = groups[parameter]["algorithm"]
                    self.state[parameter] = new_state(parameter, config, table, self._compact)
                    changed = True
                elif table and not is_table(state):
                    self._close()
                    self.state[parameter] = as_table(state, parameter)
                    self._open()
                    changed = True
        if changed:
            self._close()
            self._arrange()
            self._open()

    def _arrange(self) -> None:
        """Let storages serve all parameters that have state, as these are now, and take over what the user has set."""
        wanted = []
        for group in self.param_groups:
            require(group["algorithm"], Networks, Paper)
            known = [p for p in group["params"] if self.state.get(p)]
            sets: dict[Any, list[Tensor]] = {}
            for p in known:
                apart = is_table(self.state[p]) or p.numel() >= LARGE
                sets.setdefault(p if apart else (p.device, p.dtype), []).append(p)
            wanted += [(group, parameters) for parameters in sets.values()]
        present = [(id(g), s.config, s.signature) for g, s in self._storages]
        if present != [(id(g), g["algorithm"], signature(parameters)) for g, parameters in wanted]:
            self._storages = [(group, self._storage(parameters, group)) for group, parameters in wanted]
        for _, storage in self._storages:
            storage.adopt()

    def _storage(self, parameters: list[Tensor], group: dict[str, Any]) -> Storage:
        for parameter in parameters:
            shape = self.state[parameter]["grad"].shape
            if shape != parameter.shape:
                raise ValueError(
                    f"a parameter changed its shape from {tuple(shape)} to {tuple(parameter.shape)} after it began to "
                    "learn; make a new VSGD for the new parameters"
                )
        if is_table(self.state[parameters[0]]):
            return Table(parameters[0], self.state, group["algorithm"])
        return Dense(parameters, self.state, group["algorithm"], self._compact)

    def state_dict(self) -> dict[str, Any]:
        """The state, of numbers, text and tensors only."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            config = group["algorithm"]
            group["algorithm"] = {"name": type(config).__name__, **config._asdict()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where `state_dict` left off, to the bit. A state of another model is refused and nothing changes."""
        groups = state_dict["param_groups"]
        if not all(isinstance(group.get("algorithm"), dict) for group in groups):
            raise ValueError("the state is not one of VSGD, or one of an earlier version; nothing was loaded")
        algorithms = [dict(group["algorithm"]) for group in groups]
        configs = [ALGORITHMS[constants.pop("name")](**constants) for constants in algorithms]
        saved = [index for group in groups for index in group["params"]]
        own = self._parameters()
        if len(saved) == len(own):
            for parameter, index in zip(own, saved, strict=True):
                check_state(state_dict["state"].get(index, {}), parameter, index)
        super().load_state_dict(state_dict)
        for group, config in zip(self.param_groups, configs, strict=True):
            group["algorithm"] = config
        for parameter, index in zip(own, saved, strict=True):
            # copies, since the base class rounds the state to the precision of the parameter
            state = state_dict["state"].get(index, {})
            self.state[parameter] = {name: value.detach().clone() for name, value in state.items()}
            if not state:
                del self.state[parameter]
        self._forget()


def own_gradient(parameter: Tensor, scale: float) -> Tensor:
    """The gradient of a parameter, unscaled, in memory that the next evaluation will not write to."""
    grad = parameter.grad
    assert grad is not None
    if scale != 1:
        return grad.detach() / scale
    is_part = not grad.is_sparse and grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return grad.detach().clone() if is_part else grad.detach()


def check_parameters(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        if parameter.is_complex() or (parameter.requires_grad and not parameter.is_floating_point()):
            raise TypeError(f"a parameter is {parameter.dtype}; VSGD takes real numbers, so split a complex one in two")
    places = [(p.device, p.data_ptr()) for p in parameters if p.numel() and p.device.type != "meta"]
    if len(set(places)) < len(places):
        raise ValueError("two parameters share memory; tie weights by using one parameter twice")


def check_repeatable(first: list[Evaluation], again: list[Evaluation]) -> None:
    """Two evaluations at the same weights must agree, up to the rounding of parallel sums."""
    for a, b in zip(first, again, strict=True):
        loss, other = float(a.loss), float(b.loss)
        if not abs(loss - other) <= 1e-3 * abs(loss) + 1e-12:
            raise RuntimeError(NOT_REPEATABLE.format(what="loss", values=f"{loss:g} and {other:g}"))
        if a.grads.keys() != b.grads.keys():
            raise RuntimeError(NOT_REPEATABLE.format(what="gradient", values="other parameters have one"))
        for parameter, grad in a.grads.items():
            here, there = (each.to_dense() if each.is_sparse else each for each in (grad, b.grads[parameter]))
            off, size = float((here - there).norm()), float(here.norm())
            coarse = 0.1 if parameter.dtype in (torch.float16, torch.bfloat16) else 0.01
            if not off <= coarse * size + 1e-12:
                raise RuntimeError(NOT_REPEATABLE.format(what="gradient", values=f"{off / max(size, 1e-30):.0%} off"))


def check_probe_is_seen(first: list[Evaluation], second: list[Evaluation]) -> None:
    """Where neither loss nor gradient changes at all, the closure did not use the probed parameters."""
    for a, b in zip(first, second, strict=True):
        grads = [(g.coalesce().values() if g.is_sparse else g) for g in a.grads.values()]
        same = a.grads.keys() == b.grads.keys() and torch.equal(a.loss, b.loss)
        if same and any(bool(g.any()) for g in grads):
            probed = [(g.coalesce().values() if g.is_sparse else g) for g in b.grads.values()]
            if all(torch.equal(g, p) for g, p in zip(grads, probed, strict=True)):
                raise RuntimeError(FORWARD_OUTSIDE)


def seed_of(step: int, place: int) -> int:
    """Of the random signs: different for every step and every parameter."""
    return (step * 0x9E3779B97F4A7C15 + place * 0xBF58476D1CE4E5B9) % (1 << 63)


def scale_of(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())
