"""The laws of a correct step: their texts, and how numbers are judged."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import textwrap
from typing import NamedTuple

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import scopes
from optax_lossscale.instruments.step import _next_values

# The most steps to run until a parameter moves.
MOST_STEPS = 64

# How far the updates at two values of S may differ: in float32 and above, where
# powers of two are exact, the largest element; in float16, where a smaller S
# loses low bits and small gradients, the median one. In correct steps of an
# MLP, an LSTM and a transformer at O1, O2 and O3, with SGD and Adam, it was at
# most 1e-4 for S of 2**15 or more, and 7e-3 for S of 2**6 or more.
_ROUNDING = 2.0**-20
_NARROW_ROUNDING = 2.0**-6

# The least cosine of two differences that a mistake makes. In transformers at
# O1 with gradients that are mostly rounding it was at most 0.7.
_ONE_WAY = 0.9

# How closely log2(amax) must follow log2(S).
_SLOPE_ROUNDING = 2.0**-6

INSIDE = (
  "Put anything that needs true gradients inside: loss_scaling(chain, rule)."
)
_WIDE = "check the step with the model in float32, where S must not show."
CARRY = (
  "That is a mistake only if the next values below were guessed right: name "
  "those that are, as in carry={'params': 0, 'opt_state': 1}."
)

NOT_SCALED = (
  "Either the loss is not scaled by this S: jax.value_and_grad in the place of "
  "ols.scaled_value_and_grad, an S that was read once or outside of the step, "
  "the S of another optimizer (path= says which). Or `update` of loss_scaling "
  "is not given the scaled gradients: ols.unscale, a clip or an optimizer "
  f"before it. {INSIDE}"
)
TWICE = "The loss is scaled twice, by ols.scaled_value_and_grad and by hand."
HIDDEN = (
  "Something before `update` hides inf and NaN from it, such as "
  "jnp.where(jnp.isfinite(g), g, 0), jnp.nan_to_num or a clip. Take it out: "
  f"`update` skips the step. {INSIDE}"
)
PASSED_BY = (
  "Some gradients do not pass through loss_scaling (optax.masked or one group "
  "of a partition around it), something around it takes scaled ones "
  "(MultiSteps, an optimizer, a guard against spikes that is shown their "
  "norm), or something was added to them by hand (weight decay, noise). "
  f"{INSIDE}"
)
MOVES = (
  "A skipped step must keep the old values: new = "
  "ols.select_on_skip(opt_state, new, old); in Flax NNX `with "
  "ols.nnx.undo_on_skip(optimizer, model):`; in Flax Linen "
  "ols.linen.TrainState. Optimizers belong inside of loss_scaling. Name "
  "anything that may change anyway in may_change=."
)
TOGETHER = (
  "A skip must undo only the step of its own state. Or let both skip: give "
  "each `update` an overflow= that says whether any gradient overflows."
)
EACH = (
  "Keep the old values once for each `update`: with a select_on_skip behind "
  "it, or in NNX an undo_on_skip around it."
)
TOLD = (
  "Find an overflow before that, and tell `update` of it: update(..., "
  "overflow=~jnp.isfinite(optax.tree.norm(scaled_grads)))."
)
DROPPED = (
  "`accumulate(..., drop=True)` returns what it left out: "
  "update(..., overflow=overflow)."
)
GIVEN = (
  "Give `update` the true loss, true gradients (ols.unscale) or flags that do "
  "not depend on S."
)
RETURNED = (
  "Return the parameters and the whole state that the last `update` made, and "
  "leave S to the rule."
)
ALONE = "Devices must skip together: loss_scaling(..., axis_name=...)."

# The scale law by the power of S that amax follows: verdict, text and remedy.
_SLOPES = {
  1: ("exact", "The largest gradient is proportional to S."),
  0: ("wrong", "The largest gradient does not depend on S.", NOT_SCALED),
  2: ("wrong", "The largest gradient is proportional to S squared.", TWICE),
}
_NEARLY = ("rounding", "The largest gradient is nearly proportional to S.")
_ADDED = (
  "wrong",
  "The largest gradient is proportional to S but for a small part.",
  f"Something is added before `update` (weight decay, noise). {INSIDE}",
)
OVERFLOWS = (
  "inconclusive",
  "The step overflows at this S and at smaller ones.",
  "Take another batch, or see where this one overflows: "
  "ols.instruments.where_overflow.",
)
REQUESTED = (
  "inconclusive",
  "`skip` skipped the step, so nothing could be compared.",
  "Take a batch, or a state, with which the step is applied.",
)
STALLED = (
  "wrong",
  "The step overflows at this S, and the rule cannot lower it.",
  "Every such step is skipped. Take a smaller S, or a rule that moves it.",
)
NOTHING_SEEN = (
  "inconclusive",
  "`update` of loss_scaling did not run, or all gradients are 0.",
  "Take another batch, or a step in which it runs, and return the state that "
  "`update` returns. optax.MultiSteps belongs inside of loss_scaling.",
)
NOT_COMPARED = (
  "inconclusive",
  "No output was found to be the next value of the parameters.",
  "Name it, as in carry={'params': 0, 'opt_state': 1}.",
)
STILL = (
  "inconclusive",
  f"No parameter moves in {MOST_STEPS} steps.",
  "Check a step whose rate is not 0, of fewer that are accumulated, and whose "
  "updates the parameters' dtype can hold.",
)
SWITCHED_OFF = ("not applied", "Loss scaling is switched off.")
CONSTANT = ("not applied", "S is a fixed 1, and the loss is not scaled by it.")
SET_ASIDE = (
  "not applied",
  "The step sets this S aside, as a schedule does in full precision.",
)

# Verdict and remedy of the invariance law, by the verdict on the worst leaf.
_INVARIANCE = {
  "wrong": ("wrong", PASSED_BY),
  "doubtful": ("inconclusive", CARRY),
  "inconclusive": ("inconclusive", f"That may be rounding or not: {_WIDE}"),
  "rounding": ("rounding", f"A smaller mistake would hide in that: {_WIDE}"),
}

# The skip law, by the outcome of a step that overflows, worst first.
_NOT_SKIPPED = {
  "hidden": ("wrong", "A step whose gradients overflow was applied.", HIDDEN),
  "nothing": (
    "wrong",
    "The step with an S of inf was not skipped.",
    "Something around loss_scaling, such as optax.apply_if_finite, took the "
    "step back and S with it: S can never come down. It belongs inside.",
  ),
  "kept": ("wrong", "A skipped step does not change an S of inf.", RETURNED),
  "several": (
    "inconclusive",
    "The step makes several updates and skipped only some of them.",
    "Check one of them alone, such as the body of the scan.",
  ),
  "overflow": (
    "not applied",
    "The rule has skip=False, so that overflows are applied.",
  ),
  "applied": SET_ASIDE,
}
# The place of an NNX object's next value, for a report.
IN_PLACE = "in place"
_ALL_WIDE = (
  "not applied",
  "Nothing in the step works below float32.",
  "If that is not meant, loss scaling has nothing to save: "
  'ols.autocast(loss_fn, "O1") or dtype=jnp.float16 is missing.',
)

SKIPS_UNSEEN = (
  "open",
  "With rule=None the check does not look at what a `skip` keeps.",
  "Check the step with FixedLossScale(1.0), whose skips it looks at.",
)
NO_TRACE = "JAX cannot trace the step"

_REPORT = (
  "But the law was proved: please report this step as a bug of check_step, "
  "unless it reads random numbers or files of the host."
)
_PROVED = "right, for all values"
# In the order of a report.
_LAWS = ("scale", "arguments", "invariance", "skip", "precision")

# A file, the number of a line in it, and the line's text.
Line = tuple[str, int, str]


class Law(NamedTuple):
  """One law, and whether a step obeys it.

  Attributes:
    name: "scale", "arguments", "invariance", "skip" or "precision".
    verdict: "proved", for all values; "exact" or, up to rounding, "rounding" in
      runs; "wrong"; "inconclusive"; or "not applied", if the law does not apply
      to the step.
    text: what the check found.
    remedy: the mistakes that look like this, and how to fix them.
    where: the lines of the program that the law points at, each as the file,
      the line's number and its text.
  """

  name: str
  verdict: str
  text: str
  remedy: str = ""
  where: tuple[tuple[str, int, str], ...] = ()


UNSCALED = Law(
  "precision",
  "inconclusive",
  "It computes in less range than float32, without loss scaling.",
  "Small gradients become 0. Give `loss_scaling` a rule in the place of None, "
  "or compute in bfloat16.",
)


class Proved(NamedTuple):
  """The verdict of a proof on one law."""

  law: str
  # "proved"; "refuted"; "unknown", if the runs decide; "open", if no run could
  # tell either; or "not applied".
  verdict: str
  text: str
  remedy: str = ""
  where: tuple[Line, ...] = ()
  path: str = ""  # The state that it is about, if the step has several.


@dataclasses.dataclass(frozen=True)
class StepReport:
  """The findings of `check_step`; print it to read them.

  Attributes:
    laws: the laws, each with its verdict. With several loss scales, the scale
      law comes once for each.
    next_values: for each argument, the output that counts as its next value;
      "in place" for an NNX object, which the step changes.
    follows: the other outputs that depend on S by more than rounding, such as a
      norm of scaled gradients, which is fine unless it is used as the true one.
    deterministic: whether two runs with the same S gave the same values.
    halvings: how often S was halved until the step did not overflow.
    warnings: the text of each `WiringWarning` that the step raised while it was
      traced, unless a filter of yours ignores it.
    assumptions: the library's functions that a proof does not look into. It
      relies on what they promise.
  """

  laws: tuple[Law, ...]
  next_values: Mapping[str, str]
  follows: tuple[str, ...] = ()
  deterministic: bool = True
  halvings: int = 0
  warnings: tuple[str, ...] = ()
  assumptions: tuple[str, ...] = ()

  def __bool__(self) -> bool:
    """Returns `ok`, so that `assert check_step(...)` is a test."""
    return self.ok

  @property
  def _is_wrong(self) -> bool:
    return any(law.verdict == "wrong" for law in self.laws)

  @property
  def ok(self) -> bool:
    """True if every law that applies holds, and nothing is left to clear up.

    A law that is inconclusive, or a warning, makes it False.
    """
    verdicts = {x.verdict for x in self.laws}
    return not (verdicts & {"wrong", "inconclusive"} or self.warnings)

  def raise_if_wrong(self) -> None:
    """Raises a ValueError with the report as its text if a law is broken."""
    if self._is_wrong:
      raise ValueError(str(self))

  def __str__(self) -> str:
    found = "wrong" if self._is_wrong else "right" if self.ok else "not certain"
    verdicts = {law.verdict for law in self.laws if law.name != "precision"}
    is_proved = "proved" in verdicts <= {"proved", "not applied"}
    if self.ok and is_proved and self.deterministic:
      found = _PROVED
    if self.ok and "rounding" in verdicts:
      found = "right, as far as rounding can tell"
    if self.ok and any(law.text == _ALL_WIDE[1] for law in self.laws):
      found += ", but nothing in it works below float32"
    if self.ok and any(law.text.startswith(NO_TRACE) for law in self.laws):
      found += ", but jit cannot compile it"
    pairs = [
      f"{x} {y}" if y == IN_PLACE else f"{x} from output {y or 0}"
      for x, y in self.next_values.items()
    ]
    head = f"The loss scaling of this step is {found}."
    shown, assumptions = self.laws, self.assumptions
    # Whoever asks has the proof in `laws`; a right step needs no more words.
    if found == _PROVED:
      head += f" {self.laws[-1].text}"
      shown = tuple(x for x in self.laws[:-1] if x.verdict != "proved")
      assumptions = ()
    lines = [
      head,
      *map(_in_words, shown),
      *(f"WiringWarning: {x}" for x in self.warnings),
    ]
    if pairs:
      lines.append(f"Next values: {', '.join(pairs)}.")
    if self.follows:
      named = _next_values.listed([f"output {x}" for x in self.follows])
      lines.append(f"Other outputs that depend on S: {named}.")
    if self.halvings:
      at = f"S / 2**{self.halvings}"
      lines.append(f"The step overflows at its S; it ran at {at}.")
    if not self.deterministic:
      lines.append("Two runs with the same S differ.")
    if assumptions:
      lines.append(
        f"The proof assumes that {len(assumptions)} functions of the library "
        f"do what they promise: {', '.join(assumptions)}."
      )
    return "\n".join(
      textwrap.fill(line, 80, subsequent_indent="  ") for line in lines
    )


def source(line: Line) -> str:
  """Returns a line of a program as its file's name, its number and its text."""
  file, number, code = line
  place = f"{file.rpartition('/')[2]}:{number}"
  return f"{place} `{code}`" if code else place


