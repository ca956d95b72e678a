"""Flax NNX: models with statistics and random keys, and skipped steps."""

import functools

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
# The second and the last step are skipped.
BATCHES = np.stack([CLEAN, BAD, 2 * CLEAN, CLEAN, 0.5 * CLEAN, CLEAN, BAD])


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


def bare_step(model, optimizer, x):
  loss, grads = nnx.value_and_grad(loss_fn)(model, x)
  optimizer.update(model, grads)
  return loss


# One entry for each time that the train step is traced.
TRACES = []


@nnx.jit
def train_step(model, optimizer, x):
  TRACES.append(x)
  return step(model, optimizer, x)


def values(node):
  """Returns copies of all values of a node, by their paths."""
  state = nnx.to_flat_state(nnx.as_pure(nnx.state(node)))
  return {"/".join(map(str, path)): to_numpy(value) for path, value in state}


@functools.cache
def trained():
  """Returns, after each batch, the loss and the values of both objects."""
  model, optimizer = make()
  record = [(None, values(model), values(optimizer))]
  for x in BATCHES:
    loss = train_step(model, optimizer, x)
    record.append((np.array(loss), values(model), values(optimizer)))
  return record


def trained_functionally():
  """Returns the same of a training of pure functions."""
  model, _ = make()
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  opt_state = TX.init(params)

  def pure_loss_fn(params, rest, x):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = loss_fn(model, x)
    return loss, nnx.state(model, nnx.Not(nnx.Param))

  @jax.jit
  def pure_step(params, rest, opt_state, x):
    (loss, new_rest), grads = ols.scaled_value_and_grad(
      pure_loss_fn, opt_state, has_aux=True
    )(params, rest, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    rest = ols.select_on_skip(opt_state, new_rest, rest)
    return params, rest, opt_state, loss

  for x in BATCHES:
    params, rest, opt_state, loss = pure_step(params, rest, opt_state, x)
    model = nnx.merge(graphdef, params, rest)
    yield np.array(loss), values(model), values(opt_state)


@pytest.mark.slow
def test_training_is_that_of_pure_functions_bit_for_bit():
  for (loss, model, optimizer), expected in zip(
    trained()[1:], trained_functionally(), strict=True
  ):
    np.testing.assert_array_equal(loss, expected[0])
    assert_same_bits(model, expected[1])
    state = {f"opt_state/{name}": value for name, value in expected[2].items()}
    assert_same_bits(optimizer, state | {"step": optimizer["step"]})


def test_a_skipped_step_leaves_everything_but_the_scale():
  record = trained()
  for i, x in enumerate(BATCHES):
    (_, model, optimizer), (_, new_model, new_optimizer) = record[i : i + 2]
    if np.isfinite(x).all():
      assert to_bits(model) != to_bits(new_model)
      continue
    assert_same_bits(model, new_model)
    inner = [name for name in optimizer if "inner_state" in name]
    assert inner
    for name in inner:
      assert_same_bits(optimizer[name], new_optimizer[name])


def norm(rngs):
  return nnx.BatchNorm(3, rngs=rngs)


def test_without_the_block_an_overflow_stays_in_the_statistics():
  model, optimizer = make(norm)
  nnx.jit(unprotected_step)(model, optimizer, BAD)
  assert optimizer.opt_state.skipped[...]
  assert not np.isfinite(model.var[...]).all()


def scan_of_nnx(model, optimizer, batches):
  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
  def body(both, x):
    return both, step(*both, x)

  return nnx.jit(lambda *both, xs: body(both, xs)[1])(
    model, optimizer, xs=batches
  )


def scan_of_jax(model, optimizer, batches):
  graphdef, state = nnx.split((model, optimizer))

  def body(state, x):
    both = nnx.merge(graphdef, state)
    loss = step(*both, x)
    return nnx.state(both), loss

  state, losses = jax.jit(functools.partial(jax.lax.scan, body))(state, batches)
  nnx.update((model, optimizer), state)
  return losses


@pytest.mark.slow
@pytest.mark.parametrize("scan", [scan_of_nnx, scan_of_jax])
def test_a_scan_over_the_step_is_the_loop(scan):
  model, optimizer = make()
  losses = scan(model, optimizer, BATCHES)
  record = trained()
  np.testing.assert_array_equal(losses, [loss for loss, _, _ in record[1:]])
  assert_same_bits(values(model), record[-1][1])
  assert_same_bits(values(optimizer), record[-1][2])


@pytest.mark.parametrize("graph", [True, False])
def test_it_works_in_every_mode_of_nnx(graph):
  with nnx.set_graph_mode(graph), nnx.set_graph_updates(False):
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


@pytest.mark.slow
def test_gradients_are_of_the_optimizers_wrt_alone():
  model, optimizer = make(
    lambda rngs: nnx.LoRALinear(3, 2, lora_rank=1, rngs=rngs),
    wrt=nnx.LoRAParam,
  )
  before = values(model)
  _, grads = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)(model, CLEAN)
  assert len(jax.tree.leaves(grads)) == 2
  optimizer.update(model, grads)
  after = values(model)
  for name in before:
    moved = to_bits(before[name]) != to_bits(after[name])
    # The first factor has no gradient yet, since the second starts as zeros.
    assert moved == ("lora_b" in name), name


