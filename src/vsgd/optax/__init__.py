"""JAX: a gradient transformation for optax with no learning rate to choose.

    tx = vsgd.optax.vsgd()
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, batch):
        grad_fn = lambda p: jax.grad(loss)(p, batch)
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    weights = vsgd.optax.eval_params(params, state)  # the ones to evaluate and to save

Parameters are the iterates; their average is part of the state.
"""

from vsgd.errors import install

try:
    import jax  # noqa: F401
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError(f"vsgd.optax needs {error.name}: {install('jax')}", name=error.name) from error

from vsgd.optax.coordinates import gradient_flops
from vsgd.optax.samples import per_sample, unmasked
from vsgd.optax.state import State
from vsgd.optax.transformation import eval_params, vsgd

__all__ = ["State", "eval_params", "gradient_flops", "per_sample", "unmasked", "vsgd"]
