"""docs/different.md: what each program of the table does, by running it.

PyTorch and MPX are not installed here, so their cells have sources instead.
"""

import contextlib
import functools
import io
import re
from typing import Any
from typing import NamedTuple

from flax import serialization
from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import support

PAGE = documents.read("docs/different.md")
HEAD, _, *LINES = [
  [cell.strip() for cell in line.strip("|").split("|")]
  for line in PAGE.splitlines()
  if line.startswith("|")
]
ROWS = {name: cells for name, *cells in LINES}
SOURCES = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", PAGE, re.MULTILINE))
ONE = jnp.float32(1.0)


class Trained(NamedTuple):
  """The results of a peer's steps."""

  loss: Any
  params: Any
  opt_state: Any
  loss_scale: Any  # S, or the object that holds it.


class Ours:
  """The step of README.md."""

  def __init__(self, opt, scale, interval, floor, axis):
    floors = {} if floor is None else {"min_scale": floor}
    rule = ols.DynamicLossScale(scale, growth_interval=interval, **floors)
    check = ols.saturated(jnp.float16)
    self.tx = ols.loss_scaling(opt, rule, axis_name=axis, check=check)

  def init(self, params):
    opt_state = self.tx.init(params)
    return Trained(
      jnp.float32(0.0), params, opt_state, ols.get_loss_scale(opt_state)
    )

  def step(self, state, loss_fn, at):
    _, params, opt_state, _ = state
    loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(at(params))
    updates, opt_state = self.tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return Trained(loss, params, opt_state, ols.get_loss_scale(opt_state))


class Jmp:
  """The step of jmp's README, with S in float32."""

  def __init__(self, opt, scale, interval, floor, axis):
    floors = {} if floor is None else {"min_loss_scale": jnp.float32(floor)}
    self.opt = opt
    self.first = jmp.DynamicLossScale(
      jnp.float32(scale), period=interval, **floors
    )

  def init(self, params):
    return Trained(jnp.float32(0.0), params, self.opt.init(params), self.first)

  def step(self, state, loss_fn, at):
    _, params, opt_state, loss_scale = state
    loss, grads = jax.value_and_grad(lambda x: loss_scale.scale(loss_fn(x)))(
      at(params)
    )
    loss, grads = loss_scale.unscale((loss, grads))
    is_finite = jmp.all_finite(grads)
    updates, new_opt_state = self.opt.update(grads, opt_state, params)
    params, opt_state = jmp.select_tree(
      is_finite,
      (optax.apply_updates(params, updates), new_opt_state),
      (params, opt_state),
    )
    return Trained(loss, params, opt_state, loss_scale.adjust(is_finite))


class Flax:
  """The step of Flax's example for ImageNet."""

  def __init__(self, opt, scale, interval, floor, axis):
    floors = {} if floor is None else {"minimum_scale": floor}
    self.opt, self.axis = opt, axis
    self.first = dynamic_scale.DynamicScale(
      scale=scale, growth_interval=interval, **floors
    )

  def init(self, params):
    return Trained(jnp.float32(0.0), params, self.opt.init(params), self.first)

  def step(self, state, loss_fn, at):
    _, params, opt_state, scaler = state
    scaler, is_finite, loss, grads = scaler.value_and_grad(
      loss_fn, axis_name=self.axis
    )(at(params))
    updates, new_opt_state = self.opt.update(grads, opt_state, params)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(is_finite, new, old),
      (optax.apply_updates(params, updates), new_opt_state),
      (params, opt_state),
    )
    return Trained(loss, params, opt_state, scaler)


class ApplyIfFinite:
  """The step of optax's documentation, which lets the third NaN through."""

  def __init__(self, opt, scale, interval, floor, axis):
    self.tx = optax.apply_if_finite(opt, max_consecutive_errors=2)

  def init(self, params):
    return Trained(jnp.float32(0.0), params, self.tx.init(params), None)

  def step(self, state, loss_fn, at):
    _, params, opt_state, _ = state
    loss, grads = jax.value_and_grad(loss_fn)(at(params))
    updates, opt_state = self.tx.update(grads, opt_state, params)
    return Trained(loss, optax.apply_updates(params, updates), opt_state, None)


SGD = optax.sgd(1.0)


def itself(params):
  return params


def linear_loss(x, gradient):
  return jnp.float32(x) * gradient