def _in_words(law: Law) -> str:
  """Returns a law as a paragraph, with the lines that it points at."""
  text = law.text
  for line in map(source, law.where):
    text += "" if line in text else f" See {line}."
  return f"{law.name} ({law.verdict}): {text} {law.remedy}"


def scale_law(
  amaxes: np.ndarray, halvings: np.ndarray, is_rough: bool
) -> Sequence[str]:
  """Returns the scale law for amax, float[runs, members], as S falls.

  From run to run each S is halved as often as `halvings` says, int[members].
  """
  # With float64 gradients, the true amax may be larger than the state can hold.
  most = np.finfo(np.float32).max
  is_usable = np.all((amaxes > 0) & (amaxes < most), axis=0)
  amaxes, halvings = amaxes[:, is_usable], halvings[is_usable]
  slopes = np.log2(amaxes[:-1] / amaxes[1:]) / halvings
  if not slopes.size:
    return NOTHING_SEEN
  for slope, law in _SLOPES.items():
    apart = np.max(np.abs(slopes - slope))
    if apart <= _SLOPE_ROUNDING and slope == 1 and apart:
      return _NEARLY if is_rough else _small_part(amaxes, halvings)
    if apart <= _SLOPE_ROUNDING:
      return law
  worst = slopes.ravel()[np.argmax(np.abs(slopes - 1))]
  return (
    "inconclusive" if is_rough or abs(worst - 1) < 0.5 else "wrong",
    f"The largest gradient is proportional to S^{worst:.2f}.",
    "Either this S is so small that gradients are lost, or something comes "
    f"before `update` that depends on their size, such as a clip. {INSIDE}",
  )


