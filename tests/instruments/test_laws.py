"""The laws of a correct step, on right programs and on every known mistake."""

import dataclasses
import functools
import inspect
import warnings

import equinox as eqx
from flax import linen
from flax import nnx
from flax.training import train_state
import jax
from jax.experimental import ode
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from optax_lossscale import rules
from optax_lossscale.instruments import _check_step
from optax_lossscale.instruments import _proof
from optax_lossscale.presets import declaration
from tests import optimizers
from tests import support

RULE = ols.DynamicLossScale()
ADAM = optax.adam(1e-2)
RNG = np.random.default_rng(0)
PARAMS = {
  "v": jnp.asarray(RNG.normal(size=(16, 4)) * 0.3, jnp.float32),
  "w": jnp.asarray(RNG.normal(size=(8, 16)) * 0.3, jnp.float32),
}
BATCH = {
  "x": jnp.asarray(RNG.normal(size=(32, 8)), jnp.float32),
  "y": jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32),
}
VERDICTS = (
  "proved",
  "exact",
  "rounding",
  "wrong",
  "inconclusive",
  "not applied",
)


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


half_loss_fn = ols.autocast(loss_fn, "O1")


def make_step(
  tx,
  loss_fn=loss_fn,
  value_and_grad=ols.scaled_value_and_grad,
  change=lambda scaled_grads, opt_state, params: scaled_grads,
):
  """Returns the step of the README, with what a mistake changes in it."""

  def train_step(params, opt_state, batch):
    loss, scaled_grads = value_and_grad(loss_fn, opt_state)(params, batch)
    scaled_grads = change(scaled_grads, opt_state, params)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step


def check(tx, compile=jax.jit, **mistakes):
  """Returns the report on a step that is right but for its mistakes."""
  step = compile(make_step(tx, **mistakes))
  return ols.instruments.check_step(step, PARAMS, tx.init(PARAMS), BATCH)


def verdicts(report):
  """Returns the verdict of each law by its name, the worst one of several."""
  found = {}
  for law in report.laws:
    assert law.verdict in VERDICTS
    assert "please report" not in law.text
    assert not any("site-packages" in file for file, *_ in law.where)
    found.setdefault(law.name, []).append(law.verdict)
  return {
    name: "wrong" if "wrong" in several else several[0]
    for name, several in found.items()
  }


def law(report, name):
  """Returns what is seen of a law, and what mends it."""
  (found,) = (x for x in report.laws if x.name == name)
  return f"{found.text} {found.remedy}"


def assert_proved(report):
  """Checks that a report proves a step, and that the runs agree exactly."""
  assert report.ok, report
  report.raise_if_wrong()
  found = verdicts(report)
  assert [found[x] for x in ("scale", "invariance", "skip")] == ["proved"] * 3
  assert "In runs" not in str(report)


@pytest.fixture
def runs_alone(monkeypatch):
  """Makes a check judge a step by its runs alone."""
  monkeypatch.setattr(
    _check_step,
    "_proved",
    lambda traced, named, found, certain, free: _proof.Proof(
      (), found, certain, (), ()
    ),
  )


# Right programs.


def test_the_first_line_says_that_nothing_is_below_float32():
  report = check(ols.loss_scaling(ADAM, RULE))
  assert str(report).startswith(
    "The step is right, for all values, but nothing in it works below "
    "float32.\n"
  )
  report = check(ols.loss_scaling(ADAM, RULE), loss_fn=half_loss_fn)
  assert "nothing in it" not in str(report)


@pytest.mark.parametrize("compile", [jax.jit, lambda step: step])
def test_a_right_step_is_exact(compile):
  report = check(ols.loss_scaling(ADAM, RULE), compile)
  assert_proved(report)
  assert report.next_values == {"params": "0", "opt_state": "1"}
  assert report.follows == () and report.deterministic


def test_a_right_step_in_float16_is_exact_and_its_precision_is_told():
  report = check(ols.loss_scaling(ADAM, RULE), loss_fn=half_loss_fn)
  assert_proved(report)
  assert "work in float16." in law(report, "precision")


def test_a_step_without_low_precision_is_told_and_not_wrong():
  report = check(ols.loss_scaling(ADAM, RULE))
  assert verdicts(report)["precision"] == "not applied"
  assert "autocast" in law(report, "precision")


# The arguments that have no default.
EVERY = {"scale_factor": 2, "scale_window": 9}
REQUIRED = {
  "jmp": {"loss_scale": 2.0**15},
  "megatron_constant": {"initial_scale": 2.0**15},
  "mindspore_amp": {"scale_value": 2**15} | EVERY,
  "mindspore_cell": {"loss_scale_value": 2**15} | EVERY,
  "npu_exponential": {"init_loss_scale": 2.0**15, "incr_every_n_steps": 9},
  "npu_fixed": {"loss_scale": 2.0**15},
  "tf_exponential": {"init_loss_scale": 2.0**15, "incr_every_n_steps": 9},
}
RULES = [
  *(
    getattr(presets, name)(**REQUIRED.get(name, {}))
    for name in sorted(declaration.PRESETS)
  ),
  rules.HeadroomLossScale(),
  rules.LogMaxLossScale(),
  rules.WarmStart(presets.megatron()),
  ols.FixedLossScale(1024.0),
]


@pytest.mark.parametrize(
  "rule", support.slow_but(RULES[-3:], RULES), ids=support.name
)
def test_a_step_with_any_rule_is_right(rule):
  assert_proved(check(ols.loss_scaling(optax.sgd(0.1), rule)))


def test_a_rule_that_skips_nothing_is_not_held_to_the_skip():
  rule = ols.DynamicLossScale(skip=False)
  report = check(ols.loss_scaling(ADAM, rule))
  assert report.ok and verdicts(report)["skip"] == "not applied"


@pytest.mark.parametrize(
  "tx",
  [
    ols.instruments.record(ols.loss_scaling(ADAM, RULE), 8),
    ols.loss_scaling(optax.apply_if_finite(ADAM, 3), RULE),
    ols.loss_scaling(optax.MultiSteps(ADAM, 2), RULE),
    ols.master_weights(ols.loss_scaling(ADAM, RULE)),
    optax.inject_hyperparams(
      lambda rate: ols.loss_scaling(optax.sgd(rate), RULE)
    )(optax.linear_schedule(0.1, 0.2, 9)),
    optax.chain(ols.loss_scaling(ADAM, RULE), optax.add_decayed_weights(0.0)),
  ],
)
def test_what_may_be_around_or_inside_is_right(tx):
  assert_proved(check(tx))


@pytest.mark.slow
def test_an_accumulated_step_is_right():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, batch):
    value_and_grad = ols.accumulate(
      ols.scaled_value_and_grad(half_loss_fn, opt_state),
      microbatches=4,
      drop=True,
    )
    loss, scaled_grads, overflow = value_and_grad(params, batch)
    updates, opt_state = tx.update(
      scaled_grads, opt_state, params, overflow=overflow
    )
    return optax.apply_updates(params, updates), opt_state, loss

  report = ols.instruments.check_step(step, PARAMS, tx.init(PARAMS), BATCH)
  assert_proved(report)


def test_a_program_may_forbid_transfers_and_nan():
  tx = ols.loss_scaling(ADAM, RULE)
  opt_state = tx.init(PARAMS)
  with jax.transfer_guard("disallow"), jax.debug_nans(True):
    report = ols.instruments.check_step(
      jax.jit(make_step(tx)), PARAMS, opt_state, BATCH
    )
  assert_proved(report)


def test_donated_arguments_are_copies_and_nothing_compiles_again():
  tx = ols.loss_scaling(ADAM, RULE)
  step = jax.jit(make_step(tx), donate_argnums=(0, 1))
  params, opt_state = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
  step(*jax.tree.map(jnp.copy, (params, opt_state)), BATCH)
  before = support.to_bits((params, opt_state))
  assert_proved(ols.instruments.check_step(step, params, opt_state, BATCH))
  assert step._cache_size() == 1
  assert support.to_bits((params, opt_state)) == before


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_under_shard_map_is_right(check_vma):
  mesh = support.make_mesh(data=4)
  tx = ols.loss_scaling(ADAM, RULE, axis_name="data", average_scaled="data")

  def step(params, opt_state, batch):
    varying = ols.make_varying(params, "data")
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      varying, batch
    )
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  sharded = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
  report = ols.instruments.check_step(
    jax.jit(sharded), PARAMS, tx.init(PARAMS), batch
  )
  assert_proved(report)


@pytest.mark.slow
def test_a_step_under_pmap_is_right():
  tx = ols.loss_scaling(ADAM, RULE, axis_name="data", average_scaled="data")
  step = jax.pmap(make_step(tx), axis_name="data", donate_argnums=(0, 1))

  def spread(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * 2), tree)

  batch = jax.tree.map(lambda x: x.reshape(2, 16, -1), BATCH)
  state = spread(tx.init(PARAMS))
  assert_proved(ols.instruments.check_step(step, spread(PARAMS), state, batch))


