"""How proofs, runs and plain numbers become a verdict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale.instruments.step import _findings
from optax_lossscale.instruments.step import _proof
from optax_lossscale.instruments.step import _verdicts
from optax_lossscale.instruments.step._findings import Kind
from optax_lossscale.instruments.step._verdicts import Outcome
from tests.instruments.step.steps import check
from tests.instruments.step.steps import LAWS
from tests.instruments.step.steps import make_step
from tests.instruments.step.steps import plain
from tests.instruments.step.steps import proved
from tests.instruments.step.steps import step_of
from tests.instruments.step.steps import TX
from tests.instruments.step.steps import verdicts


def laws_of(report):
  return [verdicts(report)[x] for x in LAWS]


def law_of(name, verdict, text, kind, **fields):
  """Returns a law that was found, with names and verdicts as a report's."""
  name, verdict = _findings.LawName(name), _findings.Verdict(verdict)
  return _findings.Law(name, verdict, text, kind=kind, **fields)


def combine(name, proof, run=None):
  """Returns what is said of a law that a proof and runs judge."""
  where = () if proof in ("proved", "not applied") else (("a/b.py", 7, "x"),)
  remedy = "Mend." if where else ""
  fields = {"remedy": remedy, "where": where}
  proved = law_of(name, proof, "It is shown.", Kind.NO_POWER, **fields)
  seen = law_of(name, run or "exact", "It is seen.", Kind.DIFFER, remedy="Do.")
  (law,) = _findings.combined([proved], [seen] if run else [])
  assert law.name == name
  # Only what is not proved has a line to look at.
  assert law.where == where
  return law


SKIP_TEXT = "That is not shown to hold, but was not seen to fail. It is shown."
OPEN = "Not proved, and no run could tell: It is shown."
BOTH = "It is shown. In runs: It is seen."
HIDDEN = "It is shown. This batch hides it."
SEEN = "It is seen. Not proved: It is shown."
NEITHER = "Not proved: It is shown."
ARRAYS = "Give the step arrays, so that the check also runs it."


@pytest.mark.parametrize(
  ("name", "proof", "run", "verdict", "text", "remedy"),
  [
    ("scale", "proved", "exact", "proved", "It is shown.", ""),
    ("scale", "proved", "inconclusive", "proved", BOTH, ""),
    ("scale", "refuted", "wrong", "wrong", BOTH, "Do."),
    ("invariance", "refuted", "inconclusive", "wrong", HIDDEN, "Mend."),
    ("skip", "refuted", "exact", "inconclusive", SKIP_TEXT, "Mend."),
    ("skip", "refuted", "wrong", "wrong", BOTH, "Do."),
    ("scale", "unknown", "exact", "exact", SEEN, "Do."),
    ("scale", "unknown", "wrong", "wrong", SEEN, "Do."),
    ("skip", "not applied", "exact", "exact", "It is seen.", "Do."),
    # No run could tell, but one that fails does.
    ("scale", "open", "exact", "inconclusive", OPEN, "Mend."),
    ("scale", "open", "wrong", "wrong", SEEN, "Do."),
    # Shapes do not run.
    ("scale", "unknown", None, "inconclusive", NEITHER, ARRAYS),
    ("scale", "open", None, "inconclusive", OPEN, "Mend."),
    ("scale", "proved", None, "proved", "It is shown.", ""),
    ("skip", "not applied", None, "not applied", "It is shown.", ""),
  ],
)
def test_the_stronger_evidence_counts(name, proof, run, verdict, text, remedy):
  law = combine(name, proof, run)
  assert (law.verdict, law.text, law.remedy) == (verdict, text, remedy)


def test_a_law_equals_and_prints_its_texts():
  law = _findings.found(Kind.ALL_WIDE, _findings.LawName.PRECISION)
  assert law.verdict == str(law.verdict) == f"{law.verdict}" == "not applied"
  assert law.name == str(law.name) == f"{law.name}" == "precision"
  assert repr(law).startswith("Law(name='precision', verdict='not applied', ")
  assert repr(law).endswith("where=(), kind=Kind.ALL_WIDE, path='')")


def test_each_s_is_combined_with_its_own_runs():
  def laws(kind, text, **verdicts):
    return [law_of("scale", y, text, kind, path=x) for x, y in verdicts.items()]

  scaled, seen = Kind.GRADIENT_IS_SCALED, Kind.NEARLY
  proofs = laws(scaled, "It is shown.", a="proved", b="proved")
  runs = laws(seen, "It is seen.", b="exact", a="rounding", c="not applied")
  found = {x.text for x in _findings.combined(proofs, runs)}
  # Proof and runs name their S once.
  assert found == {
    f"Of S at a: {BOTH}",
    "Of S at b: It is shown.",
    "Of S at c: It is seen.",
  }


