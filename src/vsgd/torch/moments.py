"""What a sample is: a minibatch, a micro-batch, a micro-batch of one of several replicas, or a row.

A `Sampling` is made for each step. It turns the first gradients into moments of each block, and completes these with
the second gradients if there are any. The first gradients are gathered, rotated and reduced once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vsgd.reweight import effective_count, sample_weights
from vsgd.torch.coordinates import BatchMoments, precision, spread
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed.messages import Processes
from vsgd.torch.evaluation import Evaluation
from vsgd.torch.per_sample import Recorder, RowSums, SampleSums
from vsgd.torch.per_sample.terms import empty_sums

if TYPE_CHECKING:
    from vsgd.torch.dense import DenseBlock
    from vsgd.torch.embedding import TableBlock

Grads = dict[Tensor, Tensor]
"""The unscaled gradient of each parameter that has one, after one evaluation."""

OTHER_ROWS = "the closure touched other rows when called again; it must compute the same loss twice"
MIXED_PROCESSES = "a parameter is a table in one process and a matrix in another; use it in the same way in all"
MIXED = "a parameter's gradient was sparse in one micro-batch and dense in another; choose one"


class RowMoments(NamedTuple):
    """Moments of the touched rows of a table."""

    rows: Tensor
    batch: BatchMoments


class Sampling(Protocol):
    """The samples of one step."""

    def tables(self, grads: Grads) -> set[Tensor]:
        """Return the parameters whose rows have counts of their own."""

    def dense(self, block: DenseBlock) -> BatchMoments:
        """Return the moments of the first gradients, in the order of the block's buffers."""

    def rows(self, block: TableBlock) -> RowMoments | None:
        """Return the moments of the touched rows; None if no sample touched any."""

    def finish(self, second: Sequence[Evaluation] | None, blocks: Any) -> bool:
        """Take the second evaluations, if there were any. Return whether moments have to be completed."""

    def complete_dense(self, block: DenseBlock, batch: BatchMoments) -> BatchMoments:
        """Return the moments with all that was not known before `finish`."""

    def complete_rows(self, block: TableBlock, found: RowMoments) -> BatchMoments:
        """Return the moments with all that was not known before `finish`."""


# --- a minibatch --------------------------------------------------------------------------------------------------


class Minibatch:
    """The minibatch is one sample."""

    def __init__(self, first: Sequence[Evaluation]):
        self._first, self._second = first[0].grads, Grads()

    def tables(self, grads: Grads) -> set[Tensor]:
        return sparse_tables(grads)

    def dense(self, block: DenseBlock) -> BatchMoments:
        grads = [self._first.get(p) for p in block.parameters]
        plain = block.gather(grads, "grad")
        counts = counts_of(tuple([grad is not None for grad in grads]))
        return BatchMoments(block.into(plain, "rotated"), plain, counts)

    def rows(self, block: TableBlock) -> RowMoments | None:
        if block.parameter not in self._first:
            return None
        return rows_of_one_sample(rows_of(self._first[block.parameter], block.parameter))

    def finish(self, second: Sequence[Evaluation] | None, blocks: Any) -> bool:
        if second is not None:
            self._second = second[0].grads
            check_apart(self._first, self._second)
        return second is not None

    def complete_dense(self, block: DenseBlock, batch: BatchMoments) -> BatchMoments:
        plain = block.gather([self._second.get(p) for p in block.parameters], "probed")
        probed = block.into(plain, "rotated probed")
        counts = counts_of(tuple([p in self._first and p in self._second for p in block.parameters]))
        return batch._replace(counts=counts, probed_grad=probed)

    def complete_rows(self, block: TableBlock, found: RowMoments) -> BatchMoments:
        if block.parameter not in self._second:
            return found.batch._replace(counts=found.batch.counts * 0)
        rows, values = rows_of(self._second[block.parameter], block.parameter)
        if not torch.equal(rows, found.rows):
            raise RuntimeError(OTHER_ROWS)
        return found.batch._replace(probed_grad=values.reshape(-1))


def sparse_tables(grads: Grads) -> set[Tensor]:
    """Return the parameters with several rows and a sparse gradient."""
    return {parameter for parameter, grad in grads.items() if grad.is_sparse and has_rows(parameter)}


def has_rows(parameter: Tensor) -> bool:
    return parameter.dim() > 0 and len(parameter) > 1