@pytest.mark.slow
def test_a_shared_parameter_is_updated_once():
  class Tied(nnx.Module):
    def __init__(self, rngs):
      self.first = nnx.Linear(3, 3, rngs=rngs)
      self.second = self.first

    def __call__(self, x):
      return self.second(self.first(x))

  model, optimizer = make(Tied)
  bare_model, bare_optimizer = make(Tied, tx=BARE)
  step(model, optimizer, CLEAN)
  bare_step(bare_model, bare_optimizer, CLEAN)
  assert_same_bits(values(model), values(bare_model))
  step(model, optimizer, BAD)
  assert_same_bits(values(model), values(bare_model))
  assert model.second is model.first


def half_loss(model, x):
  small = jnp.sum(model(x).astype(jnp.float16)) * jnp.float16(2.0**-10)
  return (jnp.float16(3000.0) + small).astype(jnp.float16)


# Without a look at the loss's dtype the first would come from inf, and the
# second from 0, which no check could tell from gradients of 0.
@pytest.mark.parametrize("scale", [2.0**17, 2.0**-30])
def test_a_scale_that_the_loss_cannot_hold_is_an_overflow(scale):
  model, optimizer = make(
    linear, ols.loss_scaling(BARE, ols.FixedLossScale(scale))
  )
  _, grads = ols.nnx.scaled_value_and_grad(half_loss, optimizer)(
    model, jnp.ones((1, 3))
  )
  assert np.isinf(grads["bias"][...]).all()
  optimizer.update(model, grads)
  assert optimizer.opt_state.skipped[...]


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
  with pytest.raises(ValueError, match="closed over: the compiled function would"):
    nnx.jit(reader_of(optimizer, name))(model)
  nnx.jit(lambda model, optimizer: reader_of(optimizer, name)(model))(
    model, optimizer
  )


def average(ema, model):
  new = optax.incremental_update(
    nnx.as_pure(nnx.state(model, nnx.Param)),
    nnx.as_pure(nnx.state(ema, nnx.Param)),
    0.5,
  )
  nnx.update(ema, new)


@nnx.jit
def step_with_company(model, optimizer, ema, rngs, metric, x):
  with ols.nnx.undo_on_skip(optimizer, model, ema, rngs, metric):
    value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
    loss, grads = value_and_grad(model, x + 0 * rngs.noise.normal())
    optimizer.update(model, grads)
    average(ema, model)
    metric.update(values=loss)


def test_other_nodes_move_with_the_model_or_not_at_all():
  model, optimizer = make(linear)
  ema, rngs = nnx.clone(model), nnx.Rngs(noise=3)
  metric = nnx.metrics.Average()
  company = (ema, rngs, metric)
  before = [values(node) for node in company]
  step_with_company(model, optimizer, *company, BAD)
  for node, old in zip(company, before, strict=True):
    assert_same_bits(values(node), old)
  step_with_company(model, optimizer, *company, CLEAN)
  for node, old in zip(company, before, strict=True):
    assert to_bits(values(node)) != to_bits(old)


