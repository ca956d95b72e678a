"""The proof of a step is sound: what it says of values is true of numbers."""

import ast
import functools
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _products
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._base import siblings
from optax_lossscale._step import backward
from optax_lossscale._step import findings
from optax_lossscale._step import loss_scaling
from optax_lossscale._step import states
from optax_lossscale.hardware import _emulate_saturation
from optax_lossscale.instruments.step import _interpret
from optax_lossscale.instruments.step import _promised
from optax_lossscale.instruments.step import _values
from tests import documents
from tests import support
from tests.autocast.programs import kernel
from tests.instruments.step.programs import BETWEEN_DEVICES
from tests.instruments.step.programs import hidden
from tests.instruments.step.programs import is_power_known
from tests.instruments.step.programs import judge
from tests.instruments.step.programs import LAST
from tests.instruments.step.programs import OPERATIONS
from tests.instruments.step.programs import program_of
from tests.instruments.step.programs import programs
from tests.instruments.step.steps import check
from tests.instruments.step.steps import ending
from tests.instruments.step.steps import LAWS
from tests.instruments.step.steps import loss_fn
from tests.instruments.step.steps import make_step
from tests.instruments.step.steps import PARAMS
from tests.instruments.step.steps import proved
from tests.instruments.step.steps import RULE
from tests.instruments.step.steps import said
from tests.instruments.step.steps import step_of
from tests.instruments.step.steps import TX
from tests.instruments.step.steps import verdicts

# ---- The facts found are true.

COUNT = 25  # Of the random programs in a test.

each_quarter = pytest.mark.parametrize(
  "quarter", support.slow_but([0], range(4))
)


def quarter_of_programs(quarter):
  start = quarter * COUNT
  return programs(start + COUNT, start=start)


def errors_of(found):
  """Returns what is false, with the jaxprs of the programs, and the counts."""
  tallies = [judge(x) for x in found]
  errors = [
    f"{error}\nin {program.jaxpr}"
    for program, (errors, _) in zip(found, tallies, strict=True)
    for error in errors
  ]
  return errors, sum(
    (counts for _, counts in tallies), start=type(tallies[0][1])()
  )


@each_quarter
def test_what_is_said_of_random_programs_is_true(quarter):
  errors, said = errors_of(quarter_of_programs(quarter))
  assert not errors, "\n\n".join(errors[:3])
  assert said["powers"] > 10 * COUNT and said["identities"] > 7 * COUNT
  assert said["any"] and said["constants"] > 2


def test_what_is_said_of_values_on_devices_is_true():
  names = [*BETWEEN_DEVICES]
  errors, said = errors_of([program_of(x, names) for x in range(2)])
  assert not errors, "\n\n".join(errors[:3])
  assert said["powers"] > 16


@each_quarter
def test_inf_and_nan_of_random_programs_show_where_it_is_said(quarter):
  errors = [y for x in quarter_of_programs(quarter) for y in hidden(x)]
  assert not errors, "\n\n".join(errors[:3])


# Operations whose results are never known to grow as a power of S: always, or
# if each member has an S of its own.
NO_POWER = """
  s sign; s to the 0; s exp; s tanh; s log; s floor; s plus 1; s to int at
  once; s to bool; s clip; s bits; ss atan2; sf atan2; ss gt; s gt 0; ss eq;
  s finite; ss where; sf clamp; s reshape; s with ones; s gather filled; s
  set to a number; s argmax; s cumprod; s normalized; ss unit triangular; s
  vmap of a sum; ss cond by S; is switch; s scan of 0; s scan of products; s
  fori of powers; s while by S; s over what is 0; s over what is positive;
  ss over a product; ks over; ks scan; ks fori of S; ks fori of products; s
  pow 0.005
"""
NO_POWER_OF_MEMBERS = """
  s back; s turned; s roll; s pad; ss concatenate; ss stack; s gather; si
  take; sf take by rank; si dynamic_slice; ss update_slice; ss set; ss added;
  ss largest; ss least; s sort; sf sort by; s top_k; s sum; s sum of rows; s
  cumsum down; fs dot; sf conv; s max pool; s mean pool; s fft; ss
  triangular; sf gradient of choices; ss scan; ss scan of the last; k
  strides; k permuted; ks scan of parts; kf scan of S; s psum; s pmax; s
  all_gather; s ppermute; s cholesky; fs solve; s svd; s eigh
"""


