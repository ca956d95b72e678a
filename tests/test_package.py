"""The promise as a whole: names, imports, and a test for each guarantee."""

import ast
import collections
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
import typing

import optax
import pytest

import optax_lossscale as ols

PACKAGE = pathlib.Path(ols.__file__).parent

# The most names `Any` in the package's annotations. Lower it when some go.
MOST_ANY = 184


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


def test_importing_the_library_and_its_presets_looks_for_no_other_framework():
  # Also none that is not installed here.
  program = """
import sys
others = "flax matplotlib orbax torch tensorflow keras mindspore paddle apex "
others += "deepspeed megatron fairseq metaseq colossalai nemo npu_bridge jmp"
class Finder:
  def find_spec(self, name, path, target=None):
    if name in others.split():
      print(name)
sys.meta_path.insert(0, Finder())
import optax_lossscale.presets
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout == ""


def loaded_by(program):
  """Returns the modules that a program has loaded when it ends."""
  program += "\nprint(*(x.__name__ for x in [*sys.modules.values()] if x))"
  result = subprocess.run(
    [sys.executable, "-c", f"import sys\n{program}"],
    capture_output=True,
    text=True,
    check=True,
  )
  return result.stdout.split()


def test_training_loads_no_instrument_no_preset_and_no_flax():
  found = loaded_by("""
import jax, jax.numpy as jnp, optax, optax_lossscale as ols
tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())
@jax.jit
def step(x, state):
  loss_fn = ols.autocast(lambda x: jnp.sum(x @ x), "O1")
  _, grads = ols.scaled_value_and_grad(loss_fn, state)(x)
  updates, state = tx.update(grads, state, x)
  return optax.apply_updates(x, updates), state
step(jnp.ones((2, 2)), tx.init(jnp.ones((2, 2))))
""")
  own = [x for x in found if x.startswith("optax_lossscale")]
  late = "instruments", "compiled", "presets", "rules", "plot", "cli"
  assert not {*late} & {part for x in own for part in x.split(".")[1:2]}
  assert "flax" not in found
  lines = [
    len(inspect.getsource(importlib.import_module(x)).splitlines()) for x in own
  ]
  assert sum(lines) <= 11_000


@pytest.mark.parametrize("room", sorted({*ols.instruments._ROOMS.values()}))
def test_an_instrument_loads_its_room_alone(room):
  names = [x for x, y in ols.instruments._ROOMS.items() if y == room]
  got = "; ".join(f"ols.instruments.{x}" for x in names)
  found = loaded_by(f"import optax_lossscale as ols; {got}")
  rooms = {
    re.sub(r"^optax_lossscale\.(instruments)?", "", x)
    for x in found
    if re.match(r"optax_lossscale\.(instruments\.\w+|compiled)$", x)
  }
  assert rooms == {room.removeprefix(".."), ".shared"}, names


def test_a_door_has_the_names_that_its_rooms_say():
  for name, room in ols.instruments._ROOMS.items():
    module = importlib.import_module(room, "optax_lossscale.instruments")
    assert name in module.__all__
    assert getattr(ols.instruments, name) is getattr(module, name)
  assert ols.instruments.__all__ == dir(ols.instruments)
  assert not hasattr(ols.instruments, "replays")
  with pytest.raises(AttributeError, match="did you mean 'replay'"):
    _ = ols.instruments.replays


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


def public_modules():
  """Returns the package, and each of its public modules."""
  return [ols, *filter(inspect.ismodule, (getattr(ols, x) for x in dir(ols)))]


def public_callables():
  """Yields the name and value of public classes, functions and methods."""
  for module in public_modules():
    for name in module.__all__:
      value = getattr(module, name)
      if callable(value):
        yield f"{module.__name__}.{name}", value
      for member, x in inspect.getmembers(value, _is_own):
        if inspect.isclass(value) and not member.startswith("_"):
          yield f"{module.__name__}.{name}.{member}", getattr(x, "fget", x)


def _is_own(x):
  module = getattr(getattr(x, "fget", x), "__module__", None)
  return str(module).startswith(ols.__name__)


def test_annotations_name_types_that_exist():
  update = ols.loss_scaling(optax.identity(), ols.FixedLossScale(1)).update
  wrong = []
  for name, value in [*public_callables(), ("update", update)]:
    if value is ols.linen.TrainState:
      continue  # Flax does not import what the annotations of its class need.
    try:
      # Without this argument, typing takes over what it found for another
      # module, where a name such as ArrayTree may be imported.
      typing.get_type_hints(value, localns={})
    except NameError as error:
      wrong.append(f"{name}: {error}")
  assert not wrong


def classes_in(hint):
  """Yields the classes that a type hint names."""
  for x in [hint, *typing.get_args(hint)]:
    if isinstance(x, list):  # The arguments of a Callable.
      continue
    if x is not hint:
      yield from classes_in(x)
    elif inspect.isclass(x):
      yield x


def test_public_functions_return_types_with_public_names():
  public = {id(value) for _, value in public_callables()}
  unnamed = {
    f"{name} returns {x.__name__}"
    for name, value in public_callables()
    if not inspect.isclass(value)
    for x in classes_in(typing.get_type_hints(value).get("return"))
    if x.__module__.startswith(ols.__name__) and id(x) not in public
  }
  assert not unnamed


def test_few_annotations_are_any():
  # The arguments and results of users' functions are Any, and so is a rule's
  # state. `object` is better for a value that the library does not use.
  names = [
    name
    for file in PACKAGE.rglob("*.py")
    for node in ast.walk(ast.parse(file.read_text()))
    for field in ("annotation", "returns")
    if getattr(node, field, None) is not None
    for name in ast.walk(getattr(node, field))
    if getattr(name, "id", getattr(name, "attr", None)) == "Any"
  ]
  assert len(names) <= MOST_ANY
