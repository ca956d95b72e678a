"""The mistakes that no error used to tell: what is told, and when.

`docs/guides/debugging.md` has the same table in words. In each row the mistake
is made as a user would make it, in a step that is right but for it.
"""

import functools
import re
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import states
from tests import documents
from tests import proofs
from tests import support

PAGE = documents.read("docs/guides/debugging.md")
RULE = ols.DynamicLossScale()
ADAM = optax.adam(0.01)
PARAMS = {
  "v": jnp.linspace(-1, 1, 12).reshape(4, 3),
  "w": jnp.linspace(-1, 1, 8).reshape(2, 4),
}
BATCH = jnp.linspace(-2, 2, 16).reshape(8, 2)
NAN = jnp.full_like(BATCH, jnp.nan)
W_ALONE = {"v": False, "w": True}

# When something is told, in the words of the page.
BUILT = "in `tx.init`"
TRACED = "while the step is traced"
SECOND = "on the second step"
ERROR = "an error"
CHECKED = "`check_step`"
STATE = "`stalled` in the state"
FAILED = "`raise_if_failed`"
# The law that `check_step` refutes by shapes alone, and the line that it names.
PROVED = "proved"
UPDATE = "`tx.update(scaled_grads, opt_state, params)`"
APPLY = "`optax.apply_updates(params, updates)`"


def loss_fn(params, batch):
  return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"] - 1) ** 2)


def scaled(loss_fn, opt_state):
  return ols.scaled_value_and_grad(loss_fn, opt_state)


def update(tx, scaled_grads, opt_state, params):
  return tx.update(scaled_grads, opt_state, params)