@pytest.mark.parametrize(
  ("kind", "names"),
  [("S", NO_POWER), ("V", f"{NO_POWER};{NO_POWER_OF_MEMBERS}")],
)
def test_the_power_of_s_is_known_after_all_other_operations(kind, names):
  found = {
    name
    for name in [*OPERATIONS, *BETWEEN_DEVICES, *LAST]
    if {*"sk"} & {*name.partition(" ")[0]}
    and not any(
      is_power_known(number, name) for number in range("SV".index(kind), 8, 2)
    )
  }
  assert found == {" ".join(x.split()) for x in names.split(";")}


# The identities of a random key.
@pytest.mark.parametrize(
  ("change", "is_same"),
  [
    (lambda x: x, True),
    (lambda x: x.reshape(2, 1).reshape(2) + 0, True),
    (lambda x: x[::-1], False),
    (lambda x: jax.random.key_data(jax.random.split(x)[0]), False),
  ],
)
def test_a_random_key_is_the_same_if_it_is_said_to_be(change, is_same):
  def changed(key):
    return jax.random.wrap_key_data(change(jax.random.key_data(key)))

  key = jax.random.key(3)
  value = _values.Value(identity=_values.Identity(0))
  (said,) = _interpret.Interpreter([]).run(
    jax.make_jaxpr(changed)(key), [value]
  )
  assert (said.identity == _values.Identity(0)) is is_same
  data = map(jax.random.key_data, (changed(key), key))
  assert np.array_equal(*data) is is_same


@pytest.mark.parametrize(
  ("wide", "narrow", "is_wide_enough"),
  [
    ("float32", "float16", True),
    ("float16", "bfloat16", False),
    ("bfloat16", "float16", False),
    ("int32", "uint8", True),
    ("uint32", "int8", False),
    ("int32", "bool", True),
  ],
)
def test_a_dtype_holds_another_if_every_number_comes_back(
  wide, narrow, is_wide_enough
):
  assert formats.holds(jnp.dtype(wide), jnp.dtype(narrow)) == is_wide_enough


def text(function, args):
  return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(*args)))


def in_thread(function):
  results = []
  thread = threading.Thread(target=lambda: results.append(function()))
  thread.start()
  thread.join()
  (result,) = results
  return result


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_trace_is_the_same_before_during_and_after_a_proof(is_warm):
  args = step_of()[1:]
  plain = text(jax.jit(make_step()), args)
  function = jax.jit(make_step())
  if is_warm:
    jax.block_until_ready(function(*args))
  with _promised.proving():
    assert "_promised_" in text(function, args)
    assert in_thread(lambda: text(function, args)) == plain
    assert "_promised_" in text(function, args)
  assert "_promised_" not in plain
  assert text(function, args) == plain


GRADIENTS = {
  "a": jnp.asarray([0, 1.5, -3, 2.0**20]),
  "b": jnp.asarray([0.5, -7, 2.0**-9], jnp.float16),
  "c": jnp.asarray([1 + 2j, -3j, 0.25]),
  "d": jnp.arange(3),
}


def over_devices(x):
  return jax.vmap(
    lambda x: findings._largest([x, 9 - x], ("i",)), axis_name="i"
  )(x)


def usable(scale, gradients):
  return backward._inf_where_unusable(scale, jnp.float16, gradients)


def clipped(x):
  return _emulate_saturation._clip(x, jnp.float16)