# The scale law sees amax at S, S/2 and S/4. The invariance law sees a value
# before the step, after it, in a second run, at S/2, at S/4 and at S/4096.

MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
  ("amaxes", "verdict", "text"),
  [
    ([8, 4, 2], "exact", "is proportional to S."),
    ([8, 8, 8], "wrong", "does not depend on S"),
    ([16, 4, 1], "wrong", "S squared"),
    ([8, 4 + 2**-8, 2 + 1.5 * 2**-8], "wrong", "but for a small part"),
    ([8, 4 + 2**-10, 2], "rounding", "is nearly proportional"),
    ([8, 2.9, 1.05], "inconclusive", "S^1.47"),
    ([8, 1, 0.125], "wrong", "S^3.00"),
    ([MOST, MOST / 2, MOST / 4], "inconclusive", "all gradients are 0"),
    ([[8, 8], [4, 2], [2, 0.5]], "exact", "is proportional to S."),
    ([[8, 8], [4, 8], [2, 8]], "wrong", "S^0.00"),
  ],
)
def test_the_scale_law_follows_the_largest_gradient(amaxes, verdict, text):
  amaxes = np.reshape(np.asarray(amaxes, np.float32), (3, -1))
  halvings = np.array([1, 2])[: amaxes.shape[1]]
  found = _verdicts.scale_law(amaxes, halvings, is_rough=False)
  assert found.verdict == verdict and text in found.text
  # If two runs differ, or small numbers are lost, only large errors count.
  rough = _verdicts.scale_law(amaxes, halvings, is_rough=True).verdict
  is_clear = verdict != "wrong" or ("S^" not in text and "part" not in text)
  assert is_clear == (rough == verdict)


@pytest.mark.parametrize(
  ("values", "is_narrow", "verdict", "text"),
  [
    ([0, 1, 1, 1, 1, 1], False, "exact", "No next value"),
    ([0, 1, 1, 1 + 2**-21, 1, 1], False, "rounding", "p (4.8e-05 %)"),
    ([0, 1, 1, 1 + 2**-19, 1, 1], False, "wrong", "p (0.00019 %)"),
    ([0, 1, 1, 1, 1, 1 + 2**-17], False, "wrong", "p (0.00076 % at S/4096)"),
    ([0, 1, 1 + 2**-9, 1 + 2**-6, 1], False, "inconclusive", "p (1.5 %)"),
    ([0, 4, 4, 2, 1], True, "wrong", "p (50 % like S^1)"),
    ([0, 1, 1, 1 + 2**-9, 1], True, "rounding", "p (0.19 %)"),
    ([0, 1, 1, 1.25, 1.5], True, "inconclusive", "p (20 %)"),
    ([0, 1, 1, np.inf, 1], False, "wrong", "p."),
    ([np.inf, 1, 1, 2, 2], False, "wrong", "p (50 % like S^-1)"),
    ([0, np.nan, np.nan, np.nan, np.nan], False, "exact", "No next value"),
  ],
)
def test_the_invariance_law_compares_next_values(
  values, is_narrow, verdict, text
):
  key = jax.tree_util.DictKey
  named = [{(key("p"),): np.float32([x])} for x in values]
  found = _verdicts.invariance_law(named, set(), is_narrow)
  assert found.verdict == verdict and text in found.text
  # The statistics of FP8 layers follow S.
  fp8 = [
    {(*path, key("_overwrite_with_gradient")): y for path, y in x.items()}
    for x in named
  ]
  assert _verdicts.invariance_law(fp8, set(), is_narrow).verdict == "exact"
  doubtful = _verdicts.invariance_law(named, {"p"}, is_narrow).verdict
  assert doubtful == ("inconclusive" if verdict == "wrong" else verdict)


@pytest.mark.parametrize(
  ("values", "wide", "narrow"),
  [
    ([1.0, 1.0, 1.0 + 2**-21, 1.0], False, False),
    ([1.0, 1.0, 1.0 + 2**-19, 1.0], True, False),
    ([1.0, 1.0, 1.0, 1.0, 1.0 + 2**-17], True, False),
    ([1.0, 1.0 + 2**-9, 1.0 + 2**-6, 1.0], False, False),
    ([1.0, 1.0, 1.0 - 2**-5, 1.0], True, False),
    ([1.0, 1.0, 1.0 - 2**-5, 1.0 - 2**-4], True, True),
    ([2.0**-99, 2.0**-99, 2.0**-100, 2.0**-101], True, True),
    ([[9.0, 9, 4], [9.0, 9, 4], [9.0, 9, 2], [9.0, 9, 1]], True, True),
    ([[1e6, 4, 4], [1e6, 4, 4], [1e6, 2, 2], [1e6, 1, 1]], True, True),
    ([7, 7, 6, 5], True, True),
    ([True, True, True, False], True, True),
    ([[1.0], [1.0], [1.0, 1.0], [1.0]], True, True),
    ([[5, 0], [5, 0], [4, 1], [5, 0]], True, True),  # A histogram.
  ],
)
def test_an_output_depends_on_s_if_it_differs_by_more_than_rounding(
  values, wide, narrow
):
  values = [np.array(x) for x in values]
  assert _verdicts.depends(values, is_narrow=False) == wide
  assert _verdicts.depends(values, is_narrow=True) == narrow


