"""A proof beside runs, a proof alone, and a check whose proof fails."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.instruments import _proof
from optax_lossscale.instruments import _verdicts

check_step = ols.instruments.check_step
TX = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
ARGS = PARAMS, TX.init(PARAMS), jnp.ones((4, 3))


def shapes_of(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)


def step(params, opt_state, x, value_and_grad=ols.scaled_value_and_grad):
  _, scaled_grads = value_and_grad(loss_fn, opt_state)(params, x)
  updates, opt_state = TX.update(scaled_grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def wrong_step(params, opt_state, x):
  def plain(loss_fn, opt_state):
    return jax.value_and_grad(loss_fn)

  return step(params, opt_state, x, plain)


def step_on_the_host(params, opt_state, x):
  float(x[0, 0])
  return step(params, opt_state, x)


def verdicts(report):
  return {x.name: x.verdict for x in report.laws if x.name != "precision"}


PROVED = dict.fromkeys(("scale", "invariance", "skip"), "proved")
EXACT = dict.fromkeys(PROVED, "exact")


# The stronger evidence counts.


def combine(name, proof, run=None):
  """Returns what is said of a law that a proof and runs judge."""
  where = () if proof in ("proved", "not applied") else (("a/b.py", 7, "x"),)
  remedy = "Mend." if where else ""
  proved = _verdicts.Proved(name, proof, "It is shown.", remedy, where)
  runs = [_verdicts.Law(name, run, "It is seen.", "Do.")] if run else []
  (law,) = _verdicts.combined([proved], runs)
  assert law.name == name
  # Only what is not proved has a line to look at.
  assert law.where == where
  return law


SKIP_TEXT = "That is not shown to hold, but was not seen to fail. It is shown."
OPEN = "Not proved, and no run could tell: It is shown."
BOTH = "It is shown. In runs: It is seen."
HIDDEN = "It is shown. This batch hides it."
SEEN = "It is seen. Not proved: It is shown."


@pytest.mark.parametrize(
  ("name", "proof", "run", "verdict", "text", "remedy"),
  [
    ("scale", "proved", "exact", "proved", "It is shown.", ""),
    ("scale", "proved", "not applied", "proved", BOTH, ""),
    ("scale", "proved", "rounding", "proved", BOTH, ""),
    ("scale", "proved", "inconclusive", "proved", BOTH, ""),
    ("scale", "refuted", "wrong", "wrong", BOTH, "Do."),
    *(
      ("invariance", "refuted", run, "wrong", HIDDEN, "Mend.")
      for run in ("exact", "rounding", "inconclusive")
    ),
    *(
      ("skip", "refuted", run, "inconclusive", SKIP_TEXT, "Mend.")
      for run in ("exact", "inconclusive")
    ),
    ("skip", "refuted", "wrong", "wrong", BOTH, "Do."),
    *(
      ("scale", "unknown", run, run, SEEN, "Do.")
      for run in ("exact", "rounding", "inconclusive", "wrong")
    ),
    ("skip", "not applied", "exact", "exact", "It is seen.", "Do."),
    # No run could tell, but one that fails does.
    ("scale", "open", "exact", "inconclusive", OPEN, "Mend."),
    ("scale", "open", "wrong", "wrong", SEEN, "Do."),
    ("scale", "open", None, "inconclusive", OPEN, "Mend."),
    # Of shapes there are no runs.
    ("scale", "proved", None, "proved", "It is shown.", ""),
    ("arguments", "refuted", None, "wrong", "It is shown.", "Mend."),
    ("skip", "refuted", None, "wrong", "It is shown.", "Mend."),
    ("skip", "not applied", None, "not applied", "It is shown.", ""),
  ],
)
def test_the_stronger_evidence_counts(name, proof, run, verdict, text, remedy):
  law = combine(name, proof, run)
  assert (law.verdict, law.text, law.remedy) == (verdict, text, remedy)


def test_a_law_that_is_unknown_and_did_not_run_asks_for_arrays():
  law = combine("scale", "unknown")
  assert law.verdict == "inconclusive" and "arrays" in law.remedy


def test_a_proof_that_runs_contradict_asks_for_a_report():
  law = combine("skip", "proved", "wrong")
  assert (law.verdict, law.remedy) == ("wrong", "Do.")
  assert law.text.startswith("It is seen. But the law was proved: please rep")


def test_each_s_is_combined_with_its_own_runs():
  proofs = [
    _verdicts.Proved("scale", "proved", "It is shown.", path=x) for x in "ab"
  ]
  runs = [
    _verdicts.Law("scale", "exact", "Of S at b: It is seen."),
    _verdicts.Law("scale", "rounding", "Of S at a: It is seen."),
    _verdicts.Law("scale", "not applied", "Of S at c: It is seen."),
  ]
  found = {x.text for x in _verdicts.combined(proofs, runs)}
  # Of a proof's own S, "Of S at" is said once.
  assert found == {
    f"Of S at a: {BOTH}",
    "Of S at b: It is shown.",
    "Of S at c: It is seen.",
  }


# A proof alone.


@pytest.mark.parametrize("compile", [jax.jit, lambda step: step])
def test_of_shapes_a_step_is_only_proved(compile):
  report = check_step(compile(step), *shapes_of(ARGS))
  assert verdicts(report) == PROVED and report.ok, report
  assert report.next_values == {"params": "0", "opt_state": "1"}
  assert "The step is right, for all values" in str(report)
  report = check_step(compile(wrong_step), *shapes_of(ARGS))
  assert verdicts(report)["scale"] == "wrong", report
  assert "This batch" not in str(report) and "In runs" not in str(report)


def test_of_shapes_nothing_is_computed():
  size = jax.ShapeDtypeStruct((500_000, 50_000), jnp.float32)
  params = {"w": size, "v": size}
  opt_state = jax.eval_shape(TX.init, params)

  def loss_fn(params, x):
    return jnp.sum((x @ (params["w"] + params["v"])) ** 2)

  def step(params, opt_state, x):
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x)
    updates, opt_state = TX.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  x = jax.ShapeDtypeStruct((1, 500_000), jnp.float32)
  before = {id(x) for x in jax.live_arrays()}
  report = check_step(step, params, opt_state, x)
  assert verdicts(report) == PROVED, report
  assert not [
    x for x in jax.live_arrays() if id(x) not in before and x.size > 1
  ]


@pytest.mark.parametrize("place", range(len(ARGS)))
def test_one_shape_among_arrays_is_enough(place):
  args = list(ARGS)
  args[place] = shapes_of(args[place])
  assert verdicts(check_step(step, *args)) == PROVED
  assert verdicts(check_step(wrong_step, *args))["scale"] == "wrong"


def test_of_shapes_a_step_that_reads_a_number_fails_as_the_step_does():
  with pytest.raises(jax.errors.ConcretizationTypeError):
    check_step(step_on_the_host, *shapes_of(ARGS))
  with pytest.raises(KeyError, match="nowhere"):
    check_step(lambda *args: {}["nowhere"], *shapes_of(ARGS))


def test_of_shapes_the_arguments_are_looked_at_as_well():
  shapes = shapes_of(ARGS)
  for carry, text in (
    ({"param": 0}, "the arguments are params, opt_state, x"),
    ({0: 7}, "the outputs 0, 1"),
    ({0: 1}, "of the same structure, shapes and dtypes"),
    ({0: 0}, re.escape("opt_state, got `carry` without it, {0: 0}")),
  ):
    with pytest.raises(ValueError, match=text):
      check_step(step, *shapes, carry=carry)
  with pytest.raises(ValueError, match="none among its arguments params, x"):
    check_step(lambda params, x: params, shapes[0], shapes[2])
  with pytest.raises(ValueError, match="next value of the argument that holds"):
    check_step(lambda params, opt_state: params, *shapes[:2])
  with pytest.raises(ValueError, match=r"must name leaves .* 'z'; they"):
    check_step(step, *shapes, may_change="z")
  # The name that was meant comes first.
  with pytest.raises(ValueError, match="'parms'; they are params"):
    check_step(step, *shapes, may_change=["parms"])
  with pytest.raises(TypeError, match="must be a list of names .* got 3"):
    check_step(step, *shapes, may_change=3)


# A check whose proof fails.


def test_a_proof_that_crashes_leaves_the_verdicts_to_the_runs(monkeypatch):
  def crash(*args):
    raise RuntimeError("a mistake in the proof")

  monkeypatch.setattr(_proof, "prove", crash)
  report = check_step(step, *ARGS)
  assert verdicts(report) == EXACT and report.ok, report
  assert report.assumptions == ()
  text = "Not proved: The proof failed (RuntimeError: a mistake in the proof)"
  assert [text in x.text for x in report.laws if x.name in EXACT] == [True] * 3
  assert verdicts(check_step(wrong_step, *ARGS))["scale"] == "wrong"
  report = check_step(step, *shapes_of(ARGS))
  assert set(verdicts(report).values()) == {"inconclusive"}


def test_a_step_that_jax_cannot_trace_is_run():
  report = check_step(step_on_the_host, *ARGS)
  assert verdicts(report) == EXACT and report.ok, report
  assert "prove" not in str(report).lower()


def test_other_arguments_of_update_have_a_law_of_their_own():
  tx = ols.loss_scaling(
    optax.contrib.reduce_on_plateau(), ols.DynamicLossScale()
  )

  def step(params, opt_state, x, of=lambda value, opt_state: value):
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      params, x
    )
    updates, opt_state = tx.update(
      scaled_grads, opt_state, params, value=of(loss, opt_state)
    )
    return optax.apply_updates(params, updates), opt_state

  args = PARAMS, tx.init(PARAMS), ARGS[2]
  assert verdicts(check_step(step, *args))["arguments"] == "proved"
  report = check_step(functools.partial(step, of=ols.scale_loss), *args)
  assert verdicts(report)["arguments"] == "wrong"
  (law,) = (x for x in report.laws if x.name == "arguments")
  assert law.text.startswith("`value=` depends on S: it grows as S")
  assert [x for *_, x in law.where] == [
    "scaled_grads, opt_state, params, value=of(loss, opt_state)"
  ]
