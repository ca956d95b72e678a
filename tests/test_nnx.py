"""Flax NNX: models with statistics and random keys, and skipped steps."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.support import assert_same_bits
from tests.support import Stub
from tests.support import to_bits
from tests.support import to_numpy

RULE = Stub(1024.0)
# Made once: NNX compiles anew for each transformation.
BARE = optax.adam(2.0**-6)
TX = ols.loss_scaling(BARE, RULE)
CLEAN = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
BAD = np.where(np.arange(12).reshape(4, 3) == 7, np.float32(np.inf), CLEAN)


class Net(nnx.Module):
  """Changes statistics, a count of random keys and a cache when called."""

  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(4, 2, rngs=rngs)
    self.cache = nnx.Cache(jnp.zeros(2))
    self.calls = nnx.data(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    outputs = self.head(self.dropout(nnx.relu(self.norm(self.dense(x)))))
    self.cache = nnx.Cache(outputs[0])
    self.calls = self.calls + 1
    return outputs


def loss_fn(model, x):
  return jnp.mean((model(x) - 1.0) ** 2)


def make(make_model=Net, tx=TX, wrt=nnx.Param):
  """Returns a model, always with the same values, and its optimizer."""
  model = make_model(rngs=nnx.Rngs(0, dropout=1))
  return model, nnx.Optimizer(model, tx, wrt=wrt)


def step(model, optimizer, x):
  with ols.nnx.undo_on_skip(optimizer, model):
    value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
    loss, grads = value_and_grad(model, x)
    optimizer.update(model, grads)
  return loss


def unprotected_step(model, optimizer, x):
  value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
  loss, grads = value_and_grad(model, x)
  optimizer.update(model, grads)
  return loss


train_step = nnx.jit(step)


def values(node):
  """Returns copies of all values of a node, by their paths."""
  state = nnx.to_flat_state(nnx.as_pure(nnx.state(node)))
  copies = {"/".join(map(str, path)): value for path, value in state}
  return jax.tree.map(to_numpy, copies)


def test_a_skipped_step_leaves_everything_but_the_scale():
  model, optimizer = make()
  for x in (CLEAN, BAD, CLEAN):
    before = values(model), values(optimizer)
    train_step(model, optimizer, x)
    after = values(model), values(optimizer)
    if x is CLEAN:
      assert to_bits(before[0]) != to_bits(after[0])
      continue
    assert_same_bits(before[0], after[0])
    inner = [name for name in before[1] if "inner_state" in name]
    assert inner
    for name in inner:
      assert_same_bits(before[1][name], after[1][name])


def norm(rngs):
  return nnx.BatchNorm(3, rngs=rngs)


@pytest.mark.slow
def test_a_scan_over_the_step_is_the_loop():
  batches = np.stack([CLEAN, BAD, 2 * CLEAN])
  model, optimizer = make(norm)
  expected, own_optimizer = make(norm)

  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
  def body(both, x):
    return both, step(*both, x)

  nnx.jit(lambda *both, xs: body(both, xs)[1])(model, optimizer, xs=batches)
  for x in batches:
    train_step(expected, own_optimizer, x)
  assert_same_bits(values(model), values(expected))
  assert_same_bits(values(optimizer), values(own_optimizer))


def test_it_works_in_the_tree_mode_of_nnx():
  with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
    model, optimizer = make(norm)
    before = values(model)
    nnx.jit(step)(model, optimizer, BAD)
    assert_same_bits(values(model), before)
    assert ols.get_loss_scale(optimizer.opt_state) == 512.0


def linear(rngs):
  return nnx.Linear(3, 2, rngs=rngs)


def test_the_scale_is_that_of_the_call_and_not_of_the_factory():
  model, optimizer = make(linear)
  value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
  _, before = value_and_grad(model, CLEAN)
  optimizer.opt_state.loss_scale_state.loss_scale[...] = jnp.float32(8.0)
  _, after = value_and_grad(model, CLEAN)
  np.testing.assert_array_equal(
    before["kernel"][...], 128.0 * after["kernel"][...]
  )


def test_keywords_and_auxiliary_data_are_as_in_nnx():
  model, optimizer = make(linear)

  def pair(model, x, factor=1):
    return factor * jnp.sum(model(x)), {"twice": 2 * x}

  value_and_grad = ols.nnx.scaled_value_and_grad(pair, optimizer, has_aux=True)
  (loss, aux), _ = value_and_grad(model, x=CLEAN, factor=4)
  assert loss == 4 * jnp.sum(model(CLEAN))
  np.testing.assert_array_equal(aux["twice"], 2 * CLEAN)


@pytest.mark.parametrize(
  "argnums", [1, nnx.DiffState(1, nnx.Param), (nnx.DiffState(1, nnx.Param), 0)]
)
def test_argnums_are_those_of_nnx(argnums):
  model, optimizer = make(linear)

  def swapped(x, model):
    return loss_fn(model, x)

  _, scaled = ols.nnx.scaled_value_and_grad(swapped, optimizer, argnums)(
    jnp.asarray(CLEAN), model
  )
  _, expected = nnx.value_and_grad(swapped, argnums=argnums)(
    jnp.asarray(CLEAN), model
  )
  assert jax.tree.structure(scaled) == jax.tree.structure(expected)
  for ours, theirs in zip(
    jax.tree.leaves(scaled), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(ours, 1024.0 * theirs)


def test_a_first_argument_that_the_optimizer_does_not_update_is_refused():
  model, optimizer = make(linear)
  value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
  rule = "must hold variables that the optimizer updates, wrt=.*Param.*, got "
  for batch in (jnp.asarray(CLEAN), {"x": CLEAN}, norm(nnx.Rngs(0)).mean):
    is_array = isinstance(batch, jax.Array)
    kind = "jax.Array" if is_array else type(batch).__name__
    with pytest.raises(ValueError, match=f"{rule}{kind}; .* argnums=nnx.Diff"):
      value_and_grad(batch, model)
  with pytest.raises(ValueError, match=f"{rule}no argument by position"):
    value_and_grad(model=model, x=CLEAN)


def test_gradients_are_of_the_optimizers_wrt_alone():
  model, optimizer = make(linear, wrt=nnx.PathContains("kernel"))
  _, grads = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)(model, CLEAN)
  assert list(grads) == ["kernel"]


def test_readers_of_the_state_return_plain_arrays():
  _, optimizer = make(linear)
  state = optimizer.opt_state
  plain = [
    ols.get_loss_scale(state),
    ols.select_on_skip(state, new=1.0, old=2.0),
    ols.unscale(jnp.ones(()), state),
    ols.scale_loss(jnp.ones(()), state),
    *ols.loss_scale_metrics(state).values(),
  ]
  for value in plain:
    assert isinstance(value, jax.Array)
    assert not isinstance(value, nnx.Variable)
  assert plain[0] == 1024.0
  # optax finds the variable around it.
  assert optax.tree.get(state, "loss_scale")[...] == 1024.0


def reader_of(optimizer, name):
  state = optimizer.opt_state
  return {
    "nnx": lambda model: ols.nnx.scaled_value_and_grad(loss_fn, optimizer)(
      model, CLEAN
    )[0],
    "scale_loss": lambda model: ols.scale_loss(loss_fn(model, CLEAN), state),
    "unscale": lambda model: ols.unscale(model(CLEAN), state),
    "select_on_skip": lambda _: ols.select_on_skip(state, 1.0, 2.0),
  }[name]


@pytest.mark.parametrize(
  "name", ["nnx", "scale_loss", "unscale", "select_on_skip"]
)
def test_guarantee_1_an_optimizer_that_was_closed_over_is_refused(name):
  model, optimizer = make(linear)
  with pytest.raises(ValueError, match="closed over: the compiled function"):
    nnx.jit(reader_of(optimizer, name))(model)
  nnx.jit(lambda model, optimizer: reader_of(optimizer, name)(model))(
    model, optimizer
  )


def test_other_nodes_move_with_the_model_or_not_at_all():
  model, optimizer = make(linear)
  ema, metric = nnx.clone(model), nnx.metrics.Average()
  other_model, other_optimizer = make(linear)
  company = ema, metric, other_model, other_optimizer

  def run(x):
    with ols.nnx.undo_on_skip(optimizer, model, *company):
      unprotected_step(other_model, other_optimizer, CLEAN)
      metric.update(values=unprotected_step(model, optimizer, x))
      ema.bias[...] = (ema.bias[...] + model.bias[...]) / 2

  before = [values(node) for node in company]
  run(BAD)
  for node, old in zip(company, before, strict=True):
    assert_same_bits(values(node), old)
  run(CLEAN)
  for node, old in zip(company, before, strict=True):
    assert to_bits(values(node)) != to_bits(old)


@pytest.mark.parametrize("batches", [(BAD, CLEAN), (CLEAN, BAD)])
def test_a_skip_of_either_of_two_updates_undoes_the_block(batches):
  model, optimizer = make(linear)
  before = values(model)
  with ols.nnx.undo_on_skip(optimizer, model):
    for x in batches:
      unprotected_step(model, optimizer, x)
  assert optimizer.opt_state.applied_steps[...] == 1
  assert_same_bits(values(model), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_optimizer_may_hold_its_model():
  model = norm(nnx.Rngs(0))
  optimizer = nnx.ModelAndOptimizer(model, TX, wrt=nnx.Param)
  before = values(model)
  with ols.nnx.undo_on_skip(optimizer, model):
    _, grads = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)(model, BAD)
    optimizer.update(grads)
  assert_same_bits(values(model), before)
  assert optimizer.opt_state.skipped[...]


class Sowing(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 2, rngs=rngs)
    self.calls = nnx.Variable(jnp.zeros(()))

  def __call__(self, x):
    self.calls[...] += 1
    self.sow(nnx.Intermediate, "inputs", x)
    if not hasattr(self, "cache"):
      self.cache = nnx.Cache(x)
    return self.dense(x)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_and_new_variables_are_left_alone():
  model, optimizer = make(Sowing)
  step(model, optimizer, BAD)
  assert model.calls[...] == 0
  np.testing.assert_array_equal(model.cache[...], BAD)
  # The sown values are a tuple, which grows with the second step.
  step(model, optimizer, BAD)
  assert model.calls[...] == 0
  assert len(model.inputs.get_value()) == 2


def test_a_variable_that_the_step_removes_stays_removed():
  model, optimizer = make(linear)
  model.extra = nnx.Cache(jnp.zeros(2))
  with ols.nnx.undo_on_skip(optimizer, model):
    unprotected_step(model, optimizer, BAD)
    del model.extra
  assert not hasattr(model, "extra")
  assert optimizer.opt_state.skipped[...]


def test_a_block_that_raises_selects_nothing():
  model, optimizer = make(linear)
  step(model, optimizer, BAD)
  bias = model.bias[...]
  with (
    pytest.raises(RuntimeError, match="mine"),
    ols.nnx.undo_on_skip(optimizer, model),
  ):
    model.bias[...] += 1
    raise RuntimeError("mine")
  np.testing.assert_array_equal(model.bias[...], bias + 1)


def test_one_of_two_scales_is_chosen_by_its_path():
  tx = optax.chain(TX, ols.loss_scaling(optax.identity(), RULE))
  model, optimizer = make(linear, tx)
  with pytest.raises(ValueError, match="choose one by its path"):
    ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
  with (
    pytest.raises(ValueError, match="choose one by its path"),
    ols.nnx.undo_on_skip(optimizer, model),
  ):
    pass
  old = values(model)
  with ols.nnx.undo_on_skip(optimizer, model, path="0"):
    _, grads = ols.nnx.scaled_value_and_grad(loss_fn, optimizer, path="0")(
      model, BAD
    )
    optimizer.update(model, grads)
    model.bias[...] += 1
  assert_same_bits(values(model), old)


def bad_optimizers():
  model, optimizer = make(linear)
  yield optimizer.opt_state, TypeError, "must be an nnx.Optimizer, got LossSc"
  yield TX, TypeError, "got GradientTransformationExtraArgs; with an optimizer"
  bare = nnx.Optimizer(model, BARE, wrt=nnx.Param)
  yield bare, ValueError, "must hold loss scaling, got one whose .* wrap its"


@pytest.mark.parametrize("case", range(3))
def test_an_optimizer_without_loss_scaling_is_refused(case):
  optimizer, error, match = list(bad_optimizers())[case]
  with pytest.raises(error, match=match):
    ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
  with (
    pytest.raises(error, match=match),
    ols.nnx.undo_on_skip(optimizer, linear(nnx.Rngs(0))),
  ):
    pass


def test_a_block_without_an_update_is_refused():
  model, optimizer = make(linear)

  def forgotten(model, optimizer):
    with ols.nnx.undo_on_skip(optimizer, model):
      ols.nnx.scaled_value_and_grad(loss_fn, optimizer)(model, CLEAN)

  for run in (forgotten, nnx.jit(forgotten)):
    with pytest.raises(ValueError, match="must be updated in the block"):
      run(model, optimizer)


@pytest.mark.parametrize(
  ("nodes", "got"),
  [
    ([], "none; pass the model"),
    ([None], "None"),
    ([jnp.zeros(2)], "jax.Array"),
    ([{"model": 1}], "dict"),
  ],
  ids=["none", "None", "array", "dict"],
)
def test_nodes_that_no_step_changes_in_place_are_refused(nodes, got):
  _, optimizer = make(linear)
  with (
    pytest.raises(TypeError, match=f"must be NNX objects.* got {got}"),
    ols.nnx.undo_on_skip(optimizer, *nodes),
  ):
    pass


def test_a_model_before_the_optimizer_is_refused_with_their_order():
  model, optimizer = make(linear)
  order = r"got Linear; the order is undo_on_skip\(optimizer, model\)"
  with (
    pytest.raises(TypeError, match=order),
    ols.nnx.undo_on_skip(model, optimizer),
  ):
    pass


def test_the_optimizer_itself_is_refused_at_any_depth():
  class Trainer(nnx.Module):
    def __init__(self):
      self.model, self.optimizer = make(linear)

  trainer = Trainer()
  for nodes in ([trainer], [trainer.model, trainer.optimizer]):
    with (
      pytest.raises(ValueError, match="must not hold the state of `optimizer`"),
      ols.nnx.undo_on_skip(trainer.optimizer, *nodes),
    ):
      pass


def test_a_variable_that_grows_is_refused_by_name():
  model, optimizer = make(linear)
  with (
    pytest.raises(ValueError, match=r"shape \(5,\) at '0/bias' and not"),
    ols.nnx.undo_on_skip(optimizer, model),
  ):
    unprotected_step(model, optimizer, CLEAN)
    model.bias.set_value(jnp.zeros(5))


def test_update_refuses_the_state_of_an_nnx_optimizer_with_the_remedy():
  model, optimizer = make(linear)
  params = nnx.as_pure(nnx.state(model, nnx.Param))
  remedy = r"; of an nnx.Optimizer pass nnx.as_pure\(optimizer.opt_state\)\.$"
  with pytest.raises(ValueError, match=remedy):
    optimizer.tx.update(params, optimizer.opt_state, params)


class SowingNet(Net):
  def __call__(self, x):
    self.sow(nnx.Intermediate, "inputs", x)
    return super().__call__(x)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_micro_batches_change_every_object_but_those_that_overflow():
  def metric_loss_fn(model, x, metric):
    loss = loss_fn(model, x)
    metric.update(values=loss)
    return loss

  @nnx.jit
  def run(model, optimizer, x, metric):
    value_and_grad = ols.nnx.scaled_value_and_grad(metric_loss_fn, optimizer)
    value_and_grad = ols.accumulate(value_and_grad, microbatches=4, drop=True)
    return value_and_grad(model, x, metric)[2].flags

  model, optimizer = make(SowingNet)
  metric = nnx.metrics.Average()
  # The third example, which is a micro-batch of its own, is bad.
  x = np.where(np.arange(4)[:, None] == 2, np.float32(np.inf), CLEAN)
  assert run(model, optimizer, x, metric).tolist() == [
    False,
    False,
    True,
    False,
  ]
  expected, _ = make(SowingNet)
  compiled = nnx.jit(loss_fn)
  losses = [compiled(expected, CLEAN[i : i + 1]) for i in (0, 1, 3)]
  ours, theirs = (
    dict(
      nnx.to_flat_state(nnx.as_pure(nnx.state(x, nnx.Not(nnx.Intermediate))))
    )
    for x in (model, expected)
  )
  for place, value in theirs.items():
    np.testing.assert_allclose(
      to_numpy(ours[place]), to_numpy(value), rtol=1e-5, err_msg=str(place)
    )
  assert model.calls == 3
  np.testing.assert_allclose(metric.compute(), np.mean(losses), rtol=1e-5)
  assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))


def test_a_void_window_changes_no_object():
  model, optimizer = make(norm)
  before = jax.tree.map(to_numpy, nnx.as_pure(nnx.state(model)))
  x = np.where(np.arange(4)[:, None] == 0, np.float32(np.inf), CLEAN)
  value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
  _, _, overflow = ols.accumulate(value_and_grad, microbatches=4)(model, x)
  assert overflow.valid == 3
  assert_same_bits(
    jax.tree.map(to_numpy, nnx.as_pure(nnx.state(model))), before
  )


def test_an_object_by_keyword_is_refused_where_it_would_not_come_back():
  model, optimizer = make()
  value_and_grad = ols.nnx.scaled_value_and_grad(
    lambda model, x, rngs: loss_fn(model, x), optimizer
  )
  run = ols.accumulate(value_and_grad, microbatches=2)
  with pytest.raises(ValueError, match="must be passed by position .* rngs;"):
    run(model, CLEAN, rngs=nnx.Rngs(0))