@functools.lru_cache(256)
def counts_of(numbers: tuple[float, ...]) -> Tensor:
    """Return numbers of samples as a tensor, which must not be changed."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def check_apart(first: Grads, second: Grads) -> None:
    """Raise if two gradients are in the same memory."""
    for parameter, grad in first.items():
        other = second.get(parameter)
        if other is not None and not grad.is_sparse and grad.data_ptr() == other.data_ptr() != 0:
            raise RuntimeError(
                "the closure wrote both gradients to the same memory; let backward() make .grad, or clone it"
            )


def rows_of(grad: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that a gradient touches, and its values there, rows × columns."""
    dtype, width = precision(table.dtype), table[0].numel()
    if not grad.is_sparse:
        return torch.arange(len(table), device=table.device), grad.detach().to(dtype).reshape(len(table), width)
    grad = grad.detach().coalesce()
    if grad.sparse_dim() != 1:
        raise ValueError("a sparse gradient must be sparse in its first axis only, as that of an embedding is")
    rows = grad.indices()[0]
    return rows, grad.values().to(dtype).reshape(len(rows), width)


def rows_of_one_sample(touched: tuple[Tensor, Tensor]) -> RowMoments | None:
    rows, values = touched
    count = torch.ones(len(rows), dtype=sum_dtype(rows.device), device=rows.device)
    return RowMoments(rows, BatchMoments(values.reshape(-1), values.reshape(-1), count)) if len(rows) else None


# --- micro-batches ------------------------------------------------------------------------------------------------