@pytest.mark.slow
def test_a_vmapped_ensemble_is_right_and_one_wrong_member_is_seen():
  tx = ols.loss_scaling(ADAM, RULE)
  several = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 2]), PARAMS)
  opt_state = jax.vmap(tx.init)(several)
  # Each has its own S, and one of them overflows at first.
  scales = jnp.array([2.0**10, 2.0**126, 2.0**15], jnp.float32)
  opt_state = optax.tree.set(opt_state, loss_scale=scales)
  step = jax.jit(jax.vmap(make_step(tx), (0, 0, None)))
  assert_proved(ols.instruments.check_step(step, several, opt_state, BATCH))

  def unscale_one(scaled_grads, opt_state, params):
    is_wrong = jnp.mean(params["w"] ** 2) < 0.05
    return jax.tree.map(
      lambda x, y: jnp.where(is_wrong, x, y),
      ols.unscale(scaled_grads, opt_state),
      scaled_grads,
    )

  wrong = jax.jit(jax.vmap(make_step(tx, change=unscale_one), (0, 0, None)))
  report = ols.instruments.check_step(wrong, several, opt_state, BATCH)
  assert verdicts(report)["scale"] == "wrong"
  assert "In runs: The largest gradient is prop" in law(report, "scale")


def two_losses(tx, first="a", second="b"):
  """Returns a step of two optimizers, each with the scale that is named."""

  def step(params, opt_states, batch):
    after, new_states = {}, {}
    for name, scale in (("a", first), ("b", second)):
      value_and_grad = ols.scaled_value_and_grad(
        loss_fn, ols.get_loss_scale(opt_states[scale])
      )
      _, scaled_grads = value_and_grad(params[name], batch)
      updates, new_states[name] = tx.update(
        scaled_grads, opt_states[name], params[name]
      )
      after[name] = optax.apply_updates(params[name], updates)
    return after, new_states

  params = {"a": PARAMS, "b": jax.tree.map(lambda x: x / 2, PARAMS)}
  opt_states = {name: tx.init(params[name]) for name in params}
  return jax.jit(step), params, opt_states, BATCH


@pytest.mark.slow
def test_two_scales_are_varied_one_at_a_time():
  tx = ols.loss_scaling(ADAM, RULE)
  assert_proved(ols.instruments.check_step(*two_losses(tx)))
  report = ols.instruments.check_step(*two_losses(tx, "a", "a"))
  assert verdicts(report)["scale"] == "wrong"
  text = "Of S at opt_states/b: The gradient v grows as S of opt_states/a, but"
  found = [x.text for x in report.laws if x.text.startswith(text)]
  assert len(found) == 1 and f"In runs: {NOT_SCALED}" in found[0]