def _small_part(amaxes: np.ndarray, halvings: np.ndarray) -> Sequence[str]:
  """Returns the scale law if a small part of amax does not follow S.

  A part that was added is the same at any S; a solver's errors are not.
  """
  apart = amaxes[:-1] - 2.0**halvings * amaxes[1:]
  # Noise in the last bit is at most this large.
  noise = 2.0**-22 * amaxes[0]
  is_seen = np.min(np.abs(apart), axis=0) > noise
  is_same = np.abs(apart[0] - apart[1]) <= np.abs(apart[0]) / 16 + noise / 2
  return _ADDED if np.any(is_seen & is_same) else _NEARLY


def is_same(a: np.ndarray, b: np.ndarray) -> bool:
  """Returns whether two arrays are equal; NaN equals NaN."""
  return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


def _difference(
  old: np.ndarray, a: np.ndarray, b: np.ndarray
) -> tuple[float, float, float]:
  """Returns three measures of the difference between two updates of a leaf.

  They are the largest difference over the largest update, the median of the
  elements' relative differences, and log2 of the ratio of the updates' sums.
  """
  if is_same(a, b):
    return 0, 0, 0
  if not leaves.is_gradient(a):
    return math.inf, math.inf, math.nan
  old, a, b = map(_wide, (old, a, b))
  # Next to a best value of inf, any difference would be small.
  old = np.where(np.isfinite(old), old, 0)
  first, second, apart = np.abs(a - old), np.abs(b - old), np.abs(a - b)
  size = np.maximum(first, second)
  if not np.all(np.isfinite(apart)):
    return math.inf, math.inf, math.nan
  return (
    np.max(apart) / np.max(size),
    np.median(apart[size > 0] / size[size > 0]),
    np.log2(np.sum(first) / np.sum(second)),
  )