class MicroBatches:
    """Each micro-batch of each replica is a sample. Those in which a parameter has no gradient do not count for it."""

    def __init__(self, first: Sequence[Evaluation], processes: Processes):
        self._first, self._second = [e.grads for e in first], list[Grads]()
        self._processes = processes

    def tables(self, grads: Grads) -> set[Tensor]:
        return sparse_tables(grads)

    def dense(self, block: DenseBlock) -> BatchMoments:
        hits = [self._hits(p) for p in block.parameters]
        return self._first_moments(block, self._in_coordinates(block, self._first, hits), hits)

    def rows(self, block: TableBlock) -> RowMoments | None:
        return self._touched(block, self._hits(block.parameter))

    def finish(self, second: Sequence[Evaluation] | None, blocks: Any) -> bool:
        self._second = [] if second is None else [e.grads for e in second]
        return second is not None

    def complete_dense(self, block: DenseBlock, batch: BatchMoments) -> BatchMoments:
        first, hits = batch.samples
        both = [self._hits(p) for p in block.parameters]
        if both != hits:  # a parameter has lost its gradient
            first = [self._restricted(block, each, [k in hit for hit in both]) for k, each in enumerate(first)]
            batch, hits = self._first_moments(block, first, both), both
        sums = block.coordinates.theta.new_zeros(2, len(block.coordinates.theta))
        for here, there in zip(first, self._in_coordinates(block, self._second, hits), strict=True):
            diff = there - here
            sums[0] += diff if block.coordinates.decoupled else diff.abs()
            sums[1] += diff * diff
        diff, diff_sq = self._means(block, sums, batch.counts)
        return batch._replace(diff=diff, diff_sq=diff_sq, samples=None)

    def complete_rows(self, block: TableBlock, found: RowMoments) -> BatchMoments:
        hits = self._hits(block.parameter)
        if hits != self._hits(block.parameter, only_first=True):  # a micro-batch has lost its gradient
            again = self._touched(block, hits)
            if again is None:
                return found.batch._replace(counts=found.batch.counts * 0)
            if not torch.equal(again.rows, found.rows):
                raise RuntimeError(OTHER_ROWS)
            found = again
        first, place = found.batch.samples
        second = self._touched_rows(block, self._second, hits)
        if not all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True)):
            raise RuntimeError(OTHER_ROWS)
        if place is None:
            return found.batch._replace(probed_grad=second[0][1].reshape(-1), samples=None)
        diff = torch.cat([values for _, values in second]) - torch.cat([values for _, values in first])
        terms = [diff if block.decoupled else diff.abs(), diff * diff]
        means = row_means(terms, place, found.batch.counts)
        return found.batch._replace(diff=means[0], diff_sq=means[1], samples=None)

    def _hits(self, parameter: Tensor, only_first: bool = False) -> list[int]:
        """Return the micro-batches in which a parameter has a gradient, or both if there were second ones."""
        second = [] if only_first else self._second
        return [
            k for k, grads in enumerate(self._first) if parameter in grads and (not second or parameter in second[k])
        ]

    def _in_coordinates(self, block: DenseBlock, grads: Sequence[Grads], hits: list[list[int]]) -> list[Tensor]:
        """Return the gradients of each micro-batch in the coordinates of the block."""
        found = []
        for k, each in enumerate(grads):
            parts = [each[p] if k in hit else None for p, hit in zip(block.parameters, hits, strict=True)]
            found.append(block.into(block.gather(parts)))
        return found

    def _restricted(self, block: DenseBlock, values: Tensor, wanted: list[bool]) -> Tensor:
        parts = zip(values.split(block.coordinates.lengths), wanted, strict=True)
        return torch.cat([part if take else torch.zeros_like(part) for part, take in parts])

    def _first_moments(self, block: DenseBlock, first: list[Tensor], hits: list[list[int]]) -> BatchMoments:
        sums = block.coordinates.theta.new_zeros(2, len(block.coordinates.theta))
        for grad in first:
            sums[0] += grad
            sums[1] += grad * grad
        counts = counts_of(tuple(map(len, hits)))
        if self._processes.are_samples:
            counts = counts * self._processes.size
        grad, grad_sq = self._means(block, sums, counts)
        return BatchMoments(grad, block.back(grad), counts, grad_sq=grad_sq, samples=(first, hits))

    def _means(self, block: DenseBlock, sums: Tensor, counts: Tensor) -> Tensor:
        if self._processes.are_samples:
            self._processes.add_up(sums)
        return sums / spread(counts.clamp(min=1), block.coordinates)

    def _touched_rows(self, block: TableBlock, grads: Sequence[Grads], hits: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return rows and values of each micro-batch, of all processes."""
        found = [rows_of(grads[k][block.parameter], block.parameter) for k in hits]
        if not self._processes.are_samples:
            return found
        gathered = [zip(*map(self._processes.gather_rows, each), strict=True) for each in found]
        return [pair for pairs in gathered for pair in pairs]

    def _touched(self, block: TableBlock, hits: list[int]) -> RowMoments | None:
        if not hits:
            return None
        if len({self._first[k][block.parameter].is_sparse for k in hits}) > 1:
            raise RuntimeError(MIXED)
        first = self._touched_rows(block, self._first, hits)
        if len(first) == 1:
            found = rows_of_one_sample(first[0])
            return found and found._replace(batch=found.batch._replace(samples=(first, None)))
        touched, place = torch.unique(torch.cat([rows for rows, _ in first]), return_inverse=True)
        if not len(touched):
            return None
        counts = torch.bincount(place, minlength=len(touched)).to(sum_dtype(place.device))
        values = torch.cat([values for _, values in first])
        grad, grad_sq = row_means([values, values * values], place, counts)
        return RowMoments(touched, BatchMoments(grad, grad, counts, grad_sq=grad_sq, samples=(first, place)))


def row_means(terms: Sequence[Tensor], place: Tensor, counts: Tensor) -> list[Tensor]:
    """Return the means of terms, rows × columns, over the samples of each touched row."""
    sums = (term.new_zeros(len(counts), term.shape[1]).index_add_(0, place, term) for term in terms)
    return [(total / counts[:, None].to(total)).reshape(-1) for total in sums]


# --- rows ---------------------------------------------------------------------------------------------------------


class RowSettings(NamedTuple):
    """Settings of `per_sample`: what records the rows, and how the loss combines them."""

    recorder: Recorder
    reduction: str
    reweight: bool


class SampleTotals(NamedTuple):
    """Sums over the rows of one minibatch, as `vsgd.torch.per_sample` takes them."""

    sums: dict[Tensor, SampleSums | RowSums]
    samples: int
    scale: float
    """Factor that makes a gradient the sum over the rows."""
    directions: dict[Tensor, Tensor]
    """Weighted sums that are the direction of the step, if rows are reweighted."""
    effective: float
    """Number of samples; with weighted sums, the effective one."""


class RowSamples:
    """Every row of the minibatch is a sample. Sums over rows are computed without the gradient of each row.

    Sums of dense tensors take most of the time, so they are taken once, when the second gradient is known or not due.
    """

    def __init__(
        self,
        first: Sequence[Evaluation],
        settings: RowSettings,
        scale: float,
        signs: dict[Tensor, int],
        tables: Collection[Tensor],
        processes: Processes,
    ):
        """Take the sums of tables.

        Args:
            first: the evaluation at the parameters.
            settings: of the optimizer.
            scale: factor of the gradient scaler.
            signs: every parameter, with −1 if its group is maximized.
            tables: parameters that are tables, or may be.
            processes: processes that train the same model.
        """
        (self._evaluation,) = first
        self._settings, self._scale, self._signs, self._processes = settings, scale, signs, processes
        self._first, self._second = self._evaluation.grads, Grads()
        self._weights = (
            sample_weights(settings.recorder.gram(self._evaluation.recording)) if settings.reweight else None
        )
        self._is_probed = False
        self._totals = self._sums(None, set(tables), {})

    def tables(self, grads: Grads) -> set[Tensor]:
        by_sums = {
            parameter
            for parameter, sums in self._totals.sums.items()
            if isinstance(sums, RowSums) or sums.count is not None
        }
        return sparse_tables(grads) | {parameter for parameter in by_sums & grads.keys() if has_rows(parameter)}

    def dense(self, block: DenseBlock) -> BatchMoments:
        totals = self._totals
        plain = block.gather([self._first.get(p) for p in block.parameters], "grad")
        plain = plain * (totals.scale / totals.samples)
        counts = counts_of(tuple([totals.effective if p in self._first else 0.0 for p in block.parameters]))
        return BatchMoments(block.into(plain), plain, counts)

    def rows(self, block: TableBlock) -> RowMoments | None:
        return self._touched(block) if block.parameter in self._first else None

    def finish(self, second: Sequence[Evaluation] | None, blocks: Any) -> bool:
        bases = {p: basis for block in blocks for p, basis in block.bases().items()}
        if second is not None:
            self._is_probed, self._second = True, second[0].grads
        self._totals = self._sums(None if second is None else second[0], None, bases)
        if self._weights is not None:
            dense = {p for block in blocks if not block.is_table for p in block.parameters if p in self._first}
            sums = self._settings.recorder.weighted(self._evaluation.recording, self._weights, dense)
            factor = self._totals.scale / self._scale
            directions = {p: direction * (self._signs[p] * factor) for p, direction in sums.items()}
            self._totals = self._totals._replace(directions=directions)
        return True

    def complete_dense(self, block: DenseBlock, batch: BatchMoments) -> BatchMoments:
        totals = self._totals
        found = [totals.sums.get(p) for p in block.parameters]
        known = [sums.sums if isinstance(sums, RowSums) else sums for sums in found]  # a table of one row is no table

        def mean_of(name: str) -> Tensor | None:
            parts = [None if sums is None else getattr(sums, name) for sums in known]
            return None if all(part is None for part in parts) else block.gather(parts, name) / totals.samples

        diff, direction = mean_of("diff_abs"), None
        if diff is not None and self._is_probed and block.coordinates.decoupled:
            moved = block.gather([self._second.get(p) for p in block.parameters], "probed")
            diff = block.into(moved * (totals.scale / totals.samples)) - batch.grad
        if totals.directions:
            direction = block.into(block.gather([totals.directions.get(p) for p in block.parameters], "direction"))
        counts = counts_of(tuple([totals.effective if p in self._first else 0.0 for p in block.parameters]))
        grad_sq, diff_sq = mean_of("grad_sq"), mean_of("diff_sq")
        return batch._replace(counts=counts, grad_sq=grad_sq, diff=diff, diff_sq=diff_sq, direction=direction)

    def complete_rows(self, block: TableBlock, found: RowMoments) -> BatchMoments:
        again = self._touched(block)
        if again is None or (self._is_probed and block.parameter not in self._second):
            return found.batch._replace(counts=found.batch.counts * 0)
        if not torch.equal(again.rows, found.rows):
            raise RuntimeError(OTHER_ROWS)
        return again.batch

    def _touched(self, block: TableBlock) -> RowMoments | None:
        """Return the moments of rows that samples touched, each with the number of those."""
        table, totals = block.parameter, self._totals
        found = totals.sums.get(table)
        if found is None:
            return None
        rows, values = rows_of(self._first[table], table)
        others, moved = rows_of(self._second[table], table) if table in self._second else (rows, values)
        if not torch.equal(others, rows) or (isinstance(found, RowSums) and not torch.equal(found.rows, rows)):
            raise RuntimeError(OTHER_ROWS)
        sums = found.sums if isinstance(found, RowSums) else found
        count = torch.full((len(rows),), float(totals.samples), dtype=sum_dtype(rows.device), device=rows.device)
        if sums.count is not None:
            count = sums.count.to(count.dtype).reshape(-1)
            if not isinstance(found, RowSums):
                rows = (count > 0).nonzero()[:, 0]
                values, moved, count = values[rows], moved[rows], count[rows]
        if not len(rows):
            return None

        def mean(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            part = part.to(values.dtype).reshape(len(part), -1)
            part = part if len(part) == len(rows) else part[rows]
            return (part / count[:, None].to(part)).reshape(-1)

        total = mean(values * totals.scale)
        assert total is not None
        signed = block.decoupled and self._is_probed
        diff = mean((moved - values) * totals.scale) if signed else mean(sums.diff_abs)
        return RowMoments(rows, BatchMoments(total, total, count, None, mean(sums.grad_sq), diff, mean(sums.diff_sq)))

    def _sums(self, second: Evaluation | None, only: set[Tensor] | None, bases: dict[Tensor, Any]) -> SampleTotals:
        recorder, reduction, _ = self._settings
        here, there = self._evaluation.recording, None if second is None else second.recording
        sums = recorder.sums(here, there, reduction, self._scale, only=only, bases=bases)  # type: ignore[arg-type]
        totals = SampleTotals(sums, here.count, here.count if reduction == "mean" else 1, {}, here.count)
        if self._weights is not None:
            return totals._replace(effective=float(effective_count(self._weights)))
        return added_up(totals, list(self._signs), second is not None, reduction, self._processes)


def added_up(
    totals: SampleTotals, parameters: Sequence[Tensor], pair: bool, reduction: str, processes: Processes
) -> SampleTotals:
    """Return sums over the rows of all processes, with differences if there is a `pair` of evaluations."""
    if processes.size == 1:
        return totals
    kinds = [_kind_of(totals.sums.get(p)) for p in parameters]
    columns, counts = processes.gather_kinds("sums over samples", kinds, totals.samples)
    sums: dict[Tensor, SampleSums | RowSums] = {}
    for p, column in zip(parameters, columns, strict=True):
        if len(set(column) - {0}) > 1:
            raise RuntimeError(MIXED_PROCESSES)
        if any(column):
            sums[p] = totals.sums[p] if p in totals.sums else _no_sums(p, int(max(column)), pair)
    parts = [
        (p, name, part)
        for p, found in sums.items()
        if isinstance(found, SampleSums)
        for name, part in found._asdict().items()
        if part is not None
    ]
    for dtype in sorted({part.dtype for *_, part in parts}, key=str):
        same = [(p, name, part) for p, name, part in parts if part.dtype == dtype]
        flat = torch.cat([part.reshape(-1) for *_, part in same])
        processes.add_up(flat)
        for (p, name, part), total in zip(same, flat.split([part.numel() for *_, part in same]), strict=True):
            sums[p] = sums[p]._replace(**{name: total.view(part.shape)})
    sums = {p: _rows_added_up(s, processes) if isinstance(s, RowSums) else s for p, s in sums.items()}
    samples = int(sum(row[0] for row in counts))
    scale = samples if reduction == "mean" else processes.size
    return totals._replace(sums=sums, samples=samples, scale=scale, effective=samples)


def _kind_of(sums: SampleSums | RowSums | None) -> int:
    if sums is None:
        return 0
    return 3 if isinstance(sums, RowSums) else 1 if sums.count is None else 2


def _no_sums(parameter: Tensor, kind: int, pair: bool) -> SampleSums | RowSums:
    """Return empty sums for a parameter that no row of this process uses, of the kind in other processes."""
    rows = parameter[:0] if kind == 3 else parameter
    sums = empty_sums(rows, pair)
    if kind > 1:
        sums = sums._replace(count=sums.grad_sq.new_zeros(len(rows), 1))
    return RowSums(torch.empty(0, dtype=torch.int64, device=rows.device), sums) if kind == 3 else sums


def _rows_added_up(found: RowSums, processes: Processes) -> RowSums:
    rows, place = torch.unique(torch.cat(processes.gather_rows(found.rows)), return_inverse=True)

    def total(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        parts = torch.cat(processes.gather_rows(part))
        return parts.new_zeros(len(rows), *parts.shape[1:]).index_add_(0, place, parts)

    return RowSums(rows, SampleSums(*map(total, found.sums)))  # type: ignore[arg-type]
