"""Uses the installed package as a stranger would, in an empty environment.

`.ci/run package` runs it with nothing installed but the package and what that
requires, from a folder outside the repository.
"""

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

NAME = "optax-lossscale"


def check_files():
  """The package is the installed one, and has what type checkers look for."""
  package = pathlib.Path(ols.__file__).parent
  assert package.is_relative_to(sys.prefix), package
  assert (package / "py.typed").exists()
  assert ols.__version__ == importlib.metadata.version(NAME)
  files = {path.name for path in importlib.metadata.files(NAME)}
  assert "LICENSE" in files
  # What is for developers stays in the repository.
  for name in ("benchmarks", "tests"):
    assert importlib.util.find_spec(name) is None, name


def check_imports():
  """Every public module is imported, without what only the extras install."""
  for name in dir(ols):
    if name != "plot":
      getattr(ols, name)
  assert "matplotlib" not in sys.modules
  try:
    _ = ols.plot
  except ModuleNotFoundError as error:
    assert "ols.plot needs matplotlib" in str(error)
  else:
    raise AssertionError("The environment is not empty: it has matplotlib.")


def check_train_step():
  """A step trains, and one that overflows changes nothing but S."""

  def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)

  tx = ols.loss_scaling(
    optax.adam(0.1),
    ols.DynamicLossScale(),
    check=ols.nonfinite(jnp.float16),
  )

  @jax.jit
  def train_step(params, opt_state, x):
    value_and_grad = ols.scaled_value_and_grad(ols.autocast(loss_fn), opt_state)
    loss, scaled_grads = value_and_grad(params, x)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = {"w": jnp.ones((4, 2))}
  params, opt_state, loss = train_step(params, tx.init(params), jnp.eye(4))
  assert (loss, ols.get_loss_scale(opt_state)) == (1, 2**15)
  assert (params["w"] < 1).all()
  # S times the derivative of the loss by an output, 7, is above 65504.
  after, opt_state, _ = train_step(params, opt_state, 2.0**5 * jnp.eye(4))
  assert (after["w"] == params["w"]).all()
  assert ols.get_loss_scale(opt_state) == 2**14
  assert (opt_state.applied_steps, opt_state.skipped_steps) == (1, 1)


def check_program():
  """The program is installed, and needs no extra to say what it does."""
  program = pathlib.Path(sys.executable).parent / NAME
  for option, words in (("--help", "doctor"), ("--version", ols.__version__)):
    done = subprocess.run(
      [program, option], capture_output=True, text=True, check=True
    )
    assert words in done.stdout, done.stdout


if __name__ == "__main__":
  check_files()
  check_imports()
  check_train_step()
  check_program()
  print(
    f"The installed {NAME} {ols.__version__} works on Python",
    sys.version.split()[0],
  )