def told(tx, value_and_grad=scaled, update=update, params=PARAMS, batch=BATCH):
  """Returns what a step is told, by when: one text for each."""

  def step(params, opt_state, batch):
    loss, scaled_grads = value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = update(tx, scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  found = {}

  def listen(when, function, *args):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      try:
        result = function(*args)
      except (TypeError, ValueError) as error:
        found[ERROR] = str(error)
        result = None
    if caught:
      found[when] = str(caught[0].message)
    return result

  opt_state = listen(BUILT, tx.init, params)
  out = listen(TRACED, jax.jit(step), params, opt_state, batch)
  if out is None:
    return found
  if np.any([x.stalled for x in states.find_states(out[1]).values()]):
    found[STATE] = "stalled"
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return found | checked(jax.jit(step), params, opt_state, batch)


def checked(step, *args, **kwargs):
  """Returns the law that `check_step` calls wrong, by arrays and by shapes."""
  found = proved_wrong(step, *args, **kwargs)
  report = ols.instruments.check_step(step, *args, **kwargs)
  wrong = [f"{x.name}: {x.text}" for x in report.laws if x.verdict == "wrong"]
  return {CHECKED: wrong[0], **found} if wrong else found


def proved_wrong(step, *args, **kwargs):
  """Returns the law that a proof refutes, with the lines that it names."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    report = ols.instruments.check_step(step, *proofs.shapes(args), **kwargs)
  wrong = (x for x in report.laws if x.verdict == "wrong" and x.where)
  law = next(wrong, None)
  return {PROVED: f"{law.name} {[x for _, _, x in law.where]}"} if law else {}


# The mistakes, one function each.


def unscaled_before_update():
  def unscale(tx, scaled_grads, opt_state, params):
    return tx.update(ols.unscale(scaled_grads, opt_state), opt_state, params)

  return told(ols.loss_scaling(ADAM, RULE), update=unscale)


def plain_gradients():
  def plain(loss_fn, opt_state):
    return jax.value_and_grad(loss_fn)

  return told(ols.loss_scaling(ADAM, RULE), plain)


def a_clip_before():
  clip = optax.clip_by_global_norm(1.0)
  return told(optax.chain(clip, ols.loss_scaling(ADAM, RULE)))


def scaled_by_hand_as_well():
  def twice(loss_fn, opt_state):
    def scaled_loss_fn(params, batch):
      return loss_fn(params, batch) * ols.get_loss_scale(opt_state)

    return ols.scaled_value_and_grad(scaled_loss_fn, opt_state)

  return told(ols.loss_scaling(ADAM, RULE), twice)


def of_each(optimizers, **given):
  """Returns what all of these optimizers are told, which must be the same."""
  first, *others = (told(tx, **given) for tx in optimizers)
  for x in others:
    assert x.keys() == first.keys()
    assert x[PROVED].split()[0] == first[PROVED].split()[0]
  return first


def masked_around():
  masked = optax.masked(ols.loss_scaling(ADAM, RULE), W_ALONE)
  return of_each([masked, optax.chain(masked, optax.identity())])


def one_group():
  groups = {True: ols.loss_scaling(ADAM, RULE), False: ADAM}
  combine = optax.partition, optax.multi_transform
  return of_each([x(groups, W_ALONE) for x in combine])


def an_optimizer_before():
  before = ADAM, optax.trace(0.9), optax.add_decayed_weights(0.1)
  inner = ols.loss_scaling(optax.sgd(0.1), RULE)
  return of_each([optax.chain(x, inner) for x in before])


def moves_on_a_skip_after():
  wrapped = ols.loss_scaling(ADAM, RULE)
  after = ADAM, optax.trace(0.9), optax.add_noise(0.1, 0.5, 0), optax.ema(0.9)
  return of_each([optax.chain(wrapped, x) for x in after])


def counts_after():
  schedule = optax.scale_by_schedule(lambda count: 1 / (1 + count))
  return told(optax.chain(ols.loss_scaling(ADAM, RULE), schedule))


def a_plateau_after():
  def with_value(tx, scaled_grads, opt_state, params):
    return tx.update(scaled_grads, opt_state, params, value=1.0)

  plateau = optax.contrib.reduce_on_plateau()
  tx = optax.chain(ols.loss_scaling(ADAM, RULE), plateau)
  return told(tx, update=with_value)


def by_hand(change):
  """Returns what is told if the scaled gradients are changed before."""

  def changed(tx, scaled_grads, opt_state, params):
    scaled_grads = change(scaled_grads, params)
    return tx.update(scaled_grads, opt_state, params)

  return told(ols.loss_scaling(ADAM, RULE), update=changed)


def decay_by_hand():
  def decay(scaled_grads, params):
    return jax.tree.map(lambda g, w: g + 1e-5 * w, scaled_grads, params)

  return by_hand(decay)


def not_finite_replaced():
  def replace(scaled_grads, params):
    return jax.tree.map(
      lambda g: jnp.where(jnp.isfinite(g), g, 0), scaled_grads
    )

  return by_hand(replace)


def a_scaled_value():
  def given(tx, scaled_grads, opt_state, params):
    norm = optax.tree.norm(scaled_grads)
    return tx.update(scaled_grads, opt_state, params, value=norm)

  inner = optax.chain(ADAM, optax.contrib.reduce_on_plateau())
  return told(ols.loss_scaling(inner, RULE), update=given)


def a_moving_average():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, ema, opt_state, batch):
    _, scaled_grads = scaled(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ema = optax.incremental_update(params, ema, 0.1)
    return params, ema, opt_state

  old = jax.tree.map(jnp.zeros_like, PARAMS)
  return checked(step, PARAMS, old, tx.init(PARAMS), BATCH)


def a_number_read_once():
  def frozen(loss_fn, opt_state):
    return ols.scaled_value_and_grad(loss_fn, 2.0**15)

  return told(ols.loss_scaling(ADAM, RULE), frozen)


def built_once():
  tx = ols.loss_scaling(ADAM, ols.DynamicLossScale(growth_interval=1))
  params, opt_state = PARAMS, tx.init(PARAMS)
  value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
  found = {}
  for when in ("first", SECOND):
    _, scaled_grads = value_and_grad(params, BATCH)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    if caught:
      found[when] = str(caught[0].message)

  def step(params, opt_state, batch):
    _, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return found | proved_wrong(step, PARAMS, tx.init(PARAMS), BATCH)


def apply_if_finite_around():
  return told(optax.apply_if_finite(ols.loss_scaling(ADAM, RULE), 3))


def multi_steps_around():
  return told(optax.MultiSteps(ols.loss_scaling(ADAM, RULE), 2))


def no_axis_name():
  tx = ols.loss_scaling(ADAM, RULE)

  def step(params, opt_state, batch):
    scaled_grads = scaled(loss_fn, opt_state)(params, batch)[1]
    updates, _ = tx.update(scaled_grads, opt_state, params)
    return jax.tree.map(lambda x: x[None], updates)

  mapped = jax.shard_map(
    step,
    mesh=support.make_mesh(data=2),
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P("data"),
    check_vma=False,
  )
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.jit(mapped)(PARAMS, tx.init(PARAMS), BATCH)
  return {TRACED: str(caught[0].message)}


def a_mean_over_an_axis_that_is_not_named():
  inner = optax.chain(ols.pmean_gradients("data"), ADAM)
  tx = ols.loss_scaling(inner, RULE)

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, None, 0), axis_name="data")
  def step(params, opt_state, batch):
    scaled_grads = scaled(loss_fn, opt_state)(params, batch)[1]
    return tx.update(scaled_grads, opt_state, params)[0]

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step(PARAMS, tx.init(PARAMS), BATCH[:, None])
  return {TRACED: str(caught[0].message)}


def float16_parameters():
  params = jax.tree.map(jnp.float16, PARAMS)
  found = told(ols.loss_scaling(optax.sgd(0.1), RULE), params=params)
  return {BUILT: found[BUILT]}


def overflow_misspelt():
  def misspelt(tx, scaled_grads, opt_state, params):
    return tx.update(scaled_grads, opt_state, params, overflowed=True)

  return told(ols.loss_scaling(ADAM, RULE), update=misspelt)


def a_rule_in_a_chain():
  with pytest.raises(TypeError) as raised:
    optax.chain(RULE, ADAM).init(PARAMS)
  return {ERROR: str(raised.value)}


def the_optimizer_for_its_state():
  tx = ols.loss_scaling(ADAM, RULE)
  return told(tx, lambda loss_fn, _: scaled(loss_fn, tx))


def a_fixed_scale_that_overflows():
  def in_float16(loss_fn, opt_state):
    return scaled(ols.autocast(loss_fn, "O1"), opt_state)

  return told(ols.loss_scaling(ADAM, ols.FixedLossScale(2.0**40)), in_float16)


def nothing_but_nan():
  tx = ols.loss_scaling(ADAM, RULE)
  opt_state = tx.init(PARAMS)
  for _ in range(3):
    _, scaled_grads = scaled(loss_fn, opt_state)(PARAMS, NAN)
    _, opt_state = tx.update(scaled_grads, opt_state, PARAMS)
  with pytest.raises(FloatingPointError) as raised:
    ols.raise_if_failed(opt_state, max_consecutive_skips=2)
  return {FAILED: str(raised.value)}


def statistics_that_a_skip_changes():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  tx = ols.loss_scaling(ADAM, RULE)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, batch):
    value_and_grad = ols.nnx.scaled_value_and_grad(
      lambda model, batch: jnp.mean((model(batch) - 1) ** 2), optimizer
    )
    optimizer.update(model, value_and_grad(model, batch)[1])

  return checked(step, model, optimizer, BATCH)


def dropped_and_not_passed_on():
  def accumulated(loss_fn, opt_state):
    value_and_grad = ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, opt_state), microbatches=2, drop=True
    )
    return lambda params, batch: value_and_grad(params, batch)[:2]

  return told(ols.loss_scaling(ADAM, RULE), accumulated)


def unscaled_by_the_next_state():
  def late(tx, scaled_grads, opt_state, params):
    updates, new_state = tx.update(scaled_grads, opt_state, params)
    ols.unscale(scaled_grads, new_state)
    return updates, new_state

  return told(ols.loss_scaling(ADAM, RULE), update=late)


def a_running_mean_of_the_loss():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, mean, batch):
    loss, scaled_grads = scaled(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    mean = 0.9 * mean + 0.1 * loss
    return optax.apply_updates(params, updates), opt_state, mean

  given = PARAMS, tx.init(PARAMS), jnp.float32(0), BATCH
  carry = {"params": 0, "opt_state": 1, "mean": 2}
  return checked(step, *given, carry=carry)


def no_gradients():
  def without(tx, scaled_grads, opt_state, params):
    return tx.update(None, opt_state, params)

  return told(ols.loss_scaling(ADAM, RULE), update=without)


GUARD = ols.experimental.SpikeGuard()


def a_norm_that_is_still_scaled():
  tx = ols.loss_scaling(ADAM, RULE)

  @jax.jit
  def step(params, opt_state, guard_state, batch):
    _, scaled_grads = scaled(loss_fn, opt_state)(params, batch)
    norm = optax.tree.norm(scaled_grads)
    spike = GUARD.is_spike(guard_state, norm)
    updates, opt_state = tx.update(scaled_grads, opt_state, params, skip=spike)
    guard_state = GUARD.update(guard_state, norm, opt_state)
    return optax.apply_updates(params, updates), opt_state, guard_state

  return checked(step, PARAMS, tx.init(PARAMS), GUARD.init(), BATCH)


def a_loss_of_each_device():
  mesh = support.make_mesh(data=1)

  def spike(guard_state, batch):
    return GUARD.is_spike(guard_state, loss_fn(PARAMS, batch))

  specs = jax.P(), jax.P("data")
  local = jax.shard_map(spike, mesh=mesh, in_specs=specs, out_specs=jax.P())
  try:
    jax.jit(local)(GUARD.init(), BATCH)
  except ValueError as error:
    return {ERROR: str(error)}
  return {}


NOT_SCALED = "scale: The gradient v does not grow with S"
MISTAKES = {
  "S1": (
    unscaled_before_update,
    {
      TRACED: "`update` takes the gradients scaled, got some that `unscale` "
      "has divided by S already",
      CHECKED: NOT_SCALED,
      PROVED: "scale `tx.update(ols.unscale(scaled_grads, opt_state), "
      "opt_state, params)`",
    },
  ),
  "S2": (plain_gradients, {CHECKED: NOT_SCALED, PROVED: f"scale {UPDATE}"}),
  "S3": (
    a_clip_before,
    {CHECKED: "scale: The gradient v is not", PROVED: f"scale {UPDATE}"},
  ),
  "S4": (
    scaled_by_hand_as_well,
    {
      CHECKED: "scale: The gradient v grows as S^2",
      PROVED: "scale `loss_fn(params, batch) * ols.get_loss_scale(opt_state)`",
    },
  ),
  "decay by hand": (
    decay_by_hand,
    {CHECKED: "scale: The gradient v is not", PROVED: "scale `g + 1e-5 * w`"},
  ),
  "replaced": (
    not_finite_replaced,
    {
      CHECKED: "scale: The gradient v has lost its inf and NaN",
      PROVED: "scale `jnp.where(jnp.isfinite(g), g, 0)`",
    },
  ),
  "S5": (
    masked_around,
    {
      CHECKED: "invariance: params/v depends on S",
      PROVED: f"invariance {APPLY}",
    },
  ),
  "S5, a group": (
    one_group,
    {
      CHECKED: "invariance: params/v depends on S",
      PROVED: f"invariance {UPDATE}",
    },
  ),
  "S6": (
    an_optimizer_before,
    {CHECKED: "scale: The gradient v is not", PROVED: f"scale {UPDATE}"},
  ),
  "after": (
    moves_on_a_skip_after,
    {
      CHECKED: "skip: If the step is skipped, params/v",
      PROVED: f"skip {APPLY}",
    },
  ),
  "a schedule after": (
    counts_after,
    {
      CHECKED: "skip: If the step is skipped, opt_state/1/count may",
      PROVED: f"skip {UPDATE}",
    },
  ),
  "a plateau after": (
    a_plateau_after,
    {
      CHECKED: "skip: If the step is skipped, opt_state/1/scale may",
      PROVED: "skip `tx.update(scaled_grads, opt_state, params, value=`",
    },
  ),
  "a scaled value": (
    a_scaled_value,
    {
      CHECKED: "arguments: `value=` depends on S",
      PROVED: "arguments `norm = optax.tree.norm(scaled_grads)`",
    },
  ),
  "S7": (
    a_number_read_once,
    {
      TRACED: "`update` takes the opt_state that the gradients were scaled "
      "with, got gradients scaled by the number 32768.0.",
      CHECKED: NOT_SCALED,
      PROVED: f"scale {UPDATE}",
    },
  ),
  "S8": (
    built_once,
    {
      SECOND: "`update` takes the opt_state that the gradients were scaled "
      "with, got gradients scaled by another S.",
      PROVED: f"scale {UPDATE}",
    },
  ),
  "apply_if_finite around": (
    apply_if_finite_around,
    {
      TRACED: "`opt_state` must have no optax.apply_if_finite around",
      CHECKED: "invariance: The next S is the rule's only where the gradients "
      "are finite.",
      PROVED: f"invariance {UPDATE}",
    },
  ),
  "S9": (
    multi_steps_around,
    {
      TRACED: "`opt_state` must have optax.MultiSteps inside of loss_scaling",
      CHECKED: "scale: The gradient v is not",
      PROVED: f"scale {UPDATE}",
    },
  ),
  "S10": (
    no_axis_name,
    {
      TRACED: "`axis_name` must say over which axes devices skip together, as "
      "JAX does not track what varies along 'data' here, got none."
    },
  ),
  "a mean over an axis": (
    a_mean_over_an_axis_that_is_not_named,
    {
      TRACED: "`axis_name` must name every axis over which `inner` averages or "
      "sums, got an average or a sum over 'data'"
    },
  ),
  "S11": (
    float16_parameters,
    {
      BUILT: "parameters in float16 should have master weights, got float16 at "
      "v and no masters in the state of `inner`"
    },
  ),
  "S12": (
    overflow_misspelt,
    {ERROR: "`update` takes the caller's flags as `overflow` and `skip`, got"},
  ),
  "a rule in a chain": (
    a_rule_in_a_chain,
    {ERROR: "a rule must be inside of loss_scaling, got a DynamicLossScale in"},
  ),
  "the optimizer for its state": (
    the_optimizer_for_its_state,
    {ERROR: "`opt_state` must hold the state of `loss_scaling`, got a Gradien"},
  ),
  "S13": (
    a_fixed_scale_that_overflows,
    {
      STATE: "stalled",
      CHECKED: "scale: The step overflows at this S, and the rule cannot",
    },
  ),
  "S14": (
    nothing_but_nan,
    {
      FAILED: "3 steps in a row were skipped, more than "
      "`max_consecutive_skips`=2, the last one because of NaN"
    },
  ),
  "S15": (
    statistics_that_a_skip_changes,
    {
      CHECKED: "skip: If the step is skipped, model/mean may change",
      PROVED: "skip `model(batch)`",
    },
  ),
  "S16": (
    dropped_and_not_passed_on,
    {
      TRACED: "`overflow` must be passed to `update` unchanged after "
      "accumulate(..., drop=True), got none",
      CHECKED: "scale: The gradient v leaves out micro-batches",
      PROVED: "scale `value_and_grad(params, batch)`",
    },
  ),
  "S17": (
    unscaled_by_the_next_state,
    {TRACED: "`unscale` takes the opt_state from before `update`"},
  ),
  "S18": (
    a_running_mean_of_the_loss,
    {
      CHECKED: "skip: If the step is skipped, mean may change",
      PROVED: "skip `mean = 0.9 * mean + 0.1 * loss`",
    },
  ),
  "a moving average": (
    a_moving_average,
    {
      CHECKED: "skip: If the step is skipped, ema/v may change",
      PROVED: "skip `optax.incremental_update(params, ema, 0.1)`",
    },
  ),
  "S19": (
    no_gradients,
    {ERROR: "`updates` must be the scaled gradients, got None"},
  ),
  "a guard": (
    a_norm_that_is_still_scaled,
    {
      CHECKED: "arguments: `skip=` depends on S",
      PROVED: "arguments `norm = optax.tree.norm(scaled_grads)`",
    },
  ),
  "a guard on many devices": (
    a_loss_of_each_device,
    {ERROR: "`value` must be the same on all devices that share a SpikeGuard"},
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(mistake):
  make, expected = MISTAKES[mistake]
  found = make()
  assert found.keys() == expected.keys(), found
  for when, text in expected.items():
    if when == PROVED:
      law, _, line = text.partition(" ")
      assert found[when].startswith(f"{law} [")
      assert line.strip("`") in found[when]
    else:
      assert found[when].startswith(text)


def test_the_page_says_when_each_mistake_is_told():
  table = documents.section(PAGE, "Mistakes that are reported, and when")
  row = r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$"
  rows = re.findall(row, table, re.MULTILINE)[1:]
  told = [
    (", ".join(x for x in expected if x != PROVED), expected.get(PROVED, "no"))
    for _, expected in MISTAKES.values()
  ]
  assert [(x, y.removesuffix(" step")) for x, y in rows] == told


def test_a_right_step_is_told_nothing():
  assert told(ols.loss_scaling(ADAM, RULE)) == {}