# The functions in whose place a proof reads another, with arguments for both.
ASSUMED = {
  "leaves.unscale": [
    (leaves.unscale, GRADIENTS, jnp.float32(2.0**x)) for x in (-9, 0, 15, 126)
  ],
  "leaves.without_inf": [(leaves.without_inf, GRADIENTS[x]) for x in "ab"],
  "states._count_if": [
    (states._count_if, jnp.asarray(x), jnp.int32(7)) for x in (True, False)
  ],
  "findings._largest": [(over_devices, jnp.arange(5, dtype=jnp.uint32))],
  "siblings.shared": [(siblings.shared, *jnp.asarray([True, False, True]))],
  "backward._inf_where_unusable": [
    (usable, jnp.float32(2.0**x), GRADIENTS) for x in (-9, 0, 15)
  ],
  "_products._powers": [
    # The scale of such a maximum is the quotient itself.
    (_products._powers, jnp.float32([-1, 448 * 2.0**x]), 448.0)
    for x in (0, 9)
  ],
  "_emulate_saturation._saturate": [
    (_emulate_saturation._saturate, GRADIENTS[x]) for x in "abc"
  ],
  "_emulate_saturation._clip": [
    (clipped, x) for x in (GRADIENTS["a"][:3], GRADIENTS["b"])
  ],
}


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("name", ASSUMED)
def test_what_a_proof_reads_in_place_of_a_function_does_the_same(name):
  for function, *args in ASSUMED[name]:
    real = function(*args)
    with _promised.proving() as trace:
      assumed = function(*args)
    assert name in trace.trusted
    jax.tree.map(np.testing.assert_array_equal, real, assumed)


def promised():
  """Yields the kind of each promise in the source, and its function."""
  folder = pathlib.Path(ols.__file__).parent
  for path in folder.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      for x in getattr(node, "decorator_list", ()):
        if ast.unparse(getattr(x, "func", x)) == "promises.promise":
          is_read = any(y.arg == "assume" for y in x.keywords)
          yield x.args[0].value, f"{path.stem}.{node.name}", is_read
      if (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "promises.noted"
      ):
        yield node.args[0].value, path.stem, False


def test_all_that_a_proof_reads_instead_is_tested_here():
  assert {name for _, name, is_read in promised() if is_read} == {*ASSUMED}


def test_the_page_lists_every_promise_and_no_other():
  table = documents.section(documents.read("docs/architecture.md"), "Promises")
  rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", table, re.MULTILINE)
  assert sorted(rows) == sorted((kind, name) for kind, name, _ in promised())


def test_only_the_instruments_speak_of_proofs():
  folder = pathlib.Path(ols.__file__).parent
  wrong = [
    str(path)
    for path in folder.rglob("*.py")
    if "instruments" not in path.parts
    if re.search(r"\bproofs?\b", path.read_text(), re.IGNORECASE)
  ]
  assert not wrong


def test_a_schedule_that_is_told_the_same_count_stays():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=4)
  for steps in range(7):
    state = schedule.update(schedule.init(), step=jnp.int32(steps))
    again = schedule.update(state, step=jnp.int32(steps))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def find_always(**changes):
  """Returns the mistake that the check finds the same in all gradients."""

  def breaks(examine):
    def wrong(*args, **options):
      finding = examine(*args, **options)
      same = {
        x: jnp.full_like(getattr(finding, x), y) for x, y in changes.items()
      }
      return finding._replace(**same)

    return wrong

  return breaks


def keep_the_rules_state(move):
  def wrong(rule, state, *args, **options):
    return state, move(rule, state, *args, **options)[1]

  return wrong


