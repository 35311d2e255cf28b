"""From gradients to `BatchStatistics`, whatever a sample is: a minibatch, a micro-batch, a replica, or a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vsgd.torch.engine import BatchStatistics
from vsgd.torch.replicas import ALONE, Replicas
from vsgd.torch.samples import RowSums, SampleSums
from vsgd.torch.samples.sums import empty_sums
from vsgd.torch.storage import Dense, Table, precision

Grads = dict[Tensor, Tensor]
"""The gradient of each parameter that has one, after one evaluation; already unscaled."""

OTHER_ROWS = "the closure touched other rows when called again; it must compute the same loss twice"
MIXED_PROCESSES = "a parameter is a table in one process and a matrix in another; use it in the same way in all"
MIXED = "a parameter's gradient was sparse in one micro-batch and dense in another; choose one"


class SampleTotals(NamedTuple):
    """Sums over the rows of one minibatch, as `vsgd.torch.samples` takes them."""

    sums: dict[Tensor, SampleSums | RowSums]
    samples: int
    scale: float
    """What a gradient is multiplied by to be the sum over the rows."""
    directions: dict[Tensor, Tensor]
    """Weighted sums that the step goes along, if rows are reweighted."""
    effective: float
    """The number of samples; with weighted sums, the one that belongs to them."""


def counts_rows(parameter: Tensor, grad: Tensor, totals: SampleTotals | None) -> bool:
    """Do the rows of this parameter have counts of their own?"""
    if parameter.dim() == 0 or len(parameter) == 1:
        return False
    sums = None if totals is None else totals.sums.get(parameter)
    return grad.is_sparse or isinstance(sums, RowSums) or (sums is not None and sums.count is not None)


class RowStatistics(NamedTuple):
    """`BatchStatistics` of the touched rows of a table."""

    rows: Tensor
    batch: BatchStatistics


def reached(grads: Sequence[Grads], probed: Sequence[Grads] | None, parameter: Tensor) -> list[int]:
    """The evaluations in which a parameter has a gradient, twice if there were two."""
    both = [parameter in first and (probed is None or parameter in probed[k]) for k, first in enumerate(grads)]
    return [k for k, has in enumerate(both) if has]


def of_dense(
    dense: Dense,
    grads: Sequence[Grads],
    probed: Sequence[Grads] | None,
    totals: SampleTotals | None,
    replicas: Replicas = ALONE,
) -> BatchStatistics:
    """Statistics of all parameters of a storage, in the order of its buffers."""
    if totals is not None:
        return _of_samples(dense, grads[0], None if probed is None else probed[0], totals)
    hits = [reached(grads, probed, p) for p in dense.parameters]
    if len(grads) > 1 or replicas.are_samples:
        return _of_micro_batches(dense, grads, probed, hits, replicas)
    count = torch.tensor([float(len(hit)) for hit in hits], dtype=torch.float64)
    first = dense.gather([as_dense(grads[0].get(p)) for p in dense.parameters], "grad")
    second = None
    if probed is not None:
        check_apart(grads[0], probed[0])
        second = dense.into(dense.gather([as_dense(probed[0].get(p)) for p in dense.parameters], "probed"))
    return BatchStatistics(grad=dense.into(first), plain_grad=first, counts=count, probed_grad=second)


def check_apart(first: Grads, second: Grads) -> None:
    """Two gradients in the same memory are one."""
    for parameter, grad in first.items():
        other = second.get(parameter)
        if other is not None and not grad.is_sparse and grad.data_ptr() == other.data_ptr() != 0:
            raise RuntimeError(
                "the closure wrote both gradients to the same memory; let backward() make .grad, or clone it"
            )


def as_dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _of_micro_batches(
    dense: Dense,
    grads: Sequence[Grads],
    probed: Sequence[Grads] | None,
    hits: list[list[int]],
    replicas: Replicas,
) -> BatchStatistics:
    """Each micro-batch of each replica is a sample; those in which a parameter has no gradient do not count for it."""
    count = torch.tensor([float(len(hit)) for hit in hits], dtype=torch.float64)
    theta = dense.block.theta
    sums = theta.new_zeros(2 if probed is None else 4, len(theta))
    for k in range(len(grads)):
        wanted = [k in hit for hit in hits]
        first = dense.into(_gather_some(dense, grads[k], wanted, "grad"))
        terms = [first, first * first]
        if probed is not None:
            diff = dense.into(_gather_some(dense, probed[k], wanted, "probed")) - first
            terms += [diff if dense.block.decoupled else diff.abs(), diff * diff]
        for total, term in zip(sums, terms, strict=True):
            total += term
    if replicas.are_samples:
        replicas.add_up(sums)
        count *= replicas.size
    divisor = torch.repeat_interleave(count.clamp(min=1), torch.tensor(dense.block.lengths)).to(theta)
    means = sums / divisor
    return BatchStatistics(means[0], dense.back(means[0]), count, None, means[1], *means[2:])


def _gather_some(dense: Dense, grads: Grads, wanted: list[bool], name: str) -> Tensor:
    parts = [as_dense(grads[p]) if take else None for p, take in zip(dense.parameters, wanted, strict=True)]
    return dense.gather(parts, name)


def _of_samples(dense: Dense, grads: Grads, probed: Grads | None, totals: SampleTotals) -> BatchStatistics:
    """Every row of the minibatch is a sample; its sums are known without its gradient."""
    found = [totals.sums.get(p) for p in dense.parameters]
    known = [sums.sums if isinstance(sums, RowSums) else sums for sums in found]  # a table of one row is no table here
    n = totals.samples
    count = torch.tensor([totals.effective if p in grads else 0.0 for p in dense.parameters], dtype=torch.float64)

    def mean_of(name: str) -> Tensor | None:
        parts = [None if sums is None else getattr(sums, name) for sums in known]
        return None if all(part is None for part in parts) else dense.gather(parts, name) / n

    plain = dense.gather([as_dense(grads.get(p)) for p in dense.parameters], "grad") * (totals.scale / n)
    grad, diff, direction = dense.into(plain), mean_of("diff_abs"), None
    if diff is not None and probed is not None and dense.block.decoupled:
        moved = dense.gather([as_dense(probed.get(p)) for p in dense.parameters], "probed") * (totals.scale / n)
        diff = dense.into(moved) - grad
    if totals.directions:
        direction = dense.into(dense.gather([totals.directions.get(p) for p in dense.parameters], "direction"))
    return BatchStatistics(grad, plain, count, None, mean_of("grad_sq"), diff, mean_of("diff_sq"), direction)


# --- tables -------------------------------------------------------------------------------------------------------


def of_table(
    storage: Table,
    grads: Sequence[Grads],
    probed: Sequence[Grads] | None,
    totals: SampleTotals | None,
    replicas: Replicas = ALONE,
) -> RowStatistics | None:
    """Statistics of the touched rows of a table; None if no sample touched any."""
    table = storage.parameter
    hits = reached(grads, probed, table)
    if not hits:
        return None
    if totals is not None:
        return _of_touched_rows(storage, grads[0], None if probed is None else probed[0], totals)
    first = [_rows_of(grads[k][table], table) for k in hits]
    second = None if probed is None else [_rows_of(probed[k][table], table) for k in hits]
    if replicas.are_samples:
        first = _of_all(first, replicas)
        second = None if second is None else _of_all(second, replicas)
    if second is not None and not all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True)):
        raise RuntimeError(OTHER_ROWS)
    if len({grads[k][table].is_sparse for k in hits}) > 1:
        raise RuntimeError(MIXED)
    rows, values = first[0]
    if sum(len(rows) for rows, _ in first) == 0:
        return None
    if len(first) == 1:
        count = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
        shifted = None if second is None else second[0][1].reshape(-1)
        return RowStatistics(rows, BatchStatistics(values.reshape(-1), values.reshape(-1), count, shifted))
    touched, place = torch.unique(torch.cat([rows for rows, _ in first]), return_inverse=True)
    count = torch.bincount(place, minlength=len(touched)).double()
    values = torch.cat([values for _, values in first])
    terms = [values, values * values]
    if second is not None:
        diff = torch.cat([values for _, values in second]) - values
        terms += [diff if storage.decoupled else diff.abs(), diff * diff]
    sums = (term.new_zeros(len(touched), term.shape[1]).index_add_(0, place, term) for term in terms)
    means = [(total / count[:, None].to(total)).reshape(-1) for total in sums]
    return RowStatistics(touched, BatchStatistics(means[0], means[0], count, None, means[1], *means[2:]))


def _rows_of(grad: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows a gradient touches, and what it is there, rows × columns."""
    dtype, width = precision(table.dtype), table[0].numel()
    if not grad.is_sparse:
        return torch.arange(len(table), device=table.device), grad.detach().to(dtype).reshape(len(table), width)
    grad = grad.detach().coalesce()
    if grad.sparse_dim() != 1:
        raise ValueError("a sparse gradient must be sparse in its first axis only, as that of an embedding is")
    rows = grad.indices()[0]
    return rows, grad.values().to(dtype).reshape(len(rows), width)


