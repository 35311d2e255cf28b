"""A simulated accelerator, the device "sim": built from `device.cpp` once, and registered when this module is imported.

A process that imports this has another `torch.accelerator.current_accelerator()` from then on.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.utils import cpp_extension

from vsgd.torch.devices import runs_on

SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(__file__).parents[2] / ".cache" / "device"
COMPILER = os.environ.get("CXX", "c++")

LINEAR_ALGEBRA = {
    f"aten::{name}"
    for name in (
        *(
            "linalg_qr",
            "geqrf",
            "linalg_householder_product",
            "linalg_eigh",
            "_linalg_eigh",
            "linalg_eig",
            "_linalg_svd",
        ),
        *("linalg_cholesky_ex", "cholesky", "linalg_inv_ex", "_linalg_solve_ex", "linalg_lu_factor_ex"),
        *("linalg_solve_triangular", "triangular_solve"),
    )
}
"""Factorizations and solvers, which MPS mostly does not have."""


def build() -> Path:
    """Compile the extension unless it is cached for this source, torch and Python. Return its path."""
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    target = CACHE / key / "simulated_core.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        command = [
            *(COMPILER, "-shared", "-fPIC", "-O0", "-std=c++20", str(SOURCE), "-o", str(partial)),
            *("-DTORCH_EXTENSION_NAME=simulated_core", f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"),
            *(f"-I{path}" for path in (sysconfig.get_path("include"), *cpp_extension.include_paths())),
            *(f"-L{path}" for path in cpp_extension.library_paths()),
            *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        ]
        subprocess.run(command, check=True)
        partial.replace(target)  # atomically, since another process may build it, too
    return target


def load(path: Path):
    spec = importlib.util.spec_from_file_location("simulated_core", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DeviceModule:
    """`torch.sim`, as `torch.cuda` is for CUDA."""

    device = nullcontext

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def manual_seed_all(self, seed):
        core.manual_seed(seed % 2**63)

    def get_rng_state(self, device="sim"):
        return core.get_rng_state()

    def set_rng_state(self, state, device="sim"):
        core.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


torch.utils.rename_privateuse1_backend("sim")
core = load(build())
torch._register_device_module("sim", DeviceModule())  # as documented for PrivateUse1
torch.utils.generate_methods_for_privateuse1_backend()
atexit.register(time.sleep, 0.2)  # the thread of the last backward pass must end before the interpreter


# --- kernels that cpu_fallback cannot run -------------------------------------------------------------------------


@contextmanager
def silent():
    """Disable counters and restrictions within a context."""
    core.silence(True)
    try:
        yield
    finally:
        core.silence(False)


def on_cpu(name, function):
    """Return a kernel that runs `function` on copies on the CPU."""

    def move(values, device):
        return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]

    def run(*args):
        core.report("launch", f"aten::{name}")
        with silent():
            found = function(*move(args, "cpu"))
            return tuple(move(found, "sim")) if isinstance(found, tuple) else found.to("sim")

    return run


def convolution_backward(grad, x, weight, *options):
    return torch.ops.aten.convolution_backward(grad, x, weight, [len(weight)], *options)


def gru_cell(input_gates, hidden_gates, hidden, input_bias=None, hidden_bias=None):
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (xr, xz, xn), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hn], 1)


def gru_cell_backward(grad, workspace, has_bias):
    r, z, n, hidden, hn = workspace.chunk(5, 1)
    grad_z, grad_n = grad * (hidden - n) * (1 - z) * z, grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hn * (1 - r) * r
    input_gates, hidden_gates = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    return input_gates, hidden_gates, grad * z, input_gates.sum(0), hidden_gates.sum(0)


def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    """Return BatchNorm that also updates running statistics, which the schema of the operator does not declare."""
    core.report("launch", "aten::native_batch_norm")
    with silent():
        given = [None if each is None else each.cpu() for each in (x, weight, bias, mean, var)]
        result = torch.native_batch_norm(*given, training, momentum, eps)
        for ours, copy in zip((mean, var), given[3:], strict=True):
            if ours is not None and training:
                ours.copy_(copy)
        return tuple(each.to("sim") for each in result)


kernels = torch.library.Library("aten", "IMPL")
for name, kernel in {
    "native_batch_norm": batch_norm,
    "convolution_overrideable": on_cpu("convolution", torch.ops.aten.convolution),
    "convolution_backward_overrideable": on_cpu("convolution_backward", convolution_backward),
    "_thnn_fused_gru_cell": on_cpu("gru_cell", gru_cell),
    "_thnn_fused_gru_cell_backward": on_cpu("gru_cell_backward", gru_cell_backward),
}.items():
    kernels.impl(name, kernel, "PrivateUse1")


# --- switches -----------------------------------------------------------------------------------------------------


@contextmanager
def switched(*, float64=True, linear_algebra=True, opaque_addresses=False):
    """Disable float64 or linear algebra within a context, or make addresses of new tensors opaque."""
    core.refuse_float64(not float64)
    core.refuse(set() if linear_algebra else LINEAR_ALGEBRA)
    core.use_opaque_addresses(opaque_addresses)
    runs_on.cache_clear()
    try:
        yield
    finally:
        core.refuse_float64(False)
        core.refuse(set())
        core.use_opaque_addresses(False)
        runs_on.cache_clear()


class Events:
    """Launches and synchronizations, counted by operator and by line of a package.

    with Events() as events:
        opt.step(closure)
    events.total("sync"), events.table("sync")
    """

    def __init__(self, package: str = "/src/vsgd/"):
        self._package = package
        self._found: Counter[tuple[str, str, str]] = Counter()
        self._paused = False

    def __enter__(self):
        core.listen(self._hear)
        return self

    def __exit__(self, *_):
        core.listen(None)

    @contextmanager
    def paused(self):
        """Stop counting within a context, as in the closure of the user."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _hear(self, kind: str, operator: str):
        if not self._paused:
            self._found[kind, operator, self._place()] += 1

    def _place(self) -> str:
        """Return file and line of the innermost frame of the package."""
        for frame, line in traceback.walk_stack(None):
            name = frame.f_code.co_filename
            if self._package in name:
                return f"{name.rsplit(self._package)[-1]}:{line}"
        return "elsewhere"

    def total(self, kind: str) -> int:
        """Return the number of events of a kind: "launch", "sync" or "copy" (without synchronization)."""
        return sum(count for (found, *_), count in self._found.items() if found == kind)

    def table(self, kind: str) -> str:
        """Return the events of a kind, one line for each operator and place, the most frequent first."""
        rows = [(count, *rest) for (found, *rest), count in self._found.most_common() if found == kind]
        return "\n".join(f"{count:5} {operator:30} {place}" for count, operator, place in rows)