@functools.cache
def compiled(peer, opt, scale, interval, floor, axis, at, loss_fn):
  """Returns a peer's first state, as a function, and its jitted step."""
  run = peer(opt, scale, interval, floor, axis)
  return run.init, jax.jit(
    lambda state, gradient: run.step(state, lambda x: loss_fn(x, gradient), at)
  )


def train(
  peer,
  *gradients,
  params=ONE,
  opt=SGD,
  scale=8.0,
  interval=2000,
  floor=None,
  axis=None,
  at=itself,
  loss_fn=linear_loss,
):
  """Trains a peer under jit: one step for each gradient of the loss."""
  init, step = compiled(peer, opt, scale, interval, floor, axis, at, loss_fn)
  state = init(params)
  for gradient in gradients:
    state = step(state, jnp.float32(gradient))
  return state


def power(x):
  """Returns a positive number as the page writes it."""
  half, exponent = np.frexp(x)
  return f"2^{exponent - 1}" if half == 0.5 else f"{x:.1e}"


def s_in(state):
  """Returns S after some steps, as the page writes it."""
  found = state.loss_scale
  for name in ("loss_scale", "scale"):
    found = getattr(found, name, found)
  return power(found)


def s_of(peer, *gradients, **arguments):
  if peer is ApplyIfFinite:
    return "no S"
  return s_in(train(peer, *gradients, **arguments))


def on_growth(peer):
  if peer is ApplyIfFinite:
    return "no S"
  # Flax grows on the second of these steps, the others on both.
  first, second = [train(peer, *[2.0] * x, interval=1) for x in (1, 2)]
  assert s_in(first) != s_in(second)
  return f"{first.params - second.params:g}"


def first_growth(peer):
  if peer is ApplyIfFinite:
    return "no S"
  scales = [s_of(peer, *[1.0] * x, interval=10) for x in (9, 10, 11)]
  return f"{9 + next(i for i, x in enumerate(scales) if x != '2^3')}"


def unscaling(peer):
  if peer is ApplyIfFinite:
    return "no S"
  found = train(
    peer, 2.0**-24, scale=2.0**25, params=jnp.float32(0.0), at=jnp.float16
  )
  return power(-found.params)


def float16_loss(peer):
  if peer is ApplyIfFinite:
    return "no S"
  found = train(
    peer, 1.0, scale=2.0**24, loss_fn=lambda x, gradient: jnp.float16(x)
  )
  return f"{found.loss:g}"


def skipped_state(peer):
  opt = optax.adam(optax.linear_schedule(0.1, 0.0, 9))
  states = [train(peer, *x, opt=opt) for x in ([1.0], [1.0, jnp.nan])]
  inner = [getattr(x.opt_state, "inner_state", x.opt_state) for x in states]
  return "kept" if support.same_bits(*inner) else "moved"


def minus_zero(peer):
  params = train(peer, jnp.nan, params=jnp.float32(-0.0)).params
  return f"{params:.1f}"


def devices_that_skip(peer):
  params = jax.vmap(
    lambda gradient: train(peer, gradient, axis="data").params,
    axis_name="data",
  )(jnp.array([1.0, jnp.inf]))
  return f"{jnp.sum(params == 1.0)} of 2"


def nan_and_inf(peer):
  states = [train(peer, x)[2:] for x in (jnp.nan, jnp.inf)]
  return "no" if support.same_bits(*states) else "yes"


def third_nan(peer):
  params = train(peer, *[jnp.nan] * 3).params
  return "skipped" if params == 1.0 else "applied"


def clipped(peer):
  params = train(peer, 65504.0 / 8, at=jnp.float16).params
  return "skipped" if params == 1.0 else "applied"


def moments(peer):
  try:
    state = train(peer, 1.0, params=jnp.float16(1.0), opt=optax.adam(0.1))
  except TypeError:
    return "`TypeError`"
  return str(optax.tree.get(state.opt_state, "mu").dtype)


def narrow_gradients(peer):
  try:
    state = train(peer, 1.0, at=jnp.float16, opt=optax.adam(0.1))
  except TypeError:
    return "`TypeError`"
  return str(state.params.dtype)


def traces(peer):
  count = []

  def loss_fn(x, gradient):
    count.append(x)
    return x * gradient

  train(peer, 1.0, 1.0, 1.0, loss_fn=loss_fn)
  return f"{len(count)}"