# The module, its promise, what breaks it, and the law that is broken.
BROKEN = {
  "amax": (findings, "examine", find_always(amax=1), "scale"),
  "overflow": (findings, "examine", find_always(overflow=False), "skip"),
  "move": (loss_scaling, "move", keep_the_rules_state, "skip"),
}
STATIC = {"examine": ("check", "in_order"), "move": ("rule",)}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_assumed_but_not_true_is_seen_by_runs(name, monkeypatch):
  owner, kind, breaks, law = BROKEN[name]
  right = getattr(owner, kind).__wrapped__
  wrong = functools.wraps(right)(breaks(right))
  promise = promises.promise(kind, static=STATIC[kind])
  monkeypatch.setattr(owner, kind, promise(wrong))
  alone = proved(*step_of())
  assert {x.verdict for x in alone.laws[:-1]} == {"proved"}, alone
  report = check(*step_of())
  assert verdicts(report)[law] == "wrong", report
  assert "please report" in said(report, law)


# ---- The limits of a proof.

# A short program, since most of the time goes into tracing it.
SGD = ols.loss_scaling(optax.sgd(0.1), RULE)


def by(change, loss_fn=loss_fn):
  """Returns a step in which a function of a gradient and S changes each one."""

  def changed(scaled_grads, opt_state, params):
    scale = ols.get_loss_scale(opt_state)
    return jax.tree.map(lambda x: change(x, scale), scaled_grads)

  return step_of(SGD, loss_fn=loss_fn, change=changed)


def on_host(x):
  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.pure_callback(np.asarray, shape, x, vmap_method="sequential")


@pytest.mark.parametrize(
  ("change", "name"), [(on_host, "pure_callback"), (kernel, "pallas_call")]
)
def test_what_a_kernel_does_with_scaled_values_is_not_known(change, name):
  report = proved(*by(lambda x, k: change(x)))
  assert verdicts(report)["scale"] == "inconclusive"
  assert name in said(report, "scale")

  # A kernel that is given what is free of S gives what is free of S.
  def with_kernel(params, batch):
    return loss_fn(params, jax.tree.map(change, batch))

  report = proved(*step_of(loss_fn=with_kernel))
  assert verdicts(report)["scale"] == "proved"


