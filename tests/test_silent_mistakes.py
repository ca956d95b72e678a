"""Mistakes that raise no error by themselves: what reveals each, and when.

Each row of `MISTAKES` is one wrong program, made as a user would make it, in a
step that is right but for it. `docs/guides/debugging.md` has the same table.
"""

from collections.abc import Callable
import functools
import re
from typing import Any
from typing import NamedTuple
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
# S moves at once, so that an S of another step shows.
RULE = ols.DynamicLossScale(growth_interval=1)
ADAM = optax.adam(0.01)
SCALED = ols.loss_scaling(ADAM, RULE)
PARAMS = {
  "v": jnp.linspace(-1, 1, 12).reshape(4, 3),
  "w": jnp.linspace(-1, 1, 8).reshape(2, 4),
}
BATCH = jnp.linspace(-2, 2, 16).reshape(8, 2)
W_ALONE = {"v": False, "w": True}

# When something is told, in the words of the page.
BUILT = "in `tx.init`"
TRACED = "while the step is traced"
SECOND = "on the second step"
ERROR = "an error"
CHECKED = "`check_step`"
STATE = "`stalled` in the state"
FAILED = "`raise_if_failed(opt_state, 100)`"
# The law that `check_step` refutes by shapes alone with the line that it names,
# and all that it says if it also runs the step.
PROVED = "proved"
SEEN = "seen"


def loss_fn(params, batch):
  return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"] - 1) ** 2)


def scaled(loss_fn, opt_state):
  return ols.scaled_value_and_grad(loss_fn, opt_state)


def update(tx, scaled_grads, opt_state, params):
  return tx.update(scaled_grads, opt_state, params)


def listen(function, *args):
  """Returns a function's result, and the texts of its warnings."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = function(*args)
  assert all(x.category is ols.WiringWarning for x in caught)
  assert all(x.filename == __file__ for x in caught)
  return result, [str(x.message) for x in caught]


def told(
  tx=SCALED, value_and_grad=scaled, update=update, params=PARAMS, twice=False
):
  """Returns what a step is told, by when: one text for each.

  Where it is told `twice`, a step that is not compiled is told the same.
  """

  def step(params, opt_state, batch):
    loss, scaled_grads = value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = update(tx, scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  compiled = jax.jit(step)
  opt_state, texts = listen(tx.init, params)
  found = dict(zip([BUILT], texts, strict=False))
  try:
    (_, after, _), texts = listen(compiled, params, opt_state, BATCH)
  except (TypeError, ValueError) as error:
    return found | {ERROR: str(error)}
  found |= dict(zip([TRACED], texts, strict=False))
  # By now it is compiled, and silent.
  assert listen(compiled, params, after, BATCH)[1] == []
  if twice:
    assert listen(step, params, after, BATCH)[1] == texts
  if np.any([x.stalled for x in states.find_states(after).values()]):
    found[STATE] = "stalled"
  return found | checked(compiled, params, opt_state, BATCH)


def checked(step, *args, **kwargs):
  """Returns the law that `check_step` calls wrong, and the one it refutes."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    report = ols.instruments.check_step(step, *args, **kwargs)
  wrong = [x for x in report.laws if x.verdict == "wrong"]
  assert not (report.ok and wrong) and "please report" not in str(report)
  if not wrong:
    return {}
  # One remedy is enough for one mistake.
  if wrong[0].name in ("scale", "arguments"):
    assert not any(x.remedy for x in wrong[1:] if x.name == "invariance")
  with pytest.raises(ValueError, match="this step is wrong"):
    report.raise_if_wrong()
  texts = [f"{x.name}: {x.text} {x.remedy}" for x in wrong]
  return {CHECKED: texts[0], SEEN: "\n".join(texts), **refuted(report)}


def refuted(report):
  """Returns the law that a proof refutes, with the lines that it names."""
  wrong = (x for x in report.laws if x.verdict == "wrong" and x.where)
  law = next(wrong, None)
  return {PROVED: f"{law.name} {[x for _, _, x in law.where]}"} if law else {}