def test_differences_that_point_apart_are_rounding():
  rng = np.random.default_rng(0)
  steady = np.float32(rng.normal(size=64))
  for change, verdict in (
    (lambda k: rng.normal(size=64) / 16, "rounding"),
    (lambda k: steady * k / 16, "inconclusive"),
  ):
    moved = [{"p": np.float32(steady + change(k))} for k in (0, 1, 2)]
    values = [{"p": 0 * steady}, moved[0], *moved]
    found = _verdicts.invariance_law(values, set(), is_narrow=True)
    assert found.verdict == verdict


def test_the_skip_law_names_the_worst_and_first_what_is_certain():
  key = jax.tree_util.DictKey
  a, b = (key("a"), key("x")), (key("b"),)

  def law(outcomes, changed=(), doubtful=()):
    names = {a: "a/x", b: "b"}
    return _verdicts.skip_law(outcomes, changed, {*doubtful}, names)

  skipped = {Outcome.SKIPPED}
  assert law(skipped).verdict == "exact"
  assert law(set()).kind is Kind.NOTHING_SEEN
  assert law(skipped | {Outcome.HIDDEN}).kind is Kind.INF_APPLIED
  assert law({Outcome.APPLIED, Outcome.NOTHING}).verdict == "wrong"
  found = law(skipped, [a, b], "a")
  assert found.verdict == "wrong" and found.text.endswith("changed b.")
  assert law(skipped, [a], "a").verdict == "inconclusive"


@pytest.mark.parametrize("place", range(3))
def test_one_shape_among_arrays_is_enough_and_nothing_is_computed(place):
  def loss_fn(params, x):
    return jnp.sum((x @ params) ** 2)

  size = jax.ShapeDtypeStruct((500_000, 50_000), jnp.float32)
  args = [size, jax.eval_shape(TX.init, size), jnp.ones((1, 500_000))]
  if place < 2:
    args = [jnp.ones((2, 3)), TX.init(jnp.ones((2, 3))), jnp.ones((4, 2))]
    args[place] = jax.eval_shape(lambda: args[place])
  before = {id(x) for x in jax.live_arrays()}
  report = check(make_step(loss_fn=loss_fn), *args)
  assert laws_of(report) == ["proved"] * 3
  live = (x for x in jax.live_arrays() if id(x) not in before)
  assert not [x for x in live if x.size > 1]


def test_a_step_that_reads_a_number_is_run_and_fails_with_shapes():
  compiled, *args = step_of()

  def step(params, opt_state, batch):
    params, opt_state, loss = compiled(params, opt_state, batch)
    return params, opt_state, float(loss)

  report = check(step, *args)
  assert laws_of(report) == ["exact"] * 3 and report.ok, report
  assert "prove" not in str(report).lower()
  assert verdicts(report)["precision"] == "not applied"
  assert "JAX cannot trace the step (Concretization" in str(report)
  assert str(report).startswith(
    "The loss scaling of this step is right, but jit cannot compile it."
  )
  with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
    proved(step, *args)
  assert "must be given arrays" in raised.value.__notes__[-1]
  with pytest.raises(KeyError, match="nowhere"):
    proved(lambda *args: {}["nowhere"], *args)


def test_a_proof_that_crashes_leaves_the_verdicts_to_the_runs(monkeypatch):
  def crash(*args):
    raise RuntimeError("a mistake in the proof")

  monkeypatch.setattr(_proof, "prove", crash)
  report = check(*step_of())
  assert laws_of(report) == ["exact"] * 3 and report.ok, report
  assert report.assumptions == ()
  text = "Not proved: The proof failed (RuntimeError: a mistake in the proof)"
  assert all(text in x.text for x in report.laws if x.name in LAWS)
  report = check(*step_of(value_and_grad=plain))
  assert verdicts(report)["scale"] == "wrong"
  assert laws_of(proved(*step_of())) == ["inconclusive"] * 3
