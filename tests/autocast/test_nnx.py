"""`nnx.autocast`: models that a forward pass changes, in mixed precision."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.autocast.programs import dtypes_of
from tests.test_nnx import values

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Net(nnx.Module):
  """Changes statistics, a count of random keys, and what is sown."""

  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x, train=True):
    assert isinstance(train, bool)
    layers = nnx.remat(lambda model, x: model.norm(jnp.tanh(model.dense(x))))
    hidden = layers(self, x)
    self.sow(nnx.Intermediate, "hidden", hidden)
    return self.head(self.dropout(hidden, deterministic=not train))


pytestmark = pytest.mark.filterwarnings(
  "ignore:Using 'Module.sow:DeprecationWarning"
)


def loss_fn(model, x, train=True):
  return jnp.mean((model(x, train) - 1.0) ** 2)


def make():
  return Net(nnx.Rngs(0, dropout=1))


def split_and_merged():
  """Returns loss, gradients and state by `autocast` of a pure function."""
  graphdef, params, rest = nnx.split(make(), nnx.Param, ...)

  def pure_loss_fn(params, rest, x):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = loss_fn(model, x)
    return loss, nnx.state(model, nnx.Not(nnx.Param))

  mixed = ols.autocast(pure_loss_fn, "O1")
  (loss, rest), grads = jax.jit(jax.value_and_grad(mixed, has_aux=True))(
    params, rest, X
  )
  return loss, values(grads), values(rest)


def test_it_is_autocast_between_split_and_merge_bit_for_bit():
  model = make()
  mixed = ols.nnx.autocast(loss_fn, "O1")
  loss, grads = nnx.jit(nnx.value_and_grad(mixed))(model, X)
  expected, gradients, rest = split_and_merged()
  assert loss == expected
  support.assert_same_bits(values(grads), gradients)
  support.assert_same_bits(values(nnx.state(model, nnx.Not(nnx.Param))), rest)
  assert "hidden" in rest
  assert model.dropout.rngs.count[...] == 1


@pytest.mark.parametrize("get_fun", [lambda x: x, lambda x: x.__call__])
def test_a_model_or_a_method_of_it_counts_as_an_argument(get_fun):
  model = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))

  def loss_fn(model, x):
    return jnp.sum(ols.nnx.autocast(get_fun(model), "O1")(x) * x)

  grads = nnx.grad(loss_fn)(model, X)
  np.testing.assert_allclose(model.mean[...], X.mean(0) / 2, atol=1e-6)
  np.testing.assert_allclose(grads["bias"][...], X.sum(0), rtol=1e-4)


def test_a_variable_that_nothing_changes_is_not_set():
  class Doubling(nnx.Param):
    def set_value(self, value, **kwargs):
      super().set_value(2 * value, **kwargs)

  model = nnx.Dict(weight=Doubling(jnp.ones(2)))
  ols.nnx.autocast(lambda model, x: x @ model["weight"][...])(model, X[:, :2])
  assert model["weight"][...].tolist() == [1, 1]


def test_objects_that_arguments_share_stay_one():
  rngs = nnx.Rngs(0)
  model = nnx.Dropout(0.5, rngs=rngs)
  model.stream = rngs.default

  def draw(model, stream, both):
    assert model.stream is stream
    assert both["stream"] is stream
    return jax.random.normal(stream(), X.shape), model(X @ X.T), model

  before = int(rngs.default.count[...])
  *_, returned = ols.nnx.autocast(draw)(
    model, rngs.default, both={"stream": rngs.default}
  )
  assert returned is model
  assert model.stream is rngs.default
  assert rngs.default.count[...] == before + 1


def test_what_a_call_makes_removes_or_replaces_is_so_afterwards():
  class Changing(nnx.Module):
    def __init__(self):
      self.old, self.calls = nnx.Cache(jnp.zeros(2)), 0

    def __call__(self, x):
      del self.old
      self.new, self.calls = nnx.Cache(x @ x.T), self.calls + 1
      return jnp.sum(self.new[...])

  model = Changing()
  ols.nnx.autocast(model, "O1")(X)
  assert not hasattr(model, "old")
  assert model.calls == 1
  assert type(model.new) is nnx.Cache
  assert model.new.dtype == jnp.float32
  np.testing.assert_allclose(model.new[...], X @ X.T, atol=0.02)


def test_its_options_are_those_of_autocast():
  options = {
    "dtype": jnp.bfloat16,
    "overrides": {"last": jnp.float16},
    "operations": {"white": ["sin"], "black": ["tanh"]},
  }

  def forward(weight, x):
    x = jnp.tanh(x @ weight)
    return jnp.sin(jax.named_scope("last")(jnp.matmul)(x, weight))

  mixed = ols.nnx.autocast(forward, "O1", **options)
  assert dtypes_of("dot_general", mixed, jnp.eye(3), X) == [
    *("bfloat16", "bfloat16", "float16", "float16")
  ]
  assert dtypes_of("tanh", mixed, jnp.eye(3), X) == ["float32"]
  assert dtypes_of("sin", mixed, jnp.eye(3), X) == ["bfloat16"]


def test_one_inside_another_changes_the_model_once():
  model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  inside = ols.nnx.autocast(lambda model, x: model(x @ x.T), "O2")
  ols.nnx.autocast(lambda *args: inside(*args), "O1")(model, X)
  assert model.rngs.count[...] == 1


@pytest.mark.parametrize("graph", [True, False])
def test_it_works_in_every_mode_of_nnx(graph):
  with nnx.set_graph_mode(graph), nnx.set_graph_updates(False):
    model = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    nnx.jit(ols.nnx.autocast(lambda model, x: model(x)))(model, X)
  np.testing.assert_allclose(model.mean[...], X.mean(0) / 2, atol=1e-6)


def test_what_cannot_work_is_refused_at_once():
  with pytest.raises(TypeError, match="`fun` must be a function, got ndarray"):
    ols.nnx.autocast(X)
  with pytest.raises(ValueError, match="`level` must be"):
    ols.nnx.autocast(loss_fn, "O9")


def test_a_model_from_outside_of_another_transform_is_refused_and_stays_whole():
  student, teacher = make(), nnx.Linear(3, 2, rngs=nnx.Rngs(1))
  before = values(teacher)
  mixed = ols.nnx.autocast(lambda a, b, x: jnp.mean(a(x) - b(x)))
  with pytest.raises(
    ValueError, match="autocast takes a model that is only re"
  ):
    nnx.value_and_grad(lambda a, x: mixed(a, teacher, x))(student, X)
  support.assert_same_bits(values(teacher), before)
  only_read = ols.nnx.autocast(lambda a, x: jnp.mean(a(x) - teacher(x)))
  nnx.value_and_grad(only_read)(student, X)


def test_products_have_the_formats_that_autocast_has():
  model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  low = ols.nnx.autocast(
    lambda model, x: model(x), dtype=jnp.bfloat16, dot_dtype=jnp.float8_e4m3fn
  )
  found = ols.instruments.precision_report(low, model, jnp.ones((64, 64)))
  assert found.products == {"float8_e4m3fn": 1}
