"""Call the algorithm step by step: estimate a median, whose loss |θ − x| has a kink.

python examples/rule.py
"""

import numpy as np

import vsgd

rng = np.random.default_rng(0)
target = np.array([3.0, -2.0])
theta = np.zeros(2)
state = vsgd.init(theta)
for _ in range(500):
    samples = target + rng.standard_normal((10, 2))  # a minibatch of 10
    grads = np.sign(theta - samples)  # gradients of the loss |θ − x|
    delta = vsgd.probe(state, grads.mean(0), count=10)  # offset of the second gradient
    curvs = vsgd.curvature(grads, np.sign(theta + delta - samples), delta)
    batch = vsgd.Moments(grad=grads.mean(0), grad_sq=(grads**2).mean(0), curv=curvs.mean(0), curv_sq=(curvs**2).mean(0))
    theta, state, info = vsgd.step(theta, state, batch, count=10)

print("estimated median", theta.round(2), "of", target, "with rates", info.rate.round(4))