def test_another_optimizer_among_the_nodes_is_skipped_as_well():
  first, first_optimizer = make(linear)
  second, second_optimizer = make(linear)
  old = values(second), values(second_optimizer)

  def both(x):
    with ols.nnx.undo_on_skip(first_optimizer, second, second_optimizer):
      unprotected_step(second, second_optimizer, CLEAN)
      unprotected_step(first, first_optimizer, x)

  both(BAD)
  assert_same_bits(values(second), old[0])
  assert_same_bits(values(second_optimizer), old[1])
  both(CLEAN)
  assert second_optimizer.step[...] == 1


@pytest.mark.slow
@pytest.mark.parametrize("batches", [(BAD, CLEAN), (CLEAN, BAD)])
def test_a_skip_of_either_of_two_updates_undoes_the_block(batches):
  model, optimizer = make(norm)
  before = values(model)

  @nnx.jit
  def twice(model, optimizer, batches):
    with ols.nnx.undo_on_skip(optimizer, model):
      for x in batches:
        unprotected_step(model, optimizer, x)

  twice(model, optimizer, batches)
  assert optimizer.opt_state.applied_steps[...] == 1
  assert_same_bits(values(model), before)


@pytest.mark.slow
def test_a_block_whose_condition_leaves_the_update_out_undoes_nothing():
  model, optimizer = make(norm)
  step(model, optimizer, BAD)
  before = values(optimizer)

  @nnx.jit
  def observe(model, optimizer, is_reached):
    with ols.nnx.undo_on_skip(optimizer, model):
      _, grads = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)(model, CLEAN)
      nnx.cond(
        is_reached,
        lambda model, optimizer: optimizer.update(model, grads) and None,
        lambda model, optimizer: None,
        model,
        optimizer,
      )

  # The flag is still that of the step before, which was skipped.
  observe(model, optimizer, False)
  assert_same_bits(values(optimizer), before)
  np.testing.assert_allclose(model.mean[...], 0.01 * CLEAN.mean(0), atol=1e-8)


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
  with (
    pytest.raises(ValueError, match="must not hold the state of `optimizer`"),
    ols.nnx.undo_on_skip(optimizer, optimizer),
  ):
    pass


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


@pytest.mark.parametrize(
  ("fun", "match"),
  [
    (lambda model, x: jnp.sum(model(x), axis=0), "take its mean or sum"),
    (lambda model, x: (jnp.sum(model(x)), x), "pass has_aux=True"),
    (lambda model, x: 3, "must be a floating-point array"),
  ],
)
def test_a_function_that_returns_no_loss_is_refused(fun, match):
  model, optimizer = make(linear)
  with pytest.raises(TypeError, match=match):
    ols.nnx.scaled_value_and_grad(fun, optimizer)(model, CLEAN)


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


@pytest.mark.parametrize(
  "rule", [RULE, ols.rules.WarmStart(RULE)], ids=["own", "around"]
)
def test_update_refuses_the_state_of_an_nnx_optimizer_with_the_remedy(rule):
  model, optimizer = make(tx=ols.loss_scaling(BARE, rule))
  params = nnx.as_pure(nnx.state(model, nnx.Param))
  remedy = r"; of an nnx.Optimizer pass nnx.as_pure\(optimizer.opt_state\)\.$"
  with pytest.raises(ValueError, match=remedy):
    optimizer.tx.update(params, optimizer.opt_state, params)
  state = nnx.as_pure(optimizer.opt_state)
  assert not optimizer.tx.update(params, state, params)[1].skipped


class SowingNet(Net):
  def __call__(self, x):
    self.sow(nnx.Intermediate, "inputs", x)
    return super().__call__(x)


@pytest.mark.parametrize("wrap", [lambda step: step, nnx.jit], ids=["", "jit"])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_micro_batches_change_every_object_but_those_that_overflow(wrap):
  def metric_loss_fn(model, x, metric):
    loss = loss_fn(model, x)
    metric.update(values=loss)
    return loss

  @wrap
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
  losses = [loss_fn(expected, CLEAN[i : i + 1]) for i in (0, 1, 3)]
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
  model, optimizer = make()
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
