"""The promise as a whole: names, imports, and a test for each guarantee."""

import collections
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
import typing

import chex
import optax
import pytest

import optax_lossscale as ols

PACKAGE = pathlib.Path(ols.__file__).parent
TESTS = pathlib.Path(__file__).parent


def test_the_public_names_are_few_and_documented():
  # The names of a training step, types included.
  assert len(ols.__all__) == 26
  assert ols.__all__ == sorted(ols.__all__)
  for name in ols.__all__:
    assert getattr(ols, name).__doc__, name


@pytest.mark.parametrize("name", ols.__all__)
def test_every_public_name_has_an_example(name):
  assert ">>> " in getattr(ols, name).__doc__


@pytest.mark.parametrize("module", [ols.experimental, ols.hardware])
def test_every_function_of_a_module_has_an_example(module):
  functions = [x for x in vars(module).values() if inspect.isfunction(x)]
  assert functions
  assert all(">>> " in x.__doc__ for x in functions)


def alike(names):
  """Returns those of the names that differ from another by case only."""
  names = set(names)
  counts = collections.Counter(x.lower() for x in names)
  return sorted(x for x in names if counts[x.lower()] > 1)


def test_no_two_public_names_differ_by_case_only():
  # Their pages would overwrite each other on macOS and Windows.
  members = [getattr(ols, name) for name in dir(ols)]
  modules = [ols, *filter(inspect.ismodule, members)]
  for module in modules:
    names = dir(ols) if module is ols else module.__all__
    assert not alike(names), module
    for member in (getattr(module, name) for name in names):
      if inspect.isclass(member):
        assert not alike(x for x in dir(member) if not x.startswith("_"))


def test_the_version_is_that_of_the_installed_package():
  assert ols.__version__ == importlib.metadata.version("optax-lossscale")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["chex", "flax", "matplotlib", "orbax"])
def test_importing_the_library_does_not_load(module):
  program = f"import sys, optax_lossscale; print({module!r} in sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == "False"


@pytest.mark.slow
def test_checking_a_step_without_flax_does_not_load_it():
  program = """
import sys, jax, jax.numpy as jnp, optax, optax_lossscale as ols
tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())
def step(x, state):
  _, grads = ols.scaled_value_and_grad(jnp.sum, state)(x)
  updates, state = tx.update(grads, state, x)
  return x + updates, state
x = jnp.ones(2)
ok = ols.instruments.check_step(step, x, tx.init(x)).ok
print(ok, "flax" in sys.modules)
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == "True False"


def test_modules_for_flax_load_when_they_are_used():
  for name in ("checkpoints", "linen", "nnx"):
    assert name in dir(ols)
    assert getattr(ols, name).__name__ == f"optax_lossscale.{name}"
  with pytest.raises(AttributeError, match="has no attribute 'lines'"):
    _ = ols.lines


def test_only_public_interfaces_of_jax_and_optax_are_used():
  for file in PACKAGE.rglob("*.py"):
    found = re.findall(r"(?:jax|optax|flax)\._src", file.read_text())
    assert not found, file


def test_links_between_files_lead_somewhere():
  root = TESTS.parent
  pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
  pages += root.glob("examples/*.md")
  assert len(pages) > 10
  for page in pages:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [x for x in links if not (page.parent / x).exists()]
    assert not missing, page


def test_annotations_name_types_that_exist():
  # chex is imported for type checkers alone, so that importing is quick.
  names = {"chex": chex, "ArrayTree": chex.ArrayTree}
  modules = ols, ols.experimental, ols.hardware
  members = [getattr(x, name) for x in modules for name in x.__all__]
  functions = [x for x in members if callable(x)]
  update = ols.loss_scaling(optax.identity(), ols.FixedLossScale(1)).update
  rule = ols.LossScale
  for function in [*functions, update, rule.update, rule.stalled]:
    typing.get_type_hints(function, localns=names)