def _wide(x: object) -> np.ndarray:
  """Returns an array in float64, or as wide a complex dtype."""
  return np.asarray(x, np.result_type(x, np.float64))


def _is_one_way(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> bool:
  """Returns whether a leaf moves the same way each time that S is halved.

  A mistake makes it do so. Rounding errors at three S are independent, so the
  difference of the first two and that of the last two point apart.
  """
  first, second = np.ravel(a - b), np.ravel(b - c)
  sizes = np.linalg.norm(first) * np.linalg.norm(second)
  # It is not known if a value is not finite.
  return not np.vdot(first, second).real < _ONE_WAY * sizes


@np.errstate(all="ignore")  # Values may be inf or NaN.
def _compare(values: Sequence[np.ndarray], is_narrow: bool) -> tuple[str, str]:
  """Returns the verdict on a leaf, and how strongly it depends on S."""
  old, first, again, half, quarter, *low = values
  largest, middle, slope = _difference(old, first, half)
  lower, lower_middle, lower_slope = _difference(old, half, quarter)
  noise, *_ = _difference(old, first, again)
  most = max(largest, lower)
  if low and most <= _ROUNDING:
    # An addend of scaled gradients matters more as S falls.
    added, *_ = _difference(old, first, *low)
    if added > 4 * _ROUNDING and added > 64 * noise:
      return "wrong", f" ({100 * added:.2g} % at S/4096)"
  if most == 0:
    return "exact", ""
  like = f" like S^{slope:.2g}" if 0.5 <= abs(slope) < math.inf else ""
  seen = f" ({100 * most:.2g} %{like})" if most < 2 else ""
  if most <= _ROUNDING:
    return "rounding", seen
  # One pair of runs says little about the largest noise in other pairs.
  if 0 < largest <= 64 * noise:
    return "inconclusive", seen
  if not is_narrow:
    return "wrong", seen
  # Rounding errors grow as S shrinks.
  limit = min(_NARROW_ROUNDING, 2 * lower_middle + _ROUNDING)
  is_random = leaves.is_gradient(first) and not _is_one_way(
    _wide(first), _wide(half), _wide(quarter)
  )
  if middle <= limit or is_random:
    return "rounding", seen
  # A mistake grows as a power of S, unlike the rounding errors of float16.
  is_power = like and np.allclose(
    [slope, lower_slope], round(slope), rtol=0, atol=2.0**-4
  )
  return "wrong" if is_power else "inconclusive", seen


@np.errstate(all="ignore")  # Values may be inf or NaN.
def depends(values: Sequence[np.ndarray], is_narrow: bool) -> bool:
  """Returns whether an output differs between values of S, beyond rounding."""
  first, _, half, quarter, *_ = values
  if len({x.shape for x in values}) > 1:
    return True
  if not leaves.is_gradient(first):  # Nothing rounds these.
    same = [is_same(first, x) for x in values]
    return same[1] and not all(same)
  old = np.zeros_like(first)
  verdict, _ = _compare([old, *values], is_narrow=False)
  if not is_narrow or verdict != "wrong":
    return verdict == "wrong"
  # The limit that the law makes of the smaller S says little of one number.
  pairs = (first, half), (half, quarter)
  largest = max(max(_difference(old, *x)[:2]) for x in pairs)
  is_one_way = _is_one_way(*map(_wide, (first, half, quarter)))
  return bool(largest > _NARROW_ROUNDING) and is_one_way


def invariance_law(
  values: Sequence[Mapping[leaves.Path, np.ndarray]],
  doubtful: set[str],
  is_narrow: bool,
) -> Sequence[str]:
  """Returns the invariance law: whether the next values depend on S."""
  named: dict[str, list[str]] = {}
  for path, name in leaves.path_names(values[0]).items():
    # The statistics of FP8 layers follow S, since they see scaled gradients.
    if leaves.overwrites(path):
      continue
    found, seen = _compare([x[path] for x in values], is_narrow)
    if found == "wrong" and _next_values.argument_of(path) in doubtful:
      found = "doubtful"
    named.setdefault(found, []).append(name + seen)
  for found, (verdict, remedy) in _INVARIANCE.items():
    if found in named:
      listed = _next_values.listed(named[found])
      return verdict, f"Updates differ between S and S/2: {listed}.", remedy
  return "exact", "No next value depends on S."


def law_of(name: str, found: Sequence[str], path: str = "") -> Law:
  """Returns a finding as a law, with the path of its S if there are several."""
  return Law(name, found[0], _of(path) + found[1], "".join(found[2:]))


def _of(path: str) -> str:
  return f"Of S at {path}: " if path else ""


def combined(proofs: Sequence[Proved], laws: Sequence[Law]) -> tuple[Law, ...]:
  """Returns each law by the stronger of its proof and its runs."""
  left = list(laws)
  found: list[Law] = []
  holds = all(x.verdict in ("proved", "not applied") for x in proofs)
  # A proof knows nothing of a rule that is stuck, or a `skip` that is set.
  apart = STALLED[1], REQUESTED[1]
  for proof in proofs:
    of_law = [x for x in left if x.name == proof.law and x.text not in apart]
    alike = [x for x in of_law if x.text.startswith(_of(proof.path))]
    run = next(iter(alike or of_law), None)
    if run:
      left.remove(run)
    law = _stronger(proof, run)
    if proof.verdict == "proved" and law.verdict == "wrong" and holds:
      law = law._replace(text=f"{law.text} {_REPORT}")
    # The mistake is the same, so a second remedy would be redundant.
    if law.name == "invariance" and any(x.verdict == "wrong" for x in found):
      law = law._replace(remedy="")
    found.append(law)
  return tuple(sorted(left + found, key=lambda x: _LAWS.index(x.name)))


def _stronger(proof: Proved, run: Law | None) -> Law:
  """Returns the verdict on a law by its proof and, if there were any, runs."""
  name, place = proof.law, _of(proof.path)
  if run and proof.verdict == "not applied":
    return run
  if proof.verdict == "open" and not (run and run.verdict == "wrong"):
    text = f"{place}Not proved, and no run could tell: {proof.text}"
    return Law(name, "inconclusive", text, proof.remedy, proof.where)
  if proof.verdict in ("open", "unknown"):
    text = f"Not proved: {proof.text}"
    if run is None:
      remedy = "Give the step arrays, so that the check also runs it."
      return Law(name, "inconclusive", place + text, remedy, proof.where)
    text = "" if proof.text in run.text else f" {text}"
    return run._replace(text=run.text + text, where=proof.where)
  alone = Law(name, proof.verdict, place + proof.text)
  if proof.verdict == "refuted":
    alone = Law(name, "wrong", alone.text, proof.remedy, proof.where)
  if run is None:
    return alone
  seen = f"{alone.text} In runs: {run.text.removeprefix(place)}"
  if proof.verdict == "proved":
    if run.verdict == "wrong":
      return run
    is_alike = run.verdict == "exact" or CONSTANT[1] in run.text
    return alone if is_alike else alone._replace(text=seen)
  if run.verdict == "wrong":
    return alone._replace(text=seen, remedy=run.remedy or alone.remedy)
  if name == "skip":
    # Equal values may be written in ways that no proof knows.
    text = f"That is not shown to hold, but was not seen to fail. {alone.text}"
    return alone._replace(verdict="inconclusive", text=text)
  # The fate of S does not depend on a batch.
  hides = "" if proof.remedy == RETURNED else " This batch hides it."
  return alone._replace(text=alone.text + hides)


def skip_law(
  outcomes: set[str],
  changed: Sequence[leaves.Path],
  doubtful: set[str],
  names: Mapping[leaves.Path, str],
) -> Sequence[str]:
  """Returns the skip law: whether a step that overflowed changed nothing."""
  if not outcomes:
    return NOTHING_SEEN
  for outcome, law in _NOT_SKIPPED.items():
    if outcome in outcomes:
      return law
  if not changed:
    return "exact", "A step that overflows changes nothing."
  certain = [x for x in changed if _next_values.argument_of(x) not in doubtful]
  listed = _next_values.listed([names[x] for x in certain or changed])
  text = f"A step that overflows changed {listed}."
  return ("wrong", text, MOVES) if certain else ("inconclusive", text, CARRY)


def precision_law(jaxpr: core.Jaxpr) -> tuple[Law, bool]:
  """Returns the precision law, and whether small numbers may be lost."""
  works: set[np.dtype] = set()
  least = jnp.finfo("float32").minexp
  loses = False
  for _, equation, _ in scopes.operations(jaxpr):
    avals: list[object] = [
      x.aval for x in (*equation.invars, *equation.outvars)
    ]
    floats = {x.dtype for x in avals if leaves.is_gradient(x)}
    narrow = {x for x in floats if leaves.at_least_float32(x) != x}
    if equation.primitive.name != "convert_element_type":
      works |= narrow
    loses |= equation.params.get("exponent_bits", 8) < 8
    loses |= any(jnp.finfo(x).minexp > least for x in narrow)
  if not works:
    return Law("precision", *_ALL_WIDE), loses
  listed = ", ".join(sorted(x.name for x in works))
  return Law("precision", "exact", f"It computes in {listed}."), loses