@pytest.mark.slow
def test_a_linen_train_state_is_right_and_that_of_flax_is_not():
  class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
      x = linen.Dense(8, dtype=jnp.float16)(x)
      x = linen.BatchNorm(use_running_average=False, dtype=jnp.float16)(x)
      return jnp.float32(linen.Dense(4, dtype=jnp.float16)(x))

  class State(ols.linen.TrainState):
    batch_stats: dict

  class FlaxState(train_state.TrainState):
    batch_stats: dict

  net = Net()
  variables = net.init(jax.random.key(0), BATCH["x"])

  @jax.jit
  def step(state, batch):
    def loss_fn(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      out, new = net.apply(variables, batch["x"], mutable=["batch_stats"])
      return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    value_and_grad = ols.scaled_value_and_grad(
      loss_fn, state.opt_state, has_aux=True
    )
    (loss, batch_stats), scaled_grads = value_and_grad(state.params)
    return state.apply_gradients(
      grads=scaled_grads, batch_stats=batch_stats
    ), loss

  def make(kind):
    return kind.create(
      apply_fn=net.apply,
      params=variables["params"],
      tx=ols.loss_scaling(ADAM, RULE),
      batch_stats=variables["batch_stats"],
    )

  report = ols.instruments.check_step(step, make(State), BATCH)
  assert_proved(report)
  report = ols.instruments.check_step(step, make(FlaxState), BATCH)
  assert verdicts(report)["skip"] == "wrong"
  text = law(report, "skip")
  assert "state/batch_stats/BatchNorm_0/mean" in text and "state/step" in text
  report = ols.instruments.check_step(
    step, make(FlaxState), BATCH, may_change=["state/step", "*/BatchNorm_?/*"]
  )
  assert_proved(report)


@pytest.mark.slow
def test_an_equinox_step_is_right():
  model = eqx.nn.MLP(8, 4, 16, depth=1, key=jax.random.key(0))
  tx = ols.loss_scaling(ADAM, RULE)
  opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, opt_state, batch):
    def scaled_loss_fn(model):
      loss = jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)
      return ols.scale_loss(loss, opt_state)

    scaled_grads = eqx.filter_grad(scaled_loss_fn)(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state

  assert_proved(ols.instruments.check_step(step, model, opt_state, BATCH))


class Net(nnx.Module):
  """Everything that a forward pass changes in place."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 4, rngs=rngs, dtype=jnp.float16)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # It is deprecated outside of a capture.
      self.sow(nnx.Intermediate, "seen", x)
    return jnp.float32(self.dropout(self.norm(self.linear(x))))


def nnx_loss_fn(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@nnx.jit
def nnx_step(model, optimizer, batch):
  with ols.nnx.undo_on_skip(optimizer, model):
    value_and_grad = ols.nnx.scaled_value_and_grad(nnx_loss_fn, optimizer)
    loss, scaled_grads = value_and_grad(model, batch)
    optimizer.update(model, scaled_grads)
  return loss


@nnx.jit
def nnx_step_without_a_block(model, optimizer, batch):
  value_and_grad = ols.nnx.scaled_value_and_grad(nnx_loss_fn, optimizer)
  loss, scaled_grads = value_and_grad(model, batch)
  optimizer.update(model, scaled_grads)
  return loss


@nnx.jit
def nnx_step_without_a_scale(model, optimizer, batch):
  with ols.nnx.undo_on_skip(optimizer, model):
    loss, grads = nnx.value_and_grad(nnx_loss_fn)(model, batch)
    optimizer.update(model, grads)
  return loss


def check_nnx(step, **options):
  """Returns the report on a step, which must have changed nothing."""
  model = Net(nnx.Rngs(0))
  tx = ols.loss_scaling(ADAM, RULE)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  before = support.to_bits(nnx.as_pure(nnx.state((model, optimizer))))
  report = run_check(step, model, optimizer, BATCH, **options)
  assert support.to_bits(nnx.as_pure(nnx.state((model, optimizer)))) == before
  return report


def test_an_nnx_step_is_right():
  assert_proved(check_nnx(nnx_step))


@pytest.mark.slow
def test_nnx_statistics_that_a_skip_leaves_changed_are_named():
  report = check_nnx(nnx_step_without_a_block)
  assert verdicts(report)["skip"] == "wrong"
  assert (
    "changed model/dropout/rngs/count, model/norm/mean, model/norm/var. "
    in law(report, "skip")
  )
  report = check_nnx(
    nnx_step_without_a_block, may_change=["model/norm", "*/rngs/*"]
  )
  assert_proved(report)


@pytest.mark.slow
@pytest.mark.parametrize("is_selected", [True, False])
def test_what_an_nnx_step_returns_is_held_to_the_skip(is_selected):
  model = Net(nnx.Rngs(0))
  tx = ols.loss_scaling(ADAM, RULE)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  def weights():
    return nnx.as_pure(nnx.state(model, nnx.Param))

  @nnx.jit
  def step(model, optimizer, mean, batch):
    loss = nnx_step(model, optimizer, batch)
    new = optax.incremental_update(
      nnx.as_pure(nnx.state(model, nnx.Param)), mean, 0.1
    )
    opt_state = nnx.as_pure(optimizer.opt_state)
    return loss, ols.select_on_skip(
      opt_state, new, mean
    ) if is_selected else new

  report = run_check(step, model, optimizer, weights(), BATCH)
  assert report.next_values["mean"] == "1"
  assert is_selected == report.ok, report
  changed = "A step that overflows changed mean/linear/bias, mean/linear/kernel"
  assert is_selected != (changed in law(report, "skip"))


def test_nnx_gradients_that_are_not_scaled_are_seen():
  report = check_nnx(nnx_step_without_a_scale)
  assert verdicts(report)["scale"] == "wrong"
  assert f"In runs: {NOT_SCALED}" in law(report, "scale")


# The rest of a report.


def test_other_outputs_that_follow_s_are_told_and_no_mistake():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(state, batch):
    params, opt_state = state
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      params, batch
    )
    true = ols.unscale(scaled_grads, opt_state)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    metrics = {
      "loss": loss,
      "norm": optax.tree.norm(scaled_grads),
      "true_norm": optax.tree.norm(true),
    }
    return (optax.apply_updates(params, updates), opt_state), metrics

  report = ols.instruments.check_step(step, (PARAMS, tx.init(PARAMS)), BATCH)
  assert_proved(report)
  assert report.next_values == {"state": "0"}
  assert report.follows == ("1/norm",)
  assert "Other outputs that depend on S: output 1/norm." in str(report)


def test_a_count_that_depends_on_s_is_named_without_a_size():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, counts, batch):
    count = jnp.log2(ols.get_loss_scale(opt_state)).astype(counts.dtype)
    params, opt_state, _ = make_step(tx)(params, opt_state, batch)
    return params, opt_state, counts + count

  args = PARAMS, tx.init(PARAMS), jnp.zeros(2, int), BATCH
  report = ols.instruments.check_step(step, *args, carry={0: 0, 1: 1, 2: 2})
  assert "between S and S/2: counts. " in law(report, "invariance")


def test_a_running_mean_that_a_skip_moves_is_named():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, mean, batch):
    params, opt_state, loss = make_step(tx)(params, opt_state, batch)
    return params, opt_state, 0.9 * mean + 0.1 * loss

  arguments = (PARAMS, tx.init(PARAMS), jnp.float32(0), BATCH)
  # A single float might be anything.
  report = ols.instruments.check_step(step, *arguments)
  assert report.ok and "mean" not in report.next_values
  carry = {0: 0, "opt_state": 1, "mean": 2}
  report = ols.instruments.check_step(step, *arguments, carry=carry)
  assert "A step that overflows changed mean." in law(report, "skip")
  assert verdicts(report)["skip"] == "wrong"


def test_a_step_that_is_not_repeatable_is_told(runs_alone):
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  rng = np.random.default_rng(0)

  def step(params, opt_state, batch):
    noise = jnp.float32(rng.normal(size=(32, 8)))
    return make_step(tx)(params, opt_state, {**batch, "x": batch["x"] + noise})

  report = ols.instruments.check_step(step, PARAMS, tx.init(PARAMS), BATCH)
  assert not report.deterministic and not report.ok
  assert "Two runs with the same S differ." in str(report)
  assert verdicts(report)["invariance"] == "inconclusive"


def test_a_step_that_runs_on_the_host_is_checked_but_for_its_precision():
  tx = ols.loss_scaling(ADAM, RULE)

  def step(params, opt_state, batch):
    params, opt_state, loss = make_step(tx)(params, opt_state, batch)
    return params, opt_state, float(loss)

  report = ols.instruments.check_step(step, PARAMS, tx.init(PARAMS), BATCH)
  assert report.ok and {*verdicts(report).values()} == {"exact", "not applied"}
  assert verdicts(report)["precision"] == "not applied"
  assert "JAX cannot trace the step (Concretization" in str(report)


def test_without_a_clean_step_there_is_no_verdict(runs_alone):
  tx = ols.loss_scaling(ADAM, RULE)
  batch = {**BATCH, "x": BATCH["x"].at[0].set(jnp.nan)}
  report = ols.instruments.check_step(
    jax.jit(make_step(tx)), PARAMS, tx.init(PARAMS), batch
  )
  assert not report.ok and verdicts(report)["scale"] == "inconclusive"
  assert "overflows at this S and at smaller ones" in str(report)
  report.raise_if_wrong()


def test_loss_scaling_that_is_switched_off_breaks_no_law():
  report = check(ols.loss_scaling(ADAM, None))
  assert report.ok and verdicts(report)["scale"] == "not applied"
  assert "switched off" in str(report)


def test_a_state_that_is_thrown_away_is_told():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, batch):
    params, _, loss = make_step(tx)(params, opt_state, batch)
    return params, opt_state, loss

  report = ols.instruments.check_step(step, PARAMS, tx.init(PARAMS), BATCH)
  assert verdicts(report)["invariance"] == "wrong"
  assert "The next S is the old one" in law(report, "invariance")
  assert "`update` of loss_scaling did not run" in law(report, "scale")


def test_a_batch_without_gradients_gives_no_verdict_on_the_scale(runs_alone):
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  report = check(tx, loss_fn=lambda params, batch: 0 * loss_fn(params, batch))
  assert verdicts(report)["scale"] == "inconclusive"


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"carry": {"param": 0}}, "the arguments are params, opt_state, batch"),
    ({"carry": {0: 7}}, "the outputs 0, 1, 2"),
    ({"carry": {0: 1}}, "of the same structure, shapes and dtypes"),
    ({"carry": {0: 0}}, "opt_state, got `carry` without it, {0: 0}; it must"),
  ],
)
def test_a_name_that_leads_nowhere_is_refused(options, text):
  tx = ols.loss_scaling(ADAM, RULE)
  with pytest.raises(ValueError, match=text):
    ols.instruments.check_step(
      make_step(tx), PARAMS, tx.init(PARAMS), BATCH, **options
    )


def test_a_step_without_a_state_to_judge_is_refused():
  tx = ols.loss_scaling(ADAM, RULE)
  check_step = ols.instruments.check_step
  with pytest.raises(ValueError, match="none among its arguments params, x"):
    check_step(lambda params, x: params, PARAMS, BATCH)
  with pytest.raises(ValueError, match="next value of the argument that holds"):
    check_step(lambda params, state: params, PARAMS, tx.init(PARAMS))
  with pytest.raises(
    TypeError, match="must be the train step itself, got a dict"
  ):
    check_step(PARAMS, tx.init(PARAMS))
  with pytest.raises(TypeError, match="must be called outside of jit"):
    jax.jit(functools.partial(check_step, make_step(tx)))(
      PARAMS, tx.init(PARAMS), BATCH
    )


def test_a_rule_whose_scale_is_derived_is_named():
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Exponent:
    exponent: jax.Array

    @property
    def loss_scale(self):
      return jnp.exp2(self.exponent)

  class Derived(ols.LossScale):
    def init(self):
      return Exponent(jnp.float32(3))

    def update(self, state, overflow, *, amax=None):
      return state

  tx = ols.loss_scaling(ADAM, Derived())
  with pytest.raises(
    TypeError, match="got a Exponent whose .* store S itself in it"
  ):
    ols.instruments.check_step(make_step(tx), PARAMS, tx.init(PARAMS), BATCH)


# Mistakes.


def plain(loss_fn, opt_state):
  """Stands for `scaled_value_and_grad`, and does not scale."""
  return jax.value_and_grad(loss_fn)


def scaled_twice(loss_fn, opt_state):
  """Stands for `scaled_value_and_grad`, and scales by hand as well."""

  def scaled_loss_fn(params, batch):
    return loss_fn(params, batch) * ols.get_loss_scale(opt_state)

  return ols.scaled_value_and_grad(scaled_loss_fn, opt_state)


def read_once(loss_fn, opt_state):
  """Stands for `scaled_value_and_grad`, with an S that was read once."""
  return ols.scaled_value_and_grad(loss_fn, 2.0**15)


def unscaled(scaled_grads, opt_state, params):
  """Unscales before `update`."""
  return ols.unscale(scaled_grads, opt_state)


def nearly_unscaled(scaled_grads, opt_state, params):
  """Unscales before `update`, but for a small part."""
  return jax.tree.map(
    lambda x, y: x + 1e-8 * y,
    ols.unscale(scaled_grads, opt_state),
    scaled_grads,
  )


def clipped(scaled_grads, opt_state, params):
  """Clips before `update`."""
  return optax.clip_by_global_norm(1.0).update(
    scaled_grads, optax.EmptyState()
  )[0]


def decayed(scaled_grads, opt_state, params):
  """Adds weight decay to scaled gradients."""
  return jax.tree.map(lambda x, p: x + 1e-2 * p, scaled_grads, params)


W_ALONE = {"w": True, "v": False}
NOT_SCALED = "The largest gradient does not depend on S."
MISTAKES = {
  "unscaled before update": (
    {"tx": ols.loss_scaling(ADAM, RULE), "change": unscaled},
    {"scale": NOT_SCALED},
  ),
  "unscaled before update, nearly": (
    {"tx": ols.loss_scaling(ADAM, RULE), "change": nearly_unscaled},
    {"scale": NOT_SCALED},
  ),
  "jax.value_and_grad": (
    {"tx": ols.loss_scaling(ADAM, RULE), "value_and_grad": plain},
    {"scale": NOT_SCALED, "invariance": "(50 % like S^-1)"},
  ),
  # Its updates do not depend on the size of gradients.
  "jax.value_and_grad, sign_sgd": (
    {
      "tx": ols.loss_scaling(optax.sign_sgd(0.1), RULE),
      "value_and_grad": plain,
    },
    {"scale": NOT_SCALED},
  ),
  "a clip before the wrapper": (
    {
      "tx": optax.chain(
        optax.clip_by_global_norm(1.0), ols.loss_scaling(ADAM, RULE)
      )
    },
    {"scale": NOT_SCALED},
  ),
  "a clip by hand": (
    {"tx": ols.loss_scaling(ADAM, RULE), "change": clipped},
    {"scale": NOT_SCALED},
  ),
  "scaled twice": (
    {"tx": ols.loss_scaling(ADAM, RULE), "value_and_grad": scaled_twice},
    {"scale": "proportional to S squared. The loss is scaled twice"},
  ),
  "masked": (
    {"tx": optax.masked(ols.loss_scaling(ADAM, RULE), W_ALONE)},
    {"invariance": "S/2: params/v (50 % like S^1).", "skip": "params/v"},
  ),
  "one group": (
    {
      "tx": optax.partition(
        {True: ols.loss_scaling(ADAM, RULE), False: optax.sgd(0.1)}, W_ALONE
      )
    },
    {"invariance": "S/2: params/v (50 % like S^1).", "skip": "params/v"},
  ),
  "an optimizer before the wrapper": (
    {"tx": optax.chain(ADAM, ols.loss_scaling(optax.identity(), RULE))},
    {"scale": NOT_SCALED, "skip": "opt_state/0/0/count"},
  ),
  "an optimizer after the wrapper": (
    {"tx": optax.chain(ols.loss_scaling(optax.identity(), RULE), ADAM)},
    {"skip": "opt_state/1/0/count"},
  ),
  "momentum after the wrapper": (
    {
      "tx": optax.chain(
        ols.loss_scaling(optax.sgd(0.1), RULE), optax.trace(0.9)
      )
    },
    {"skip": "opt_state/1/trace/v"},
  ),
  "an S that was read once": (
    {"tx": ols.loss_scaling(ADAM, RULE), "value_and_grad": read_once},
    {"scale": NOT_SCALED},
  ),
  "MultiSteps around": (
    {"tx": optax.MultiSteps(ols.loss_scaling(ADAM, RULE), 4)},
    {"invariance": "opt_state/acc_grads/v (50 % like S^1)"},
  ),
  "apply_if_finite around": (
    {"tx": optax.apply_if_finite(ols.loss_scaling(ADAM, RULE), 3)},
    {"skip": "S can never come down"},
  ),
  "weight decay by hand": (
    {"tx": ols.loss_scaling(optax.sgd(0.1), RULE), "change": decayed},
    {"invariance": "Updates differ between S and S/2: params/"},
  ),
}


@pytest.mark.filterwarnings("ignore::optax_lossscale.WiringWarning")
@pytest.mark.parametrize(
  "mistake",
  support.slow_but(["jax.value_and_grad", "masked", "scaled twice"], MISTAKES),
)
def test_a_mistake_breaks_its_law(mistake):
  program, expected = MISTAKES[mistake]
  report = check(**program)
  assert not report.ok and "Of S at" not in str(report)
  found = verdicts(report)
  # One remedy is enough for one mistake.
  if found["scale"] == "wrong":
    assert not any(x.remedy for x in report.laws if x.name == "invariance")
  assert {x for x in found if found[x] == "wrong"} >= expected.keys(), report
  for name, text in expected.items():
    assert text in law(report, name)
  with pytest.raises(ValueError, match="The step is wrong"):
    report.raise_if_wrong()


def zeroed(scaled_grads, opt_state, params):
  """Hides inf and NaN from `update`."""
  return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), scaled_grads)


@pytest.mark.filterwarnings("ignore::optax_lossscale.WiringWarning")
@pytest.mark.parametrize(
  "change", [unscaled, nearly_unscaled, clipped, decayed, zeroed]
)
def test_a_broken_law_names_the_lines_of_the_mistake(change):
  tx = ols.loss_scaling(ADAM, RULE)
  shapes = jax.eval_shape(lambda: (PARAMS, tx.init(PARAMS), BATCH))
  report = run_check(make_step(tx, change=change), *shapes)
  assert verdicts(report)["scale"] == "wrong"
  lines, first = inspect.getsourcelines(change)
  (where,) = (x.where for x in report.laws if x.name == "scale")
  mine = {n: code for _, n, code in where if 0 <= n - first < len(lines)}
  assert mine, where
  assert all(code == lines[n - first].strip() for n, code in mine.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optax_lossscale.WiringWarning")
@pytest.mark.parametrize(
  "mistake", ["jax.value_and_grad", "masked", "MultiSteps around", "one group"]
)
def test_in_float16_a_large_mistake_breaks_its_law(mistake, runs_alone):
  program, _ = MISTAKES[mistake]
  report = check(**program, loss_fn=half_loss_fn)
  assert "wrong" in verdicts(report).values(), report


def test_in_float16_a_small_mistake_is_not_certain_and_float32_is_advised(
  runs_alone,
):
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  report = check(tx, loss_fn=half_loss_fn, change=decayed)
  assert verdicts(report)["invariance"] != "exact"
  assert "check the step with the model in float32" in law(report, "invariance")


def lstm():
  """Returns parameters, tokens and loss of a small character LSTM."""
  size, letters = 32, 40
  rng = np.random.default_rng(0)
  shapes = {
    "embed": (letters, 4 * size),
    "hidden": (size, 4 * size),
    "out": (size, letters),
  }
  params = {
    name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)
    for name, shape in shapes.items()
  }
  tokens = jnp.asarray(rng.integers(0, letters, (17, 64)))

  def loss_fn(params, tokens):
    def cell(carry, x):
      hidden, memory = carry
      i, f, g, o = jnp.split(x + hidden @ params["hidden"], 4, axis=-1)
      memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
      hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
      return (hidden, memory), hidden

    zeros = jnp.zeros((tokens.shape[1], size))
    _, hidden = jax.lax.scan(cell, (zeros, zeros), params["embed"][tokens[:-1]])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      hidden @ params["out"], tokens[1:]
    )
    return jnp.mean(losses)

  return params, tokens, loss_fn


@pytest.mark.parametrize("log2_scale", support.slow_but([6], [15, 10, 6]))
def test_what_float16_loses_at_a_smaller_scale_is_rounding(
  log2_scale, runs_alone
):
  params, tokens, loss_fn = lstm()
  tx = ols.loss_scaling(ADAM, ols.DynamicLossScale(2.0**log2_scale))
  step = jax.jit(make_step(tx, loss_fn=ols.autocast(loss_fn, "O2")))
  report = ols.instruments.check_step(step, params, tx.init(params), tokens)
  assert report.ok and verdicts(report)["invariance"] == "rounding", report


# Odd programs that are right, and mistakes that look like them.


def test_numbers_of_python_are_right_and_exact():
  tx = ols.loss_scaling(ADAM, RULE)

  def distance(params, x):
    return (params["w"] * x - params["b"]) ** 2

  params = {"w": jnp.asarray(1.0), "b": 2.0}
  step = jax.jit(make_step(tx, loss_fn=distance))
  # The largest gradient is 6 S, whose log2 is rounded.
  assert_proved(run_check(step, params, tx.init(params), 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", support.AXIS_TYPES)
def test_a_step_over_a_mesh_is_right_and_compiles_once(axis_type):
  tx = ols.loss_scaling(ADAM, RULE)
  mesh = support.make_mesh(axis_type, data=4)
  with jax.set_mesh(mesh):
    batch = jax.device_put(BATCH, jax.NamedSharding(mesh, support.SPREAD))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    step = jax.jit(make_step(tx))
    assert_proved(run_check(step, params, tx.init(params), batch))
    assert step._cache_size() == 1


def run_check(step, *args, **options):
  return ols.instruments.check_step(step, *args, **options)


@pytest.mark.slow
def test_several_steps_in_one_are_proved():
  tx = ols.loss_scaling(ADAM, ols.DynamicLossScale(growth_interval=2))

  @jax.jit
  def step(params, opt_state, batches):
    def body(carry, batch):
      *carry, loss = make_step(tx)(*carry, batch)
      return tuple(carry), loss

    carry, losses = jax.lax.scan(body, (params, opt_state), batches)
    return *carry, losses

  batches = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x]), BATCH)
  report = run_check(step, PARAMS, tx.init(PARAMS), batches)
  assert report.ok and verdicts(report)["invariance"] == "proved"
  assert verdicts(report)["skip"] == "proved"
  assert "makes several updates" in law(report, "skip")
  # The first of the three overflows, from an S that the last one does not see.
  huge = jax.tree.map(lambda x: x.at[0].multiply(2.0**58), batches)
  huge = {"x": batches["x"], "y": huge["y"]}
  report = run_check(step, PARAMS, tx.init(PARAMS), huge)
  assert report.ok and "In runs: No next value" not in str(report), report


def test_an_optimizer_that_takes_turns_is_not_shown_to_skip():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(state, batch):
    params, opt_states, count = state
    turn = make_step(tx)

    def update(name):
      def branch(params, opt_states):
        new, opt_state, _ = turn(params[name], opt_states[name], batch)
        return params | {name: new}, opt_states | {name: opt_state}

      return branch

    params, opt_states = jax.lax.cond(
      count % 2 == 0, update("a"), update("b"), params, opt_states
    )
    applied = sum(x.applied_steps for x in opt_states.values())
    return params, opt_states, jnp.where(applied > 3, 0, applied)

  params = {"a": PARAMS, "b": PARAMS}
  opt_states = {name: tx.init(PARAMS) for name in params}
  report = run_check(step, (params, opt_states, jnp.int32(0)), BATCH)
  # The count that it returns is the same number, written in another way.
  assert "wrong" not in verdicts(report).values(), report
  assert verdicts(report)["skip"] == "inconclusive"
  assert "not shown to hold" in law(report, "skip")


@pytest.mark.parametrize("low", [True, False])
def test_a_precision_schedule_is_right_before_and_after_its_switch(
  low, request
):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=4)
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  step = jax.jit(schedule.make_train_step(loss_fn, tx))
  state = schedule.init()._replace(low=jnp.asarray(low))
  args = step, PARAMS, tx.init(PARAMS), state, BATCH
  report = run_check(*args)
  assert report.ok and str(report).startswith("The step is right, for all")
  assert ("In runs: The step sets this S aside" in law(report, "scale")) != low
  request.getfixturevalue("runs_alone")
  report = run_check(*args)
  assert report.ok, report
  assert ("sets this S aside" in law(report, "scale")) != low


def make_step_with(tx, outputs):
  """Returns a step whose outputs are made of all that it has."""

  @jax.jit
  def step(params, opt_state, x, y):
    batch = {"x": x, "y": y}
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return outputs(params, opt_state, scaled_grads, loss, x)

  return step, PARAMS, tx.init(PARAMS), BATCH["x"], BATCH["y"]


@pytest.mark.slow
def test_an_output_that_is_only_shaped_like_an_argument_breaks_no_law():
  tx = ols.loss_scaling(ADAM, RULE)
  # Predictions, say, with the shape of what they predict.
  report = run_check(
    *make_step_with(tx, lambda p, s, scaled_grads, loss, x: (p, s, jnp.tanh(x)))
  )
  assert verdicts(report)["skip"] == "inconclusive"
  assert "changed x." in law(report, "skip")
  assert "carry=" in law(report, "skip")
  report = run_check(
    *make_step_with(
      tx, lambda p, s, scaled_grads, loss, x: (p, s, jnp.tanh(x))
    ),
    carry={"params": 0, "opt_state": 1},
  )
  assert_proved(report)
  # Scaled gradients before parameters, which are trees alike.
  report = run_check(
    *make_step_with(
      tx, lambda p, s, scaled_grads, loss, x: (scaled_grads, p, s)
    )
  )
  assert_proved(report)
  # A flag is no next value of another one.
  report = run_check(
    *make_step_with(tx, lambda p, s, scaled_grads, loss, x: (p, s, s.skipped))
  )
  assert_proved(report)


def test_numbers_alone_are_no_next_values():
  tx = ols.loss_scaling(ADAM, RULE)

  def step(params, opt_state, batch, count, train, rate):
    params, opt_state, loss = make_step(tx)(params, opt_state, batch)
    return params, opt_state, count + 1, opt_state.skipped, rate * loss

  numbers = (jnp.int32(3), True, 0.5)
  report = run_check(step, PARAMS, tx.init(PARAMS), BATCH, *numbers)
  assert_proved(report)


def averaged(ema, params, opt_state, batch):
  tx = ols.loss_scaling(ADAM, RULE)
  params, new_state, _ = make_step(tx)(params, opt_state, batch)
  new_ema = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, ema, params)
  return new_ema, params, new_state


@pytest.mark.parametrize("is_selected", [True, False])
def test_a_moving_average_outside_is_held_to_the_skip(is_selected):
  opt_state = ols.loss_scaling(ADAM, RULE).init(PARAMS)
  ema = jax.tree.map(lambda x: x / 2, PARAMS)

  @jax.jit
  def step(params, ema, opt_state, batch):
    new_ema, params, opt_state = averaged(ema, params, opt_state, batch)
    if is_selected:
      new_ema = ols.select_on_skip(opt_state, new_ema, ema)
    return params, new_ema, opt_state

  report = run_check(step, PARAMS, ema, opt_state, BATCH)
  assert verdicts(report)["skip"] == ("proved" if is_selected else "wrong")
  assert is_selected or "changed ema/v, ema/w." in law(report, "skip")


def test_arguments_in_another_order_than_the_outputs_break_no_law():
  opt_state = ols.loss_scaling(ADAM, RULE).init(PARAMS)

  @jax.jit
  def step(ema, params, opt_state, batch):
    new_ema, params, opt_state = averaged(ema, params, opt_state, batch)
    return params, ols.select_on_skip(opt_state, new_ema, ema), opt_state

  for ema in (PARAMS, jax.tree.map(lambda x: x / 2, PARAMS)):
    report = run_check(step, ema, PARAMS, opt_state, BATCH)
    assert_proved(report)
    assert report.next_values == {"ema": "1", "params": "0", "opt_state": "2"}
  carry = {"ema": 1, "params": 0, "opt_state": 2}
  assert_proved(run_check(step, ema, PARAMS, opt_state, BATCH, carry=carry))


def test_whole_states_in_another_order_break_no_law():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(target, state, batch):
    params, opt_state, _ = make_step(tx)(*state, batch)
    return (params, opt_state), target

  target = jax.tree.map(lambda x: x / 2, PARAMS)
  args = (target, tx.init(target)), (PARAMS, tx.init(PARAMS)), BATCH
  report = run_check(step, *args)
  assert not report.ok and "wrong" not in verdicts(report).values(), report
  report = run_check(step, *args, carry={"state": 0})
  assert_proved(report)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_a_random_key_that_a_skip_advances_is_named(key):
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, key, batch):
    key, mine = jax.random.split(key)
    keep = jax.random.bernoulli(mine, 0.5, batch["x"].shape)
    batch = batch | {"x": batch["x"] * keep}
    return *make_step(tx)(params, opt_state, batch), key

  args = PARAMS, tx.init(PARAMS), key, BATCH
  report = run_check(step, *args)
  assert "changed key." in law(report, "skip") and not report.ok
  is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  assert (verdicts(report)["skip"] == "wrong") == is_typed
  assert_proved(run_check(step, *args, may_change=["key"]))
  # One pattern need not be a list, nor is it one of letters.
  assert_proved(run_check(step, *args, may_change="key"))
  with pytest.raises(ValueError, match=r"must name leaves .* 'yek'; they"):
    run_check(step, *args, may_change="yek")


def test_one_list_of_patterns_serves_several_steps():
  tx = ols.loss_scaling(ADAM, RULE)
  args = make_step(tx), PARAMS, tx.init(PARAMS), BATCH
  assert_proved(run_check(*args, may_change=["env_state*", "*/key", "[a]?"]))


def test_a_step_of_any_signature_is_right():
  tx = ols.loss_scaling(ADAM, RULE)
  step = make_step(tx)
  args = PARAMS, tx.init(PARAMS)
  assert_proved(run_check(lambda *args: step(*args), *args, BATCH))
  report = run_check(lambda p, *rest: step(p, *rest), *args, BATCH)
  assert report.next_values == {"p": "0", "1": "1"}
  bound = functools.partial(lambda *args, train: step(*args), train=True)
  assert_proved(run_check(bound, *args, BATCH))


@pytest.mark.parametrize("name", ["check_step", "precision_report"])
def test_a_step_with_an_argument_by_keyword_is_refused(name):
  instrument = getattr(ols.instruments, name)
  with pytest.raises(TypeError, match=r"functools\.partial\(\w+, train="):
    instrument(lambda params, *, train: params, PARAMS)
  with pytest.raises(TypeError, match="unexpected keyword argument 'train'"):
    instrument(lambda params, train: params, PARAMS, train=True)


def test_an_argument_by_keyword_is_explained():
  with pytest.raises(TypeError, match="by position") as raised:
    run_check(lambda a, params: params, PARAMS, params=PARAMS)
  text = "by position or bind it first, as in functools.partial(step, params="
  assert text in str(raised.value)


def test_the_second_optimizer_may_see_what_the_first_has_rounded():
  tx = ols.loss_scaling(optax.sgd(0.5), RULE)

  @jax.jit
  def step(params, opt_states, batch):
    a, b = params
    state_a, state_b = opt_states
    a, state_a, _ = make_step(tx, loss_fn=half_loss_fn)(a, state_a, batch)

    def loss_of_b(b, batch):
      return half_loss_fn(jax.tree.map(lambda x, y: x + y, a, b), batch)

    b, state_b, _ = make_step(tx, loss_fn=loss_of_b)(b, state_b, batch)
    return (a, b), (state_a, state_b)

  opt_state = optax.tree.set(tx.init(PARAMS), loss_scale=jnp.float32(8))
  args = (PARAMS, PARAMS), (opt_state, tx.init(PARAMS)), BATCH
  report = run_check(step, *args)
  assert "wrong" not in verdicts(report).values(), report


@pytest.mark.parametrize(
  "scale", support.slow_but([1.0], [2.0**k for k in range(-4, 12, 2)])
)
def test_in_float16_a_scale_that_is_too_small_breaks_no_law(scale):
  params, tokens, loss_fn = lstm()
  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(scale))
  step = make_step(
    tx,
    loss_fn=ols.autocast(
      lambda params, tokens: 2.0**-9 * loss_fn(params, tokens), "O2"
    ),
  )
  report = run_check(jax.jit(step), params, tx.init(params), tokens)
  assert "wrong" not in verdicts(report).values(), report


def test_a_step_with_random_data_is_not_called_wrong(runs_alone):
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  rng = np.random.default_rng(0)

  def step(params, opt_state, batch):
    size = jnp.float32(np.exp(3 * rng.normal()))
    return make_step(tx)(params, opt_state, {**batch, "y": size * batch["y"]})

  report = run_check(step, PARAMS, tx.init(PARAMS), BATCH)
  assert not report.ok and "wrong" not in verdicts(report).values(), report


def test_a_smallest_scale_gives_no_verdict(runs_alone):
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  opt_state = optax.tree.set(tx.init(PARAMS), loss_scale=jnp.float32(2**-126))
  report = run_check(jax.jit(make_step(tx)), PARAMS, opt_state, BATCH)
  assert not report.ok and "wrong" not in verdicts(report).values(), report


@pytest.mark.slow
def test_histories_of_fp8_layers_may_depend_on_s():
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)

  @jax.custom_vjp
  def observe(x, history):
    return x

  observe.defvjp(
    lambda x, history: (x, history),
    lambda history, g: (g, jnp.roll(history, 1).at[0].set(jnp.max(abs(g)))),
  )

  def fp8_loss_fn(params, batch):
    history = params["_overwrite_with_gradient"]["amax_history"]
    hidden = observe(batch["x"] @ params["w"], history)
    return jnp.mean((jnp.tanh(hidden) @ params["v"] - batch["y"]) ** 2)

  @jax.jit
  def step(params, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(fp8_loss_fn, opt_state)
    _, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    kept = {"_overwrite_with_gradient": updates["_overwrite_with_gradient"]}
    return optax.apply_updates(params, updates) | kept, opt_state

  params = PARAMS | {"_overwrite_with_gradient": {"amax_history": jnp.ones(4)}}
  assert_proved(run_check(step, params, tx.init(params), BATCH))

  @jax.jit
  def step_without_a_select(params, opt_state, batch):
    new, new_state = step(params, opt_state, batch)
    scaled_grads = ols.scaled_value_and_grad(fp8_loss_fn, opt_state)(
      params, batch
    )[1]
    name = "_overwrite_with_gradient"
    return new | {name: scaled_grads[name]}, new_state

  report = run_check(step_without_a_select, params, tx.init(params), BATCH)
  assert verdicts(report)["invariance"] == "proved"
  assert "changed params/_overwrite_with_gradient/amax_history." in law(
    report, "skip"
  )


def test_the_check_warns_as_the_step_does():
  tx = optax.MultiSteps(ols.loss_scaling(ADAM, RULE), 2)
  with pytest.warns(ols.WiringWarning, match="MultiSteps") as told:
    report = check(tx)
  assert report.warnings == (str(told[0].message),)
  assert not report.ok
  assert "\nWiringWarning: `opt_state` must have optax.Multi" in str(report)


def test_a_warning_is_told_though_the_step_fails():
  def step(params, opt_state):
    warnings.warn("a hint of the user's", stacklevel=1)
    raise ValueError("the step fails")

  tx = ols.loss_scaling(ADAM, RULE)
  with (
    pytest.warns(UserWarning, match="a hint"),
    pytest.raises(ValueError, match="the step fails"),
  ):
    ols.instruments.check_step(step, PARAMS, tx.init(PARAMS))


def test_a_step_that_is_right_but_for_a_warning_is_not_called_right():
  """On one device alone a NaN is skipped; the mean carries it to the others."""
  inner = optax.chain(ols.pmean_gradients("i"), optax.sgd(0.5))
  tx = ols.loss_scaling(inner, RULE)

  @jax.jit
  @functools.partial(jax.vmap, axis_name="i")
  def step(w, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(
      lambda w, x: jnp.mean((x @ w) ** 2), opt_state
    )
    updates, opt_state = tx.update(value_and_grad(w, batch)[1], opt_state, w)
    return optax.apply_updates(w, updates), opt_state

  w = jnp.ones((2, 3))
  args = w, jax.vmap(tx.init)(w), jnp.ones((2, 4, 3))
  with pytest.warns(ols.WiringWarning, match="over 'i'"):
    step(*args)  # Compiled by now, it would not warn again.
  with pytest.warns(ols.WiringWarning, match="over 'i'"):
    report = ols.instruments.check_step(step, *args)
  assert verdicts(report)["skip"] == "proved"
  assert not report.ok
  assert str(report).startswith("The step is not certain.")


@pytest.mark.parametrize(
  "name",
  support.slow_but(
    ["adam", "multi_steps"], optimizers.OPTIMIZERS, pytest.mark.long
  ),
)
@pytest.mark.parametrize("low", [False, True])
def test_a_step_with_any_optimizer_is_right(name, low):
  tx = ols.loss_scaling(optimizers.OPTIMIZERS[name](), RULE)
  params = optimizers.make_params()
  loss_fn = (
    ols.autocast(optimizers.loss_fn, "O1") if low else optimizers.loss_fn
  )

  @jax.jit
  def step(params, opt_state):
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
    updates, opt_state = tx.update(
      scaled_grads,
      opt_state,
      params,
      value=loss,
      grad=ols.unscale(scaled_grads, opt_state),
      value_fn=loss_fn,
    )
    return optax.apply_updates(params, updates), opt_state

  report = run_check(step, params, tx.init(params))
  assert "wrong" not in verdicts(report).values(), report
  assert low or report.ok, report


@pytest.mark.slow
def test_an_s_that_overflows_is_told_and_is_wrong_if_it_cannot_come_down():
  params, tokens, loss_fn = lstm()
  half = ols.autocast(loss_fn, "O1")
  for rule, is_right in (
    (ols.DynamicLossScale(2.0**40), True),
    (ols.FixedLossScale(2.0**40), False),
  ):
    tx = ols.loss_scaling(ADAM, rule)
    step = jax.jit(make_step(tx, loss_fn=half))
    report = ols.instruments.check_step(step, params, tx.init(params), tokens)
    assert report.ok == is_right, report
    assert report.halvings > 10
    assert f"it ran at S / 2**{report.halvings}." in str(report)
    cannot = "the rule cannot lower it" in str(report)
    assert cannot != is_right


def test_parameters_whose_next_value_is_not_found_leave_the_step_uncertain():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, batch):
    params, opt_state, _ = make_step(tx)(params, opt_state, batch)
    return tuple(params.values()), opt_state

  report = ols.instruments.check_step(step, PARAMS, tx.init(PARAMS), BATCH)
  assert not report.ok and verdicts(report)["invariance"] == "inconclusive"
  assert "next value of the parameters" in law(report, "invariance")


LATE = optax.sgd(optax.linear_schedule(0.0, 0.1, 10))
LATER = optax.sgd(optax.linear_schedule(0.0, 0.1, 10, transition_begin=3))


@pytest.mark.parametrize(
  "inner",
  [
    LATE,
    LATER,
    # Some parameters move at once.
    optax.partition({True: LATE, False: optax.sgd(0.1)}, W_ALONE),
  ],
)
def test_a_mistake_shows_where_the_first_rate_is_0(inner, runs_alone):
  # The largest gradient is another one.
  def decay_w(scaled_grads, opt_state, params):
    return scaled_grads | {"w": scaled_grads["w"] + 1e-2 * params["w"]}

  report = check(ols.loss_scaling(inner, RULE), change=decay_w)
  assert verdicts(report)["scale"] == "exact"
  assert verdicts(report)["invariance"] == "wrong"
  assert "between S and S/2: params/w (" in law(report, "invariance")


@pytest.mark.parametrize(
  "inner", [LATE, optax.MultiSteps(LATE, 3), optax.MultiSteps(ADAM, 65)]
)
def test_a_right_step_whose_parameters_move_late_is_right(inner):
  assert_proved(check(ols.loss_scaling(inner, RULE)))


@pytest.mark.slow
def test_in_float32_a_small_part_that_is_added_by_hand_is_seen():
  def decay(scaled_grads, opt_state, params):
    return jax.tree.map(lambda x, p: x + 1e-2 * p, scaled_grads, params)

  tx = ols.loss_scaling(ADAM, RULE)
  report = check(tx, change=decay)
  assert "proportional to S but for a small part" in law(report, "scale")
  assert "weight decay" in law(report, "scale")
  # In float16 it hides in the rounding, but not from the proof.
  report = check(tx, change=decay, loss_fn=half_loss_fn)
  assert "This batch hides it." in law(report, "scale")
  assert verdicts(report)["scale"] == "wrong", report


@pytest.mark.slow
def test_parameters_that_never_move_are_told():
  tx = ols.loss_scaling(optax.sgd(0.0), RULE)
  report = check(tx)
  seen = "In runs: No parameter moves in 64 steps."
  assert report.ok and seen in law(report, "invariance")
  # Frozen ones do not.
  groups = {True: ADAM, False: optax.set_to_zero()}
  assert_proved(check(ols.loss_scaling(optax.partition(groups, W_ALONE), RULE)))


@pytest.mark.parametrize("is_object", [True, False])
def test_an_nnx_model_may_change_in_place_or_be_returned(is_object):
  model, tx = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), ols.loss_scaling(ADAM, RULE)
  graphdef, given = nnx.split(model)

  def merged_loss_fn(params, batch):
    return nnx_loss_fn(nnx.merge(graphdef, params), batch)

  pure_step = make_step(tx, loss_fn=merged_loss_fn)

  @nnx.jit
  def step(model, opt_state, batch):
    params, *others = pure_step(nnx.state(model), opt_state, batch)
    nnx.update(model, params)
    return others

  if is_object:
    report = run_check(step, model, tx.init(given), BATCH)
    assert report.next_values == {"model": "in place", "opt_state": "0"}
    assert "model in place, opt_state from output 0." in str(report)
  else:
    report = run_check(pure_step, given, tx.init(given), BATCH)
    assert report.next_values == {"params": "0", "opt_state": "1"}
  assert_proved(report)


def test_nnx_objects_need_no_carry_and_an_optimizer_with_loss_scaling():
  model = Net(nnx.Rngs(0))
  with pytest.raises(ValueError, match="`carry` must be None with Flax NNX"):
    check_nnx(nnx_step, carry={"model": 0})
  optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
  with pytest.raises(ValueError, match=r"unless an nnx\.Optimizer holds it"):
    run_check(nnx_step, model, optimizer, BATCH)


def test_a_mistake_shows_where_something_else_moves_first():
  tx = ols.loss_scaling(optax.MultiSteps(ADAM, 4), RULE)

  @jax.jit
  def step(params, opt_state, mean, seen, batch):
    params, opt_state, loss = make_step(tx)(params, opt_state, batch)
    seen = ols.select_on_skip(opt_state, seen + loss, seen)
    # The moving average stands still until the parameters move.
    mean = jax.tree.map(lambda x, y: x + 0.1 * (y - x), mean, params)
    return params, opt_state, mean, seen

  args = PARAMS, tx.init(PARAMS), PARAMS, jnp.zeros(1), BATCH
  report = run_check(step, *args)
  assert verdicts(report)["skip"] == "wrong"
  assert "changed mean/v, mean/w." in law(report, "skip")


@pytest.mark.slow
def test_parameters_that_only_look_like_the_output_break_no_law():
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)
  old = jax.tree.map(lambda x: 0.9 * x, PARAMS)

  def make(outputs):
    @jax.jit
    def step(params, old, opt_state, batch):
      def distilled(params, batch):
        return loss_fn(params, batch) + optax.tree.norm(
          jax.tree.map(jnp.subtract, params, old)
        )

      value_and_grad = ols.scaled_value_and_grad(distilled, opt_state)
      loss, scaled_grads = value_and_grad(params, batch)
      updates, opt_state = tx.update(scaled_grads, opt_state, params)
      new = optax.apply_updates(params, updates)
      return outputs(new, opt_state, loss, scaled_grads, updates)

    return step, PARAMS, old, tx.init(PARAMS), BATCH

  report = run_check(*make(lambda p, s, loss, g, u: (p, s, loss, g)))
  assert not report.ok and "wrong" not in verdicts(report).values(), report
  assert "carry=" in law(report, "skip")
  report = run_check(*make(lambda p, s, loss, g, u: (u, s, loss)))
  assert not report.ok and "wrong" not in verdicts(report).values(), report
  report = run_check(
    *make(lambda p, s, loss, g, u: (p, s, loss, g)),
    carry={"params": 0, "opt_state": 1},
  )
  assert_proved(report)


@pytest.mark.slow
def test_the_errors_of_a_solver_are_rounding():
  tx = ols.loss_scaling(optax.sgd(0.1), RULE)

  def ode_loss_fn(params, batch):
    def slope(y, t):
      return jnp.tanh(y @ params["w"] @ params["v"] @ batch["mix"])

    times = jnp.linspace(0.0, 1.0, 3)
    return jnp.mean((ode.odeint(slope, batch["x"], times)[-1] - 1) ** 2)

  batch = {"x": BATCH["x"], "mix": jnp.ones((4, 8))}
  step = jax.jit(make_step(tx, loss_fn=ode_loss_fn))
  report = run_check(step, PARAMS, tx.init(PARAMS), batch)
  assert "wrong" not in verdicts(report).values(), report
  assert verdicts(report)["scale"] == "rounding"


@pytest.mark.slow
def test_an_overflow_that_is_not_skipped_is_not_stalled():
  params, tokens, loss_fn = lstm()
  rule = ols.FixedLossScale(2.0**40, skip=False)
  step = make_step(
    ols.loss_scaling(ADAM, rule), loss_fn=ols.autocast(loss_fn, "O1")
  )
  opt_state = ols.loss_scaling(ADAM, rule).init(params)
  report = run_check(jax.jit(step), params, opt_state, tokens)
  assert "wrong" not in verdicts(report).values(), report


@pytest.mark.parametrize(
  "narrow",
  [
    lambda x: x.astype(jnp.float16).astype(jnp.float32),
    lambda x: jax.lax.reduce_precision(x, 5, 10),
  ],
)
def test_what_casts_alone_lose_is_rounding(narrow):
  def cast_loss_fn(params, batch):
    hidden = narrow(jnp.tanh(batch["x"] @ params["w"]))
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(1.0))
  report = check(tx, loss_fn=cast_loss_fn)
  assert "wrong" not in verdicts(report).values(), report


def test_an_amax_that_the_state_cannot_hold_gives_no_verdict():
  with jax.enable_x64(True):
    params, batch = jax.tree.map(
      lambda x: np.asarray(x, np.float64), (PARAMS, BATCH)
    )
    tx = ols.loss_scaling(optax.sgd(1e-60), ols.FixedLossScale(2.0))
    step = make_step(tx, loss_fn=lambda p, b: 1e60 * loss_fn(p, b))
    report = run_check(jax.jit(step), params, tx.init(params), batch)
  assert "wrong" not in verdicts(report).values(), report


def test_names_of_the_report_are_taken_as_they_are():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(state, batch):
    params, opt_state, _ = make_step(tx)(state[0]["l[0]"], state[1], batch)
    return {"l[0]": params}, opt_state

  args = ({"l[0]": PARAMS}, tx.init(PARAMS)), BATCH
  report = run_check(step, *args)
  assert "state from output 0" in str(report)
  assert_proved(run_check(step, *args, carry={"state": 0}))
  assert_proved(run_check(step, *args, carry={}, may_change=None))
  assert_proved(run_check(step, *args, may_change=["state/0/l[0]/v"]))


def test_arguments_that_are_no_numbers_are_left_alone():
  tx = ols.loss_scaling(ADAM, RULE)

  class Config:
    def copy(self, depth):
      raise AssertionError

  def step(params, opt_state, batch, labels, config):
    return *make_step(tx)(params, opt_state, batch), labels

  labels = np.array(["a", "b"])
  args = PARAMS, tx.init(PARAMS), BATCH, labels, Config()
  assert_proved(run_check(step, *args))


def test_what_is_quoted_is_short():
  tx = ols.loss_scaling(ADAM, RULE)
  args = make_step(tx), PARAMS, tx.init(PARAMS), BATCH
  with pytest.raises(
    TypeError, match=r"`carry` must be a dict .* got \[0, 1\]"
  ):
    run_check(*args, carry=[0, 1])
  with pytest.raises(ValueError, match="`carry` must lead") as caught:
    run_check(*args, carry={"params": "0" * 10**6})
  assert len(str(caught.value)) < 500


@pytest.mark.parametrize("flag", [True, [jnp.array([0, 1])]])
def test_a_step_that_skip_skips_cannot_be_compared(flag):
  tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())

  def step(params, opt_state, x):
    value_and_grad = ols.scaled_value_and_grad(
      lambda params, x: jnp.sum(params * x), opt_state
    )
    _, scaled_grads = value_and_grad(params, x)
    updates, opt_state = tx.update(scaled_grads, opt_state, params, skip=flag)
    return optax.apply_updates(params, updates), opt_state

  params = jnp.ones(2)
  report = ols.instruments.check_step(step, params, tx.init(params), params)
  assert report.laws[0].verdict == "inconclusive"
  assert report.laws[0].text.startswith("`skip` skipped the step")


def test_an_overflow_that_is_hidden_from_update_is_seen():
  report = check(
    ols.loss_scaling(ADAM, RULE), loss_fn=half_loss_fn, change=zeroed
  )
  assert verdicts(report)["skip"] == "wrong"
  assert "A step whose gradients overflow was applied." in law(report, "skip")


@pytest.mark.parametrize("log2_scale", [4, 10, 15])
def test_a_clip_around_that_hides_an_overflow_is_seen(log2_scale):
  # In float16 the norm overflows before the gradients do.
  clip = optax.clip_by_global_norm(1.0)
  rule = ols.DynamicLossScale(2.0**log2_scale)
  tx = ols.master_weights(optax.chain(clip, ols.loss_scaling(ADAM, rule)))

  @jax.jit
  def step(params, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(half_loss_fn, opt_state)
    _, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = jax.tree.map(jnp.float16, PARAMS)
  report = run_check(step, params, tx.init(params), BATCH)
  assert "A step whose gradients overflow was applied." in law(report, "skip")


def test_what_changes_only_if_gradients_overflow_at_a_finite_s_is_named():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, count, batch):
    is_finite = jnp.isfinite(ols.get_loss_scale(opt_state))
    params, opt_state, _ = make_step(tx, loss_fn=half_loss_fn)(
      params, opt_state, batch
    )
    return params, opt_state, count + is_finite

  args = PARAMS, tx.init(PARAMS), jnp.zeros(1), BATCH
  report = run_check(step, *args)
  assert verdicts(report)["invariance"] == "proved"
  assert "A step that overflows changed count." in law(report, "skip")


def test_the_skip_is_tried_on_the_step_that_moves_parameters():
  tx = ols.loss_scaling(optax.MultiSteps(ADAM, 4), RULE)

  @jax.jit
  def step(params, opt_state, count, batch):
    is_last = opt_state.inner_state.mini_step == 3
    params, opt_state, _ = make_step(tx)(params, opt_state, batch)
    return params, opt_state, count + is_last

  args = PARAMS, tx.init(PARAMS), jnp.zeros(1), BATCH
  report = run_check(step, *args)
  assert "A step that overflows changed count." in law(report, "skip")


class Attention(linen.Module):
  @linen.compact
  def __call__(self, tokens):
    x = linen.Embed(40, 32)(tokens)
    for _ in range(2):
      x = linen.MultiHeadDotProductAttention(num_heads=4)(x)
    return linen.Dense(40)(x)


@pytest.mark.parametrize("log2_scale", support.slow_but([15], [15, 10]))
def test_gradients_that_are_only_rounding_leave_nothing_open(
  log2_scale, runs_alone
):
  tokens, labels = jax.random.randint(jax.random.key(0), (2, 16, 16), 0, 40)
  net = Attention()
  params = net.init(jax.random.key(0), tokens)["params"]

  def loss_fn(params, batch):
    outputs = net.apply({"params": params}, batch)
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    )

  tx = ols.loss_scaling(ADAM, ols.DynamicLossScale(2.0**log2_scale))
  step = jax.jit(make_step(tx, loss_fn=ols.autocast(loss_fn, "O1")))
  report = run_check(step, params, tx.init(params), tokens)
  assert report.ok and verdicts(report)["invariance"] == "rounding", report


def test_a_fixed_scale_of_1_that_nothing_reads_is_a_constant():
  scaling = ols.loss_scaling(optax.identity(), RULE)
  tx = ols.loss_scaling(ADAM, ols.FixedLossScale(1.0))

  @jax.jit
  def step(params, opt_state, scales, batch):
    total = jax.tree.map(jnp.zeros_like, params)
    for name, scale in scales.items():
      value_and_grad = ols.scaled_value_and_grad(half_loss_fn, scale)
      _, scaled_grads = value_and_grad(params, batch)
      grads, state = scaling.update(scaled_grads, scale)
      total, scales = optax.tree.add(total, grads), scales | {name: state}
    overflow = jnp.stack([x.overflow for x in scales.values()])
    updates, opt_state = tx.update(total, opt_state, params, overflow=overflow)
    return optax.apply_updates(params, updates), opt_state, scales

  scales = {name: scaling.init(PARAMS) for name in "ab"}
  report = run_check(step, PARAMS, tx.init(PARAMS), scales, BATCH)
  assert_proved(report)


def test_a_member_that_uses_the_s_of_another_is_seen():
  tx = ols.loss_scaling(ADAM, RULE)
  several = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 2]), PARAMS)
  opt_state = jax.vmap(tx.init)(several)

  @jax.jit
  def step(params, opt_state, batch):
    first = jax.tree.map(lambda x: x[0], opt_state)

    def one(params, opt_state):
      _, scaled_grads = ols.scaled_value_and_grad(
        loss_fn, ols.get_loss_scale(first)
      )(params, batch)
      updates, opt_state = tx.update(scaled_grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    return jax.vmap(one)(params, opt_state)

  report = run_check(step, several, opt_state, BATCH)
  assert verdicts(report)["scale"] == "wrong", report
  assert "grows as S[0], but `update`" in law(report, "scale")
  assert "In runs: The largest gradient is prop" in law(report, "scale")


def test_a_leak_into_a_best_value_of_inf_is_seen():
  tx = ols.loss_scaling(ADAM, RULE)

  def make(leak):
    @jax.jit
    def step(params, opt_state, best, batch):
      loss_scale = ols.get_loss_scale(opt_state)
      params, opt_state, loss = make_step(tx)(params, opt_state, batch)
      new = jnp.minimum(best, leak(loss, loss_scale, best))
      return params, opt_state, ols.select_on_skip(opt_state, new, best)

    return step, PARAMS, tx.init(PARAMS), jnp.full(1, jnp.inf), BATCH

  report = run_check(*make(lambda loss, loss_scale, best: loss_scale * loss))
  assert verdicts(report)["invariance"] == "wrong"
  assert "In runs: Updates differ" in law(report, "invariance")

  # This one does not show in the first step.
  def late(loss, loss_scale, best):
    return jnp.where(jnp.isinf(best), 9, 8 - jnp.log2(loss_scale))

  report = run_check(*make(late))
  assert verdicts(report)["invariance"] == "wrong"
  assert "Not proved: best " in law(report, "invariance")


def test_a_far_smaller_s_shows_what_is_added_to_scaled_gradients():
  def decay(scaled_grads, opt_state, params):
    return jax.tree.map(lambda x, p: x + 1e-5 * p, scaled_grads, params)

  report = check(ols.loss_scaling(optax.sgd(0.1), RULE), change=decay)
  assert verdicts(report)["invariance"] == "wrong"
  assert "% at S/4096" in law(report, "invariance")


@pytest.mark.parametrize(
  "take",
  [
    lambda a, b: jnp.minimum(a, b),
    lambda a, b: jnp.where(a < b, a, b),
    lambda a, b: jnp.sort(jnp.stack([a, b]), axis=0)[0],
    lambda a, b: 1 / (1 / a + 1 / b),
  ],
  ids=["minimum", "where", "sort", "harmonic mean"],
)
def test_what_leaves_out_an_inf_is_not_proved_to_keep_it(take):
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(2.0**15))

  def loss_fn(w, x):
    y = w.astype(jnp.float16) * x[0].astype(jnp.float16)
    return (y * x[1].astype(jnp.float16)).astype(jnp.float32)

  @jax.jit
  def step(w, opt_state, a, b):
    gradient = ols.scaled_value_and_grad(loss_fn, opt_state)
    scaled_grad = take(gradient(w, a)[1], gradient(w, b)[1])
    updates, opt_state = tx.update(scaled_grad, opt_state, w)
    return optax.apply_updates(w, updates), opt_state

  # The first gradient is the smaller one, but overflows on its way at this S.
  args = jnp.zeros(()), tx.init(jnp.zeros(())), *jnp.array([[0.1, 4], [1, 1]])
  assert step(*args)[0] == -1
  assert verdicts(run_check(step, *args))["scale"] != "proved"