LIMITS = {
  "a factor": (lambda x, k: 3 * x, "proved"),
  # A clip at the largest number of a float8 is a part of a cast.
  "a cast": (lambda x, k: jnp.clip(x, -448.0, 448.0), "proved"),
  "a clip": (lambda x, k: jnp.clip(x, -440.0, 440.0), "wrong"),
  "one side": (lambda x, k: jax.lax.clamp(1.0, x, 448.0), "wrong"),
  # The quotient may grow with S at an x of 0.
  "for 0": (lambda x, k: x * x / jnp.where(x == 0, 1, x), "inconclusive"),
  # A mask of positions packs two values into one array.
  "packed": (
    lambda x, k: jnp.where(np.arange(len(x))[:, None] > 0, x, x / k),
    "inconclusive",
  ),
  "chosen": (lambda x, k: jnp.where(x > k, x, x / k), "wrong"),
  "shown beside": (
    lambda x, k: x + jnp.where(jnp.isfinite(x), x, 0),
    "inconclusive",
  ),
  "filled": (
    lambda x, k: x.at[1 + np.arange(len(x))].get(mode="fill", fill_value=1),
    "inconclusive",
  ),
  # Each of these is true where a gradient is not finite.
  "not finite": (lambda x, k: jnp.where(~jnp.isfinite(x), 0, x), "wrong"),
  "finite ^ True": (
    lambda x, k: jnp.where(jnp.isfinite(x) ^ True, 0, x),
    "inconclusive",
  ),
  "1 - finite": (
    lambda x, k: jnp.where(1 - jnp.isfinite(x).astype(int) > 0, 0, x),
    "inconclusive",
  ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_change_of_scaled_gradients_gets_its_verdict(name):
  change, verdict = LIMITS[name]
  report = proved(*by(change))
  assert verdicts(report)["scale"] == verdict, report


@pytest.mark.parametrize(
  "keep",
  [
    lambda new, old, skipped: jnp.where(skipped, old + 0 * new, new),
    lambda new, old, skipped: jnp.where(skipped, old + (new - new), new),
    lambda new, old, skipped: (
      jnp.where(skipped, 1, 0) * old + jnp.where(skipped, 0, new)
    ),
  ],
)
def test_equal_values_that_are_written_otherwise_are_not_called_wrong(keep):
  def end(new, old, average):
    mean = 0.5 * average + 0.5 * new[0]["w"]
    return *new, keep(mean, average, new[1].skipped)

  report = proved(*ending(end, jnp.zeros_like(PARAMS["w"]), SGD))
  assert "wrong" not in verdicts(report).values(), report


# ---- An inf that hides in true gradients, which are free of S.


def of_true(function):
  """Returns a change of scaled gradients by a function of true ones."""
  return lambda x, k: k * function(x / k)


def of_rows(take):
  """Returns a change by a function of gradients and of those of other rows."""
  return lambda x, k: take(x, jnp.roll(x, 1, 0))


HIDING = {
  "small ones": lambda x, k: jnp.where(jnp.abs(x / k) < 100, x, 0),
  "a small norm": lambda x, k: jnp.where(jnp.linalg.norm(x) < 100 * k, x, 0),
  "0 times it is 0": lambda x, k: jnp.where(x * 0 == 0, x, 0),
  "its inverse is not 0": lambda x, k: jnp.where(1 / x != 0, x, 0),
  "tanh": of_true(jnp.tanh),
  "sign": of_true(jnp.sign),
  "an angle": lambda x, k: k * jnp.arctan2(x, k),
  "bounds of data": lambda x, k: jax.lax.clamp(-k, x, k),
  "the smallest row": lambda x, k: jnp.broadcast_to(
    x[jnp.argmin(jnp.abs(x).max(1))], x.shape
  ),
  "two tests": lambda x, k: jnp.broadcast_to(
    jnp.where(jnp.isfinite(x[0]) & jnp.isfinite(x[1]), x[0] + x[1], x[0]),
    x.shape,
  ),
  "a minimum": of_rows(jnp.minimum),
  "the smaller one": of_rows(lambda a, b: jnp.where(a < b, a, b)),
  "a harmonic mean": of_rows(lambda a, b: 1 / (1 / a + 1 / b)),
  "a sort": of_rows(lambda a, b: jnp.sort(jnp.stack([a, b]), 0)[0]),
}
KEEPING = {
  "a clip by the norm": lambda x, k: jnp.where(
    jnp.linalg.norm(x) < k, x, x / jnp.linalg.norm(x) * k
  ),
  "a factor of at most 1": lambda x, k: (
    x * jnp.minimum(1, k / jnp.linalg.norm(x))
  ),
  "the largest size": lambda x, k: jnp.broadcast_to(
    jnp.max(jnp.abs(x)), x.shape
  ),
  "its direction": lambda x, k: k * (x / jnp.linalg.norm(x)),
  "the derivative of a pool": lambda x, k: jax.vjp(
    lambda y: jax.lax.reduce_window(
      y, -jnp.inf, jax.lax.max, (1, 1), (1, 1), "VALID"
    ),
    jnp.ones_like(x),
  )[1](x)[0],
  "a mask": lambda x, k: x * (jnp.arange(x.shape[0]) > 0)[:, None],
}


@pytest.mark.parametrize("change", HIDING | KEEPING)
def test_a_function_is_proved_if_an_inf_shows_and_not_if_it_may_hide(change):
  function = (HIDING | KEEPING)[change]
  report = proved(*by(function))
  x = jnp.ones((3, 2)).at[1, 0].set(jnp.inf)
  is_hidden = bool(np.isfinite(function(x, 2.0**8)).all())
  assert is_hidden == (change in HIDING) == (not report.ok)
  expected = "inconclusive" if is_hidden else "proved"
  assert verdicts(report)["scale"] == expected, report


def two(change=lambda new, found, old: found, loss_of_b=loss_fn):
  """Returns what is proved of a step of two states, in which b sees a."""

  def step(params, opt_states, batch):
    found, new = {}, {}
    for name, loss_fn_of in (("a", loss_fn), ("b", loss_of_b)):
      _, scaled_grads = ols.scaled_value_and_grad(loss_fn_of, opt_states[name])(
        params[name] | found.get("a", {}), batch
      )
      updates, new[name] = TX.update(
        scaled_grads, opt_states[name], params[name]
      )
      found[name] = optax.apply_updates(params[name], updates)
    return change(new, found, params), new

  both = {"a": PARAMS, "b": PARAMS}
  return proved(step, both, {x: TX.init(PARAMS) for x in both}, step_of()[3])


def test_a_skip_that_undoes_half_of_another_step_is_named():
  assert two().ok
  report = two(lambda new, found, old: ols.select_on_skip(new["b"], found, old))
  assert "opt_states/a moves stay" in said(report, "skip"), report


def test_a_value_that_only_the_skip_of_another_state_keeps_is_named():
  def decayed(new, found, old):
    skipped = new["b"].skipped
    decay = lambda x, y: jnp.where(skipped, y, 0.5 * x)  # noqa: E731
    return found | {"a": jax.tree.map(decay, found["a"], old["a"])}

  text = "params/a/v may change, though opt_states/a skips"
  assert text in said(two(decayed), "skip")


def test_a_bound_on_what_a_gate_has_passed_hides_nothing():
  def bounded_loss_fn(params, batch):
    x = jnp.clip(batch["x"] * params["w"].sum(), -1, 1)
    return loss_fn(params, batch | {"x": x})

  report = two(loss_of_b=bounded_loss_fn)
  assert {verdicts(report)[x] for x in LAWS} == {"proved"}, report


def test_an_old_value_may_be_returned_beside_the_next_one():
  report = proved(*ending(lambda new, old, _: (old[0], *new), None))
  assert report.ok and report.next_values["params"] == "1", report

  def decayed(new, old, _):
    return jax.tree.map(lambda x: 0.9 * x, new[0]), new[1], old[0]

  report = proved(*ending(decayed, None))
  assert not report.ok and report.next_values["params"] == "0", report


def scale_by_branch(new, old, _):
  scale = jax.lax.cond(
    old[2]["x"].sum() > 0,
    lambda: new[1].loss_scale_state,
    lambda: old[1].loss_scale_state,
  )
  return new[0], new[1]._replace(loss_scale_state=scale)


def scale_by_cast(new, old, _):
  scale = new[1].loss_scale_state
  narrow = scale.loss_scale.astype(jnp.float16).astype(jnp.float32)
  scale = scale._replace(loss_scale=narrow)
  return new[0], new[1]._replace(loss_scale_state=scale)


@pytest.mark.parametrize("end", [scale_by_branch, scale_by_cast])
def test_an_s_that_the_rule_has_not_made_is_not_proved(end):
  report = proved(*ending(end, None))
  assert not report.ok and "The next S" in said(report, "invariance"), report


def test_a_branch_that_uses_gradients_without_update_is_not_proved():
  def step(params, opt_state, batch):
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      params, batch
    )

    def update():
      updates, new = TX.update(scaled_grads, opt_state, params)
      return optax.apply_updates(params, updates), new

    def by_hand():
      grads = ols.unscale(scaled_grads, opt_state)
      return jax.tree.map(lambda x, y: x - 0.1 * y, params, grads), opt_state

    return jax.lax.cond(batch["x"].sum() > 0, update, by_hand)

  report = proved(step, *step_of()[1:])
  assert not report.ok
  assert "gradients that no `update` sees" in said(report, "skip"), report
