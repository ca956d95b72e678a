"""Loss scalers of JAX libraries.

- `flax`: flax and jax.
- `jmp`: jmp and jax.
"""


def _step(dynamic_scale, parameter, slope):
  def loss(parameter):
    return parameter * slope

  return dynamic_scale.value_and_grad(loss)(parameter)


class Flax:
  """`value_and_grad` of a finite or infinite loss, in jit as documented."""

  ORIGINAL = "flax.training.dynamic_scale.DynamicScale"
  FAILURES = ()
  ARGUMENTS = (
    {"growth_interval": 7, "minimum_scale": 1.0},
    {
      "scale": 2.0**120,
      "growth_factor": 16.0,
      "backoff_factor": 0.0625,
      "growth_interval": 1,
    },
    {"scale": 2.0**-120, "growth_interval": 2},
    {
      "scale": 8.0,
      "growth_factor": 4.0,
      "growth_interval": 3,
      "minimum_scale": 0.25,
    },
    {
      "scale": 1000.0,
      "growth_factor": 1.5,
      "backoff_factor": 0.75,
      "growth_interval": 2,
      "minimum_scale": 1.0,
    },
    {
      "scale": 100.0,
      "growth_factor": 3.0,
      "backoff_factor": 0.1,
      "growth_interval": 5,
      "minimum_scale": 0.0001,
    },
  )

  @staticmethod
  def version():
    import flax
    import jax

    return f"flax {flax.__version__}, jax {jax.__version__}"

  def __init__(self, **arguments):
    from flax.training import dynamic_scale
    import jax

    self._step = jax.jit(_step)
    self._dynamic_scale = dynamic_scale.DynamicScale(**arguments)

  def update(self, overflow):
    # The slope 0 has a finite gradient at every S.
    slope = float("inf") if overflow else 0.0
    self._dynamic_scale, finite, _, _ = self._step(
      self._dynamic_scale, 1.0, slope
    )
    if bool(finite) == overflow:
      raise RuntimeError("the original saw another overflow than meant")

  def scale(self):
    return float(self._dynamic_scale.scale)

  def state_dict(self):
    from flax import serialization

    return serialization.to_state_dict(self._dynamic_scale)

  def load_state_dict(self, state_dict):
    from flax import serialization

    self._dynamic_scale = serialization.from_state_dict(
      self._dynamic_scale, state_dict
    )


class Jmp:
  """`adjust` outside of jit, where it is the rule as written.

  The original is a pytree without `min_loss_scale`, and so has the default one
  again wherever it crosses into jit. Inside, XLA also makes `S / factor` a
  product with the reciprocal, another rounding where `factor` is no power of
  two.
  """

  ORIGINAL = "jmp.DynamicLossScale"
  FAILURES = ()
  ARGUMENTS = (
    {"loss_scale": 2.0**15, "period": 7},
    {"loss_scale": 2.0**120, "period": 1, "factor": 16},
    {"loss_scale": 8.0, "period": 2},
    {"loss_scale": 0.5, "period": 3, "min_loss_scale": 2.0**-10},
    {"loss_scale": 1000.0, "period": 2, "factor": 1.5},
    {
      "loss_scale": 100.0,
      "period": 5,
      "factor": 3,
      "min_loss_scale": 0.01,
    },
  )

  @staticmethod
  def version():
    import importlib.metadata

    import jax

    return f"jmp {importlib.metadata.version('jmp')}, jax {jax.__version__}"

  def __init__(self, **arguments):
    import jax.numpy as jnp
    import jmp

    arguments["loss_scale"] = jnp.asarray(arguments["loss_scale"], jnp.float32)
    if "min_loss_scale" in arguments:
      arguments["min_loss_scale"] = jnp.asarray(
        arguments["min_loss_scale"], jnp.float32
      )
    self._loss_scale = jmp.DynamicLossScale(**arguments)

  def update(self, overflow):
    import jax.numpy as jnp
    import jmp

    gradient = jnp.asarray(float("inf") if overflow else 0.0)
    self._loss_scale = self._loss_scale.adjust(jmp.all_finite(gradient))

  def scale(self):
    return float(self._loss_scale.loss_scale)

  # The two leaves of the pytree, which are what a checkpoint of it holds, under
  # the names of the attributes.
  def state_dict(self):
    return {
      "loss_scale": self._loss_scale.loss_scale,
      "counter": self._loss_scale.counter,
    }

  def load_state_dict(self, state_dict):
    import dataclasses

    self._loss_scale = dataclasses.replace(self._loss_scale, **state_dict)


SYSTEMS = {"flax": Flax, "jmp": Jmp}