def _of_all(found: list[tuple[Tensor, Tensor]], replicas: Replicas) -> list[tuple[Tensor, Tensor]]:
    """Rows and values of all replicas."""
    gathered = [zip(*map(replicas.gather_rows, each), strict=True) for each in found]
    return [pair for pairs in gathered for pair in pairs]


def _of_touched_rows(storage: Table, grads: Grads, probed: Grads | None, totals: SampleTotals) -> RowStatistics | None:
    """Rows of a table that samples touched, each with the number of those."""
    table = storage.parameter
    found = totals.sums.get(table)
    if found is None:
        return None
    rows, values = _rows_of(grads[table], table)
    others, moved = (rows, values) if probed is None else _rows_of(probed[table], table)
    if not torch.equal(others, rows):
        raise RuntimeError(OTHER_ROWS)
    if isinstance(found, RowSums):
        if not torch.equal(found.rows, rows):
            raise RuntimeError(OTHER_ROWS)
        sums = found.sums
    else:
        sums = found
    count = torch.full((len(rows),), float(totals.samples), dtype=torch.float64, device=rows.device)
    if sums.count is not None:
        count = sums.count.double().reshape(-1)
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
    diff = mean((moved - values) * totals.scale) if storage.decoupled and probed is not None else mean(sums.diff_abs)
    batch = BatchStatistics(total, total, count, None, mean(sums.grad_sq), diff, mean(sums.diff_sq))
    return RowStatistics(rows, batch)


