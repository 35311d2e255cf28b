"""Training on the device equals training on the CPU."""

import io

import pytest
import torch
from device_cases import CASES, Training, cnn

from vsgd.torch import VSGD


def assert_equal(here, there, tolerance):
    torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_float64_equals_the_cpu(name):
    here, there = Training(CASES[name], "cpu"), Training(CASES[name], "sim")
    assert_equal(here.run(50), there.run(50), 1e-8)
    assert_equal(here.weights(), there.weights(), 1e-8)


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_cpu_without_float64_and_linear_algebra(name, sim):
    """Compare to 1e-5, or to the effect of a relative change of all weights by 1e-7 on the CPU."""
    here, rounded = Training(CASES[name], "cpu", torch.float32), Training(CASES[name], "cpu", torch.float32)
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    expected = here.run(5)
    rounding = max(abs(a - b) for a, b in zip(expected, rounded.run(5), strict=True))
    with sim.switched(float64=False, linear_algebra=False, opaque_addresses=True):
        losses = Training(CASES[name], "sim", torch.float32).run(5)
    assert_equal(expected[:4], losses[:4], 1e-5)  # weights change after the fourth step
    assert_equal(expected, losses, max(1e-5, 2 * rounding))


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("CNN with BatchNorm", "cpu", "sim"),
        ("CNN with BatchNorm", "sim", "cpu"),
        ("sparse table", "cpu", "sim"),
        ("sparse table", "sim", "cpu"),
        ("per-sample", "sim", "sim"),
    ],
)
def test_checkpoint_continues_on_another_device(name, source, target):
    uninterrupted, before, after = (Training(CASES[name], device) for device in ("cpu", source, target))
    before.run(12)
    file = io.BytesIO()
    torch.save({"model": before.model.state_dict(), "opt": before.opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=target)
    after.model.load_state_dict(saved["model"])
    after.opt.load_state_dict(saved["opt"])
    after.steps = 12
    assert_equal(uninterrupted.run(24)[12:], after.run(12), 1e-8)
    assert_equal(uninterrupted.weights(), after.weights(), 1e-8)


def test_parameters_on_two_devices_equal_the_cpu():
    def losses(device):
        torch.manual_seed(0)
        head, tail = torch.nn.Linear(6, 5).double(), torch.nn.Linear(5, 1).double().to(device)
        opt, x = VSGD([*head.parameters(), *tail.parameters()]), torch.randn(8, 6).double()
        return [float(opt.minimize(lambda: tail(head(x).tanh().to(device)).square().mean())) for _ in range(20)]

    assert_equal(losses("cpu"), losses("sim"), 1e-8)


def test_bias_before_batch_norm_leaves_the_probing_schedule_alone():
    """Its gradient is rounding, which differs between devices."""
    case = CASES["CNN with BatchNorm"]._replace(build=lambda: cnn(bias=True))
    runs = [Training(case, device) for device in ("cpu", "sim")]
    probes = [[(run.step(), run.opt.param_groups[0]["unprobed"]) for _ in range(50)] for run in runs]
    assert_equal(*probes, 1e-8)