def plain_step(tx, params, opt_state, batch):
  _, scaled_grads = scaled(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(scaled_grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


# The mistakes, one function each.


def unscaled_before_update():
  def unscale(tx, scaled_grads, opt_state, params):
    return tx.update(ols.unscale(scaled_grads, opt_state), opt_state, params)

  return told(update=unscale, twice=True)


def scaled_by_hand_as_well():
  def twice(loss_fn, opt_state):
    def scaled_loss_fn(params, batch):
      return loss_fn(params, batch) * ols.get_loss_scale(opt_state)

    return ols.scaled_value_and_grad(scaled_loss_fn, opt_state)

  return told(value_and_grad=twice)


def counts_after():
  schedule = optax.scale_by_schedule(lambda count: 1 / (1 + count))
  return told(optax.chain(SCALED, schedule))


def a_plateau_after():
  def with_value(tx, scaled_grads, opt_state, params):
    return tx.update(scaled_grads, opt_state, params, value=1.0)

  plateau = optax.contrib.reduce_on_plateau()
  return told(optax.chain(SCALED, plateau), update=with_value)


def by_hand(change):
  """Returns what is told if each scaled gradient is changed before."""

  def changed(tx, scaled_grads, opt_state, params):
    scaled_grads = jax.tree.map(change, scaled_grads, params)
    return tx.update(scaled_grads, opt_state, params)

  return told(update=changed)


def a_scaled_value():
  def given(tx, scaled_grads, opt_state, params):
    norm = optax.tree.norm(scaled_grads)
    return tx.update(scaled_grads, opt_state, params, value=norm)

  inner = optax.chain(ADAM, optax.contrib.reduce_on_plateau())
  return told(ols.loss_scaling(inner, RULE), update=given)


def a_moving_average():
  @jax.jit
  def step(params, ema, opt_state, batch):
    params, opt_state = plain_step(SCALED, params, opt_state, batch)
    ema = optax.incremental_update(params, ema, 0.1)
    return params, ema, opt_state

  old = jax.tree.map(jnp.zeros_like, PARAMS)
  return checked(step, PARAMS, old, SCALED.init(PARAMS), BATCH)


def built_once():
  tx, first = SCALED, SCALED.init(PARAMS)
  value_and_grad = ols.scaled_value_and_grad(loss_fn, first)

  def step(params, opt_state, batch):
    _, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  after, texts = listen(step, PARAMS, first, BATCH)
  assert not texts
  _, (text,) = listen(step, *after, BATCH)
  shapes = proofs.shapes((PARAMS, first, BATCH))
  report, _ = listen(ols.instruments.check_step, step, *shapes)
  return {SECOND: text} | refuted(report)


def no_axis_name():
  def step(params, opt_state, batch):
    updates, _ = plain_step(SCALED, params, opt_state, batch)
    return jax.tree.map(lambda x: x[None], updates)

  mapped = jax.shard_map(
    step,
    mesh=support.make_mesh(data=2),
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P("data"),
    check_vma=False,
  )
  _, (text,) = listen(jax.jit(mapped), PARAMS, SCALED.init(PARAMS), BATCH)
  return {TRACED: text}


def a_mean_over_an_axis_that_is_not_named():
  """On one device alone a NaN is skipped; the mean carries it to the others."""
  inner = optax.chain(ols.pmean_gradients("data"), ADAM)
  tx = ols.loss_scaling(inner, RULE)
  spread = jax.vmap(lambda _: (PARAMS, tx.init(PARAMS)))(jnp.arange(2))
  args = *spread, BATCH.reshape(2, 4, 2)
  step = jax.jit(jax.vmap(functools.partial(plain_step, tx), axis_name="data"))
  _, (text,) = listen(step, *args)
  # By now it is compiled, and a step that only warns is not called right.
  report, again = listen(ols.instruments.check_step, step, *args)
  assert again == [text] == [*report.warnings] and not report.ok
  assert str(report).startswith("The loss scaling of this step is not certain.")
  assert f"WiringWarning: {text[:40]}" in str(report)
  return {TRACED: text}


def float16_parameters():
  params = jax.tree.map(jnp.float16, PARAMS)
  found = told(ols.loss_scaling(optax.sgd(0.1), RULE), params=params)
  return {BUILT: found[BUILT]}


def overflow_misspelt():
  def misspelt(tx, scaled_grads, opt_state, params):
    return tx.update(scaled_grads, opt_state, params, overflowed=True)

  return told(update=misspelt)


def a_rule_in_a_chain():
  with pytest.raises(TypeError) as raised:
    optax.chain(RULE, ADAM).init(PARAMS)
  return {ERROR: str(raised.value)}


def a_fixed_scale_that_overflows():
  def in_float16(loss_fn, opt_state):
    return scaled(ols.autocast(loss_fn, "O1"), opt_state)

  return told(ols.loss_scaling(ADAM, ols.FixedLossScale(2.0**40)), in_float16)


def nothing_but_nan():
  opt_state = SCALED.init(PARAMS)
  for _ in range(3):
    _, opt_state = plain_step(SCALED, PARAMS, opt_state, BATCH * jnp.nan)
  with pytest.raises(FloatingPointError) as raised:
    ols.raise_if_failed(opt_state, max_consecutive_skips=2)
  return {FAILED: str(raised.value)}


def statistics_that_a_skip_changes():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, SCALED, wrt=nnx.Param)

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

  return told(value_and_grad=accumulated)


def unscaled_by_the_next_state():
  def late(tx, scaled_grads, opt_state, params):
    updates, new_state = tx.update(scaled_grads, opt_state, params)
    ols.unscale(scaled_grads, new_state)
    return updates, new_state

  return told(update=late)


def a_running_mean_of_the_loss():
  @jax.jit
  def step(params, opt_state, mean, batch):
    loss = loss_fn(params, batch)
    params, opt_state = plain_step(SCALED, params, opt_state, batch)
    mean = 0.9 * mean + 0.1 * loss
    return params, opt_state, mean

  given = PARAMS, SCALED.init(PARAMS), jnp.float32(0), BATCH
  # A single float might be anything.
  assert ols.instruments.check_step(step, *given).ok
  carry = {"params": 0, "opt_state": 1, "mean": 2}
  return checked(step, *given, carry=carry)


GUARD = documents.spike_guard()


def a_norm_that_is_still_scaled():
  @jax.jit
  def step(params, opt_state, guard_state, batch):
    _, scaled_grads = scaled(loss_fn, opt_state)(params, batch)
    norm = optax.tree.norm(scaled_grads)
    spike = GUARD["is_spike"](guard_state, norm)
    updates, opt_state = SCALED.update(
      scaled_grads, opt_state, params, skip=spike
    )
    guard_state = GUARD["update_guard"](guard_state, norm, opt_state)
    return optax.apply_updates(params, updates), opt_state, guard_state

  given = PARAMS, SCALED.init(PARAMS), GUARD["init_guard"](), BATCH
  return checked(step, *given)


def a_loss_of_each_device():
  def step(opt_state, guard_state, batch):
    spike = GUARD["is_spike"](guard_state, loss_fn(PARAMS, batch))
    return SCALED.update(PARAMS, opt_state, PARAMS, skip=spike)

  specs = jax.P(), jax.P(), jax.P("data")
  mesh = support.make_mesh(data=1)
  local = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
  with pytest.raises(ValueError) as raised:
    jax.jit(local)(SCALED.init(PARAMS), GUARD["init_guard"](), BATCH)
  return {ERROR: str(raised.value)}


class Mistake(NamedTuple):
  """A wrong program, and all that tells it.

  Attributes:
    program: runs it, and returns what is told, by when.
    told: how each text begins.
    proved: the law that shapes alone refute, and a line that is named.
    seen: what runs say, or how `check_step` would mend it.
  """

  program: Callable[[], dict[str, Any]]
  told: dict[str, str]
  proved: str = "no"
  seen: str = ""


UPDATE = "`tx.update(scaled_grads, opt_state, params)`"
APPLY = "`optax.apply_updates(params, updates)`"
NORM = "`norm = optax.tree.norm(scaled_grads)`"
NOT_SCALED = {CHECKED: "scale: The gradient v does not grow with S"}
NOT_TRUE = {CHECKED: "scale: The gradient v is not S times a true one"}
LEAKS = {CHECKED: "invariance: params/v depends on S"}
ANOTHER_S = "`update` takes the opt_state that the gradients were scaled with"
SAME_AMAX = "In runs: The largest gradient does not depend on S."

MISTAKES = {
  "unscaled before": Mistake(
    unscaled_before_update,
    {TRACED: "`update` takes the gradients scaled, got some that `unscale`"}
    | NOT_SCALED,
    "scale `tx.update(ols.unscale(scaled_grads, opt_state), opt_state,"
    " params)`",
    SAME_AMAX,
  ),
  "jax.value_and_grad": Mistake(
    lambda: told(value_and_grad=lambda loss_fn, _: jax.value_and_grad(loss_fn)),
    NOT_SCALED,
    f"scale {UPDATE}",
    "(50 % like S^-1)",
  ),
  "a clip before": Mistake(
    lambda: told(optax.chain(optax.clip_by_global_norm(1.0), SCALED)),
    NOT_TRUE,
    f"scale {UPDATE}",
    SAME_AMAX,
  ),
  "scaled twice": Mistake(
    scaled_by_hand_as_well,
    {CHECKED: "scale: The gradient v grows as S^2"},
    "scale `loss_fn(params, batch) * ols.get_loss_scale(opt_state)`",
    "proportional to S squared. The loss is scaled twice",
  ),
  "decay by hand": Mistake(
    lambda: by_hand(lambda g, w: g + 1e-5 * w),
    NOT_TRUE,
    "scale `g + 1e-5 * w`",
    # Whether a run shows it depends on how a processor rounds a gradient of 0.
    "does not grow with S; they are added",
  ),
  "inf replaced": Mistake(
    lambda: by_hand(lambda g, _: jnp.where(jnp.isfinite(g), g, 0)),
    {CHECKED: "scale: The gradient v has lost its inf and NaN"},
    "scale `jnp.where(jnp.isfinite(g), g, 0)`",
    "(and 1 more). This batch hides it. Something before `update` hides",
  ),
  "masked": Mistake(
    lambda: told(optax.masked(SCALED, W_ALONE)),
    LEAKS,
    f"invariance {APPLY}",
    "S/2: params/v (50 % like S^1)",
  ),
  "one group": Mistake(
    lambda: told(optax.partition({True: SCALED, False: ADAM}, W_ALONE)),
    LEAKS,
    f"invariance {UPDATE}",
    "Some gradients do not pass through",
  ),
  "an optimizer before": Mistake(
    lambda: told(optax.chain(ADAM, ols.loss_scaling(optax.sgd(0.1), RULE))),
    NOT_TRUE,
    f"scale {UPDATE}",
    "A step that overflows changed opt_state/0/0/count",
  ),
  "an optimizer after": Mistake(
    lambda: told(optax.chain(SCALED, ADAM)),
    {CHECKED: "skip: If the step is skipped, params/v"},
    f"skip {APPLY}",
    "overflows changed params/v, params/w, opt_state/1/0/count",
  ),
  "a schedule after": Mistake(
    counts_after,
    {CHECKED: "skip: If the step is skipped, opt_state/1/count may"},
    f"skip {UPDATE}",
    "A step that overflows changed opt_state/1/count.",
  ),
  "a plateau after": Mistake(
    a_plateau_after,
    {CHECKED: "skip: If the step is skipped, opt_state/1/scale may"},
    "skip `tx.update(scaled_grads, opt_state, params, value=`",
    "A step that overflows changed opt_state/1/",
  ),
  "a scaled value": Mistake(
    a_scaled_value,
    {CHECKED: "arguments: `value=` depends on S"},
    f"arguments {NORM}",
    "Give `update` the true loss",
  ),
  "a number read once": Mistake(
    lambda: told(value_and_grad=lambda loss_fn, _: scaled(loss_fn, 2.0**15)),
    {TRACED: f"{ANOTHER_S}, got gradients scaled by the number 32768.0."}
    | NOT_SCALED,
    f"scale {UPDATE}",
    SAME_AMAX,
  ),
  "built once": Mistake(
    built_once,
    {SECOND: f"{ANOTHER_S}, got gradients scaled by another S."},
    f"scale {UPDATE}",
  ),
  "apply_if_finite around": Mistake(
    lambda: told(optax.apply_if_finite(SCALED, 3)),
    {
      TRACED: "`opt_state` must have no optax.apply_if_finite around",
      CHECKED: "invariance: The next S is the rule's only where the gradients",
    },
    f"invariance {UPDATE}",
    "S can never come down",
  ),
  "MultiSteps around": Mistake(
    lambda: told(optax.MultiSteps(SCALED, 2)),
    {TRACED: "`opt_state` must have optax.MultiSteps inside of loss_scaling"}
    | NOT_TRUE,
    f"scale {UPDATE}",
    "opt_state/acc_grads/v (50 % like S^1)",
  ),
  "no axis_name": Mistake(
    no_axis_name,
    {TRACED: "`axis_name` must say over which axes devices skip together"},
  ),
  "a mean over an axis": Mistake(
    a_mean_over_an_axis_that_is_not_named,
    {TRACED: "`axis_name` must name every axis over which `inner` averages"},
  ),
  "float16 parameters": Mistake(
    float16_parameters,
    {BUILT: "parameters in float16 should have master weights, got float16"},
  ),
  "overflow misspelt": Mistake(
    overflow_misspelt,
    {ERROR: "`update` takes the caller's flags as `overflow` and `skip`, got"},
  ),
  "a rule in a chain": Mistake(
    a_rule_in_a_chain,
    {
      ERROR: "a rule must be inside of loss_scaling, got a DynamicLossScale in "
      "the place of an optimizer; write loss_scaling(optax.adam(1e-3), rule)."
    },
  ),
  "the optimizer for its state": Mistake(
    lambda: told(value_and_grad=lambda loss_fn, _: scaled(loss_fn, SCALED)),
    {ERROR: "`opt_state` must hold the state of `loss_scaling`, got a Gradien"},
  ),
  "a fixed S that overflows": Mistake(
    a_fixed_scale_that_overflows,
    {
      STATE: "stalled",
      CHECKED: "scale: The step overflows at this S, and the rule cannot",
    },
    seen="Take a smaller S, or a rule that moves it.",
  ),
  "nothing but NaN": Mistake(
    nothing_but_nan,
    {FAILED: "3 steps in a row were skipped, more than `max_consecutive"},
  ),
  "batch statistics": Mistake(
    statistics_that_a_skip_changes,
    {CHECKED: "skip: If the step is skipped, model/mean may change"},
    "skip `model(batch)`",
    "changed model/mean, model/var.",
  ),
  "dropped": Mistake(
    dropped_and_not_passed_on,
    {
      TRACED: "`overflow` must be passed to `update` unchanged after accum",
      CHECKED: "scale: The gradient v leaves out micro-batches",
    },
    "scale `value_and_grad(params, batch)`",
    "`accumulate(..., drop=True)` returns what it left out",
  ),
  "unscaled by the next state": Mistake(
    unscaled_by_the_next_state,
    {TRACED: "`unscale` takes the opt_state from before `update`"},
  ),
  "a mean of the loss": Mistake(
    a_running_mean_of_the_loss,
    {CHECKED: "skip: If the step is skipped, mean may change"},
    "skip `mean = 0.9 * mean + 0.1 * loss`",
    "A step that overflows changed mean.",
  ),
  "a moving average": Mistake(
    a_moving_average,
    {CHECKED: "skip: If the step is skipped, ema/v may change"},
    "skip `optax.incremental_update(params, ema, 0.1)`",
    "A step that overflows changed ema/v, ema/w.",
  ),
  "no gradients": Mistake(
    lambda: told(update=lambda tx, _, *others: tx.update(None, *others)),
    {ERROR: "`updates` must be the scaled gradients, got None"},
  ),
  "a scaled norm for a guard": Mistake(
    a_norm_that_is_still_scaled,
    {CHECKED: "arguments: `skip=` depends on S"},
    f"arguments {NORM}",
    "invariance: guard_state/",
  ),
  "a guard on many devices": Mistake(
    a_loss_of_each_device,
    {ERROR: "devices that share a loss scale must skip together, got a flag"},
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported(mistake):
  program, expected, proved, seen = MISTAKES[mistake]
  found = program()
  law, _, line = proved.partition(" ")
  lines = found.pop(PROVED, "no")
  assert lines.startswith(law) and line.strip("`") in lines, lines
  assert seen in found.pop(SEEN, "")
  assert found.keys() == expected.keys(), found
  for when, text in expected.items():
    assert found[when].startswith(text)


def test_the_page_says_when_each_mistake_is_reported():
  table = documents.section(PAGE, "Mistakes that are reported, and when")
  row = r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$"
  rows = re.findall(row, table, re.MULTILINE)[1:]
  expected = [(", ".join(x.told), x.proved) for x in MISTAKES.values()]
  assert [(x, y.removesuffix(" step")) for x, y in rows] == expected


def test_nothing_is_reported_of_a_right_step():
  assert told() == {}
