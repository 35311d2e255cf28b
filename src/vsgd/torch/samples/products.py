"""Sums over outer products: Σ_j g_j², Σ_j |g_j − g'_j| and Σ_j (g_j − g'_j)² for g_j = b_j a_jᵀ, without temporaries.

The last could be had as three matrix products, but their difference loses all digits when both points are close.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsgd.jit import compiled

WIDTH = 256
"""Columns of a block. A constant, so that the compiler knows how far apart the halves of a packed row are."""
DEPTH = 128
"""Samples of a block. Two packed copies of WIDTH columns of each, 256 kB in all, stay in the second-level cache."""


def accumulate(
    inputs: Any,
    grads: Any,
    inputs_there: Any,
    grads_there: Any,
    grad_sq: Any,
    diff_abs: Any,
    diff_sq: Any,
    first: int,
    last: int,
) -> None:
    """Fill the rows first … last of the results. Inputs are samples × columns, grads are rows × samples.

    Both inputs of a sample are packed side by side, and so are the sums, which leaves the compiler few enough
    pointers to prove that nothing overlaps; otherwise it does not vectorise. Samples are taken four at a time, and
    those whose output gradients are zero at both points (half of them behind a ReLU) are left out.
    """
    samples, columns = inputs.shape
    packed = np.empty(DEPTH * 2 * WIDTH, inputs.dtype)
    sums = np.empty(3 * WIDTH, inputs.dtype)
    active = np.empty(DEPTH, np.int64)
    for left in range(0, columns, WIDTH):
        width = min(WIDTH, columns - left)
        for top in range(0, samples, DEPTH):
            depth = min(DEPTH, samples - top)
            packed[:] = 0
            for j in range(depth):
                start = j * 2 * WIDTH
                packed[start : start + width] = inputs[top + j, left : left + width]
                packed[start + WIDTH : start + WIDTH + width] = inputs_there[top + j, left : left + width]
            for row in range(first, last):
                count = 0
                for j in range(depth):
                    # no branch, which would be mispredicted half the time
                    active[count] = j
                    count += (grads[row, top + j] != 0) | (grads_there[row, top + j] != 0)
                sums[:] = 0
                whole = count - count % 4
                for k in range(0, whole, 4):
                    j0, j1, j2, j3 = active[k], active[k + 1], active[k + 2], active[k + 3]
                    b0, b1, b2, b3 = (
                        grads[row, top + j0],
                        grads[row, top + j1],
                        grads[row, top + j2],
                        grads[row, top + j3],
                    )
                    c0, c1, c2, c3 = (
                        grads_there[row, top + j0],
                        grads_there[row, top + j1],
                        grads_there[row, top + j2],
                        grads_there[row, top + j3],
                    )
                    a0 = packed[j0 * 2 * WIDTH : (j0 + 1) * 2 * WIDTH]
                    a1 = packed[j1 * 2 * WIDTH : (j1 + 1) * 2 * WIDTH]
                    a2 = packed[j2 * 2 * WIDTH : (j2 + 1) * 2 * WIDTH]
                    a3 = packed[j3 * 2 * WIDTH : (j3 + 1) * 2 * WIDTH]
                    for i in range(WIDTH):
                        g0 = b0 * a0[i]
                        d0 = g0 - c0 * a0[i + WIDTH]
                        g1 = b1 * a1[i]
                        d1 = g1 - c1 * a1[i + WIDTH]
                        g2 = b2 * a2[i]
                        d2 = g2 - c2 * a2[i + WIDTH]
                        g3 = b3 * a3[i]
                        d3 = g3 - c3 * a3[i + WIDTH]
                        sums[i] += (g0 * g0 + g1 * g1) + (g2 * g2 + g3 * g3)
                        sums[i + WIDTH] += (abs(d0) + abs(d1)) + (abs(d2) + abs(d3))
                        sums[i + 2 * WIDTH] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
                for k in range(whole, count):
                    j0 = active[k]
                    b0, c0 = grads[row, top + j0], grads_there[row, top + j0]
                    a0 = packed[j0 * 2 * WIDTH : (j0 + 1) * 2 * WIDTH]
                    for i in range(WIDTH):
                        g0 = b0 * a0[i]
                        d0 = g0 - c0 * a0[i + WIDTH]
                        sums[i] += g0 * g0
                        sums[i + WIDTH] += abs(d0)
                        sums[i + 2 * WIDTH] += d0 * d0
                window = slice(left, left + width)
                if top == 0:
                    grad_sq[row, window] = sums[:width]
                    diff_abs[row, window] = sums[WIDTH : WIDTH + width]
                    diff_sq[row, window] = sums[2 * WIDTH : 2 * WIDTH + width]
                else:
                    grad_sq[row, window] += sums[:width]
                    diff_abs[row, window] += sums[WIDTH : WIDTH + width]
                    diff_sq[row, window] += sums[2 * WIDTH : 2 * WIDTH + width]


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Plain threads, as compiled code holds no lock: they cannot quarrel with torch's own, which idle meanwhile."""
    return ThreadPoolExecutor(threads, thread_name_prefix="vsgd")


def summed_products(inputs: Tensor, grads: Tensor, inputs_there: Tensor, grads_there: Tensor) -> list[Tensor]:
    """The three sums, rows × columns, for inputs n × columns and output gradients n × rows on the CPU."""
    operands = [part.detach().contiguous().numpy() for part in (inputs, grads.t(), inputs_there, grads_there.t())]
    rows = grads.shape[1]
    results = [torch.empty(rows, inputs.shape[1], dtype=inputs.dtype, device="cpu") for _ in range(3)]
    arrays = [result.numpy() for result in results]
    kernel, threads = compiled(accumulate), torch.get_num_threads()
    edges = [rows * k // threads for k in range(threads + 1)]

    def fill(first: int, last: int) -> None:
        kernel(*operands, *arrays, first, last)

    if threads == 1:
        fill(0, rows)
    else:
        list(pool(threads).map(fill, edges[:-1], edges[1:]))
    return results