# --- samples of other processes ---------------------------------------------------------------------------------------


def added_up(
    totals: SampleTotals, parameters: Sequence[Tensor], pair: bool, reduction: str, replicas: Replicas
) -> SampleTotals:
    """Sums over the rows of all processes, whose gradients come averaged; a `pair` of evaluations has differences."""
    if replicas.size == 1:
        return totals
    kinds = [_kind_of(totals.sums.get(p)) for p in parameters]
    columns, counts = replicas.gather_kinds("sums over samples", kinds, totals.samples)
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
        replicas.add_up(flat)
        for (p, name, part), total in zip(same, flat.split([part.numel() for *_, part in same]), strict=True):
            sums[p] = sums[p]._replace(**{name: total.view(part.shape)})
    sums = {p: _rows_added_up(s, replicas) if isinstance(s, RowSums) else s for p, s in sums.items()}
    samples = int(sum(row[0] for row in counts))
    scale = samples if reduction == "mean" else replicas.size
    return totals._replace(sums=sums, samples=samples, scale=scale, effective=samples)


def _kind_of(sums: SampleSums | RowSums | None) -> int:
    if sums is None:
        return 0
    return 3 if isinstance(sums, RowSums) else 1 if sums.count is None else 2


def _no_sums(parameter: Tensor, kind: int, pair: bool) -> SampleSums | RowSums:
    """The sums of a parameter that no row of this process has used, of the kind that other processes have."""
    rows = parameter[:0] if kind == 3 else parameter
    sums = empty_sums(rows, pair)
    if kind > 1:
        sums = sums._replace(count=sums.grad_sq.new_zeros(len(rows), 1))
    return RowSums(torch.empty(0, dtype=torch.int64, device=rows.device), sums) if kind == 3 else sums


def _rows_added_up(found: RowSums, replicas: Replicas) -> RowSums:
    rows, place = torch.unique(torch.cat(replicas.gather_rows(found.rows)), return_inverse=True)

    def total(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        parts = torch.cat(replicas.gather_rows(part))
        return parts.new_zeros(len(rows), *parts.shape[1:]).index_add_(0, place, parts)

    return RowSums(rows, SampleSums(*map(total, found.sums)))  # type: ignore[arg-type]