def micro_batches(peer):
  if peer is ApplyIfFinite:
    return "no S"
  run = peer(optax.sgd(1.0), 8.0, 2000, None, None)
  _, params, opt_state, scaler = run.init(ONE)
  if peer is Flax:
    for _ in range(4):
      scaler = scaler.value_and_grad(jnp.square)(params).dynamic_scale
    return f"{scaler.fin_steps}"
  if peer is Jmp:  # `adjust` is called by the user, when the sum is made.
    return f"{scaler.adjust(jnp.array(True)).counter}"
  value_and_grad = ols.scaled_value_and_grad(
    lambda params, batch: jnp.mean(params * batch), opt_state
  )
  value_and_grad = ols.accumulate(value_and_grad, microbatches=4)
  _, grads, overflow = value_and_grad(params, jnp.ones(8))
  _, opt_state = run.tx.update(grads, opt_state, params, overflow=overflow)
  return f"{optax.tree.get(opt_state, 'clean_steps')}"


def serialized(peer):
  if peer is ApplyIfFinite:
    return "no S"
  state = train(peer, 1.0)
  saved = state.opt_state if peer is Ours else state.loss_scale
  try:
    data = serialization.to_bytes(saved)
  except TypeError:
    return "`TypeError`"
  assert support.same_bits(serialization.from_bytes(saved, data), saved)
  return "yes"


def memory(peer):
  """Returns the figure of docs/costs.md, whose command measures it."""
  name = {Ours: "**optax", Jmp: "jmp", Flax: "flax", ApplyIfFinite: "`optax"}
  costs = documents.read("docs/costs.md")
  (row,) = re.findall(
    rf"^\| {re.escape(name[peer])}.*\| (.*%) \|$", costs, re.MULTILINE
  )
  return row


INF = float("inf")
PEERS = [Ours, Jmp, Flax, ApplyIfFinite]
# By the first cells of the rows.
PROGRAMS = {
  "A gradient of 2, on the step on which S grows": on_growth,
  "With an interval of 10, S grows on clean step": first_growth,
  "S = 2^126 after three growths": lambda peer: s_of(
    peer, *[0.0] * 6, scale=2.0**126, interval=1
  ),
  "S = 2^3 after 300 overflows": lambda peer: s_of(peer, *[INF] * 300),
  "The same with a floor of 2^-2, under `jit`": lambda peer: s_of(
    peer, *[INF] * 300, floor=0.25
  ),
  "A gradient of 2^-24, float16, S = 2^25": unscaling,
  "The reported loss of a float16 loss of 1, S = 2^24": float16_loss,
  "Adam's state and schedule on a skipped step": skipped_state,
  "A parameter of -0.0 on a skipped step": minus_zero,
  "inf on one of two devices: who skips": devices_that_skip,
  "A gradient that the hardware clipped to 65504": clipped,
  "Are NaN and inf told apart?": nan_and_inf,
  "The third NaN in a row, where two are allowed": third_nan,
  "Adam's moments for float16 parameters": moments,
  "float32 parameters after a float16 gradient": narrow_gradients,
  "4 micro-batches count as clean steps": micro_batches,
  "Traces of a step that runs three times": traces,
  "S through `flax.serialization`": serialized,
  "Temporary memory of the update, of the parameters'": memory,
}


def test_every_row_has_a_program_and_every_cell_of_it():
  assert list(ROWS) == list(PROGRAMS)
  assert HEAD[-2:] == ["torch `GradScaler`", "MPX"]
  assert {len(cells) for cells in ROWS.values()} == {len(PEERS) + 2}


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("row", PROGRAMS)
def test_a_cell_is_what_the_program_does(row, peer):
  first, *_ = re.split(r"[,;]", ROWS[row][PEERS.index(peer)])
  assert first == PROGRAMS[row](peer)


def test_a_cell_that_is_not_run_has_a_source():
  for cell in [x for cells in ROWS.values() for x in cells[len(PEERS) :]]:
    label, url = re.findall(r"\]\[([\w-]+)\]", cell), re.findall(r"\]\(", cell)
    assert cell == "-" or label or url, cell
    for name in label:
      assert re.fullmatch(r"https://github\.com/\S+#L\d+", SOURCES[name])


def test_the_programs_print_what_the_page_shows():
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    documents.run(PAGE, {})
  assert printed.getvalue() == "".join(documents.blocks(PAGE, "text"))
