"""What a check finds, in words: kinds, the record of one, and the report."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import enum
import functools
import textwrap

from optax_lossscale.instruments.step import _next_values

# The most steps to run until a parameter moves.
MOST_STEPS = 64

# The place of an NNX object's next value, for a report.
IN_PLACE = "in place"

# Remedies, and parts of them, that several kinds share.
_INSIDE = (
  "Put anything that needs true gradients inside: loss_scaling(chain, rule)."
)
_WIDE = "check the step with the model in float32, where S must not show."
CARRY = (
  "That is a mistake only if the next values below were guessed right: name "
  "those that are, as in carry={'params': 0, 'opt_state': 1}."
)
_NOT_SCALED = (
  "Either the loss is not scaled by this S: jax.value_and_grad in the place of "
  "ols.scaled_value_and_grad, an S that was read once or outside of the step, "
  "the S of another optimizer (path= says which). Or `update` of loss_scaling "
  "is not given the scaled gradients: ols.unscale, a clip or an optimizer "
  f"before it. {_INSIDE}"
)
_TWICE = "The loss is scaled twice, by ols.scaled_value_and_grad and by hand."
_HIDES = (
  "Something before `update` hides inf and NaN from it, such as "
  "jnp.where(jnp.isfinite(g), g, 0), jnp.nan_to_num or a clip. Take it out: "
  f"`update` skips the step. {_INSIDE}"
)
_PASSED_BY = (
  "Some gradients do not pass through loss_scaling (optax.masked or one group "
  "of a partition around it), something around it takes scaled ones "
  "(MultiSteps, an optimizer, a guard against spikes that is shown their "
  "norm), or something was added to them by hand (weight decay, noise). "
  f"{_INSIDE}"
)
_KEEP = (
  "A skipped step must keep the old values: new = "
  "ols.select_on_skip(opt_state, new, old); in Flax NNX `with "
  "ols.nnx.undo_on_skip(optimizer, model):`; in Flax Linen "
  "ols.linen.TrainState. Optimizers belong inside of loss_scaling. Name "
  "anything that may change anyway in may_change=."
)
_GIVE = (
  "Give `update` the true loss, true gradients (ols.unscale) or flags that do "
  "not depend on S."
)
_RETURN = (
  "Return the parameters and the whole state that the last `update` made, and "
  "leave S to the rule."
)
_REPORT = (
  "But the law was proved: please report this step as a bug of check_step, "
  "unless it reads random numbers or files of the host."
)
_ALONE = "Devices must skip together: loss_scaling(..., axis_name=...)."

# Texts, and parts of them, that several kinds share.
_IS_SCALED = "that `update` is given is S times the true one."
_SCALED = "S times a true one: {why}"
_DIVIDED = "The gradient {name} {grows}, but `update` divides it by what {by}"
_INF = "its inf and NaN, which `update` has to see"
_DIFFER = "Updates differ between S and S/2: {names}."
_CHANGED = "A step that overflows changed {names}."
_HALF = "the parameters that {name} moves stay, but not its optimizer's state"

# A file, the number of a line in it, and the line's text.
Line = tuple[str, int, str]


class _Word(enum.StrEnum):
  """A member that equals its text and is printed as it, and has a rank."""

  # In a program's output, 'wrong' says more than <Verdict.WRONG: 'wrong'>.
  __repr__ = str.__repr__

  @property
  def rank(self) -> int:
    return [*type(self)].index(self)


class Verdict(_Word):
  """What is known of a law, worst first."""

  # Inside of a proof: refuted; open, which no run could tell; or unknown, which
  # runs decide. A report has only the others.
  REFUTED = "refuted"
  OPEN = "open"
  UNKNOWN = "unknown"
  WRONG = "wrong"
  INCONCLUSIVE = "inconclusive"
  ROUNDING = "rounding"
  EXACT = "exact"
  PROVED = "proved"
  NOT_APPLIED = "not applied"

  def of(
    self, text: str, remedy: str = "", in_every_batch: bool = False
  ) -> tuple[object, ...]:
    """Returns the value of a `Kind` with this verdict."""
    return self, text, remedy, in_every_batch


class LawName(_Word):
  """The laws, in the order of a report."""

  SCALE = "scale"
  ARGUMENTS = "arguments"
  INVARIANCE = "invariance"
  SKIP = "skip"
  PRECISION = "precision"


_refuted, _open = Verdict.REFUTED.of, Verdict.OPEN.of
_unknown, _unclear = Verdict.UNKNOWN.of, Verdict.INCONCLUSIVE.of
_wrong, _moot = Verdict.WRONG.of, Verdict.NOT_APPLIED.of
_proved, _exact = Verdict.PROVED.of, Verdict.EXACT.of
_rounding = Verdict.ROUNDING.of
# What the rule makes of S, or returns, does not depend on a batch.
_returned = functools.partial(_refuted, remedy=_RETURN, in_every_batch=True)


@enum.unique
class Kind(enum.Enum):
  """Everything that a proof or a run can find."""

  def __init__(
    self, verdict: Verdict, text: str, remedy: str, in_every_batch: bool
  ) -> None:
    # `found` may be told another verdict.
    self.verdict = verdict
    # What is found, with fields for names. That of a problem in a proof has no
    # period, since `worst` counts the others behind it.
    self.text = text
    # The mistakes that look like this, and how to fix them.
    self.remedy = remedy
    self.in_every_batch = in_every_batch

  def __repr__(self) -> str:
    return str(self)

  # The scale law in a proof.
  GRADIENT_IS_SCALED = _proved("The gradient " + _IS_SCALED)
  GRADIENTS_ARE_SCALED = _proved("Each of the {count} gradients " + _IS_SCALED)
  NO_POWER = _refuted("The gradient {name} is not " + _SCALED, _INSIDE)
  OPEN_POWER = _unknown("The gradient {name} may not be " + _SCALED, _INSIDE)
  OTHER_POWER = _refuted(_DIVIDED, _NOT_SCALED)
  SCALED_TWICE = _refuted(_DIVIDED, _TWICE)
  INF_LOST = _refuted("The gradient {name} has lost " + _INF, _HIDES)
  INF_MAYBE_LOST = _unknown(
    "The gradient {name} may have lost " + _INF,
    "Find an overflow before that, and tell `update` of it: update(..., "
    "overflow=~jnp.isfinite(optax.tree.norm(scaled_grads))).",
  )
  DROPPED = _refuted(
    "The gradient {name} leaves out micro-batches, which `overflow=` must say",
    "`accumulate(..., drop=True)` returns what it left out: "
    "update(..., overflow=overflow).",
  )
  NO_UPDATE = _unknown("`update` of loss_scaling does not run.")
  UPDATE_REWRITTEN = _unknown(
    "`update` of loss_scaling is inside a function that rewrites it, such as "
    "`autocast`; give that function the loss function alone."
  )

  # The scale law in runs.
  PROPORTIONAL = _exact("The largest gradient is proportional to S.")
  NEARLY = _rounding("The largest gradient is nearly proportional to S.")
  UNRELATED = _wrong("The largest gradient does not depend on S.", _NOT_SCALED)
  SQUARED = _wrong("The largest gradient is proportional to S squared.", _TWICE)
  PART_ADDED = _wrong(
    "The largest gradient is proportional to S but for a small part.",
    f"Something is added before `update` (weight decay, noise). {_INSIDE}",
  )
  ODD_POWER = _wrong(
    "The largest gradient is proportional to S^{power:.2f}.",
    "Either this S is so small that gradients are lost, or something comes "
    f"before `update` that depends on their size, such as a clip. {_INSIDE}",
  )
  OVERFLOWS = _unclear(
    "The step overflows at this S and at smaller ones.",
    "Take another batch, or see where this one overflows: "
    "ols.instruments.where_overflow.",
  )
  REQUESTED = _unclear(
    "`skip` skipped the step, so nothing could be compared.",
    "Take a batch, or a state, with which the step is applied.",
  )
  STALLED = _wrong(
    "The step overflows at this S, and the rule cannot lower it.",
    "Every such step is skipped. Take a smaller S, or a rule that moves it.",
  )
  NOTHING_SEEN = _unclear(
    "`update` of loss_scaling did not run, or all gradients are 0.",
    "Take another batch, or a step in which it runs, and return the state that "
    "`update` returns. optax.MultiSteps belongs inside of loss_scaling.",
  )
  SWITCHED_OFF = _moot("Loss scaling is switched off.")
  CONSTANT = _moot("S is a fixed 1, and the loss is not scaled by it.")
  SET_ASIDE = _moot(
    "The step sets this S aside, as a schedule does in full precision."
  )

  # The other arguments of `update`.
  ARGUMENTS_ARE_FREE = _proved(
    "No argument of `update` but the gradients depends on S."
  )
  ARGUMENT_DEPENDS = _refuted("`{name}=` depends on S: {why}", _GIVE)
  ARGUMENT_MAY_DEPEND = _unknown("`{name}=` may depend on S: {why}", _GIVE)

  # The invariance law in a proof.
  VALUES_ARE_FREE = _proved("None of {count} next values depends on S.")
  VALUE_DEPENDS = _refuted("{name} depends on S: {why}", _PASSED_BY)
  VALUE_MAY_DEPEND = _unknown("{name} may depend on S: {why}", _PASSED_BY)
  OLD_RETURNED = _returned("A step that is applied returns the old {name}")
  S_FOREIGN = _returned("The next S{of} is not what the rule makes of this one")
  S_OF_ANOTHER = _returned("The next S{of} is that of {other}")
  S_NEVER_MOVES = _returned("The next S{of} is the old one, so S never moves")
  S_NOT_TOLD = _returned(
    "The next S{of} is the rule's only where the gradients are finite"
  )
  S_CHOSEN = _open(
    "The next S{of} is the rule's or the old one, by a condition", _RETURN
  )
  S_MISSES_UPDATE = _returned(
    "The next S{of} knows nothing of an `update` whose state is lost"
  )
  S_CANNOT_FALL = _returned(
    "The next S{of} is the old one if the step is skipped, so S cannot fall"
  )
  DEVICES_MIXED = _refuted(
    "{name} mixes the gradients of all devices along {axis!r}, and each device "
    "skips for itself",
    _ALONE,
  )
  DEVICES_MAY_DIFFER = _open(
    "{name} is returned as one, but may differ along {axis!r}", _ALONE
  )

  # The invariance law in runs.
  VALUES_ARE_EQUAL = _exact("No next value depends on S.")
  DIFFER = _wrong(_DIFFER, _PASSED_BY)
  GUESSED_DIFFER = _unclear(_DIFFER, CARRY)
  MAY_DIFFER = _unclear(_DIFFER, f"That may be rounding or not: {_WIDE}")
  NEARLY_EQUAL = _rounding(
    _DIFFER, f"A smaller mistake would hide in that: {_WIDE}"
  )
  NOT_COMPARED = _unclear(
    "No output was found to be the next value of the parameters.",
    "Name it, as in carry={'params': 0, 'opt_state': 1}.",
  )
  NOTHING_MOVES = _unclear(
    f"No parameter moves in {MOST_STEPS} steps.",
    "Check a step whose rate is not 0, of fewer that are accumulated, and "
    "whose updates the parameters' dtype can hold.",
  )

  # The skip law in a proof.
  KEPT = _proved("If `update` sees an overflow, all {count} next values stay.")
  MAY_CHANGE = _refuted("If the step is skipped, {name} may change", _KEEP)
  MAY_CHANGE_THOUGH = _refuted(
    "If the step is skipped, {name} may change, though {other} skips", _KEEP
  )
  INF_UNSEEN = _open(
    "{name} may take inf from gradients that no `update` sees", _PASSED_BY
  )
  HALF_BY_ANOTHER = _refuted(
    "If only {other} skips, " + _HALF,
    "A skip must undo only the step of its own state. Or let both skip: give "
    "each `update` an overflow= that says whether any gradient overflows.",
  )
  HALF_BY_ONE = _refuted(
    "If only one of {count} updates of a step is skipped, " + _HALF,
    "Keep the old values once for each `update`: with a select_on_skip behind "
    "it, or in NNX an undo_on_skip around it.",
  )
  SKIPS_UNSEEN = _open(
    "With rule=None the check does not look at what a `skip` keeps.",
    "Check the step with FixedLossScale(1.0), whose skips it looks at.",
  )

  # The skip law in runs.
  NOTHING_CHANGED = _exact("A step that overflows changes nothing.")
  CHANGED = _wrong(_CHANGED, _KEEP)
  GUESSED_CHANGED = _unclear(_CHANGED, CARRY)
  INF_APPLIED = _wrong("A step whose gradients overflow was applied.", _HIDES)
  TAKEN_BACK = _wrong(
    "The step with an S of inf was not skipped.",
    "Something around loss_scaling, such as optax.apply_if_finite, took the "
    "step back and S with it: S can never come down. It belongs inside.",
  )
  INF_STAYS = _wrong("A skipped step does not change an S of inf.", _RETURN)
  SKIPPED_BY_HALF = _unclear(
    "The step makes several updates and skipped only some of them.",
    "Check one of them alone, such as the body of the scan.",
  )
  NEVER_SKIPS = _moot("The rule has skip=False, so that overflows are applied.")

  # The precision law.
  WORKS_BELOW = _exact("It computes in {dtypes}.")
  ALL_WIDE = _moot(
    "Nothing in the step works below float32.",
    "If that is not meant, loss scaling has nothing to save: "
    'ols.autocast(loss_fn, "O1") or dtype=jnp.float16 is missing.',
  )
  UNSCALED = _unclear(
    "It computes in less range than float32, without loss scaling.",
    "Small gradients become 0. Give `loss_scaling` a rule in the place of "
    "None, or compute in bfloat16.",
  )
  NO_TRACE = _moot("JAX cannot trace the step ({error}), and so not see it.")

  # All laws but that of precision.
  NO_PROOF = _unknown("The proof failed ({error}); please report this step.")


_HOLDS = Verdict.PROVED, Verdict.NOT_APPLIED


@dataclasses.dataclass(frozen=True)
class Law:
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
    kind: the member of an enum that stands for what was found; unlike `text`,
      it is the same for all steps with the same mistake.
    path: the state of loss scaling that it is about, if the step has several.
  """

  name: LawName
  verdict: Verdict
  text: str
  remedy: str = ""
  where: tuple[tuple[str, int, str], ...] = ()
  _: dataclasses.KW_ONLY
  kind: Kind
  path: str = ""


def found(
  kind: Kind,
  law: LawName,
  /,
  verdict: Verdict | None = None,
  where: tuple[Line, ...] = (),
  path: str = "",
  **names: object,
) -> Law:
  """Returns a finding on a law; the names go into its text."""
  verdict, text = verdict or kind.verdict, kind.text.format(**names)
  return Law(law, verdict, text, kind.remedy, where, kind=kind, path=path)


def worst(problems: Iterable[Law], holds: Law) -> Law:
  """Returns the first of the worst problems, or `holds` if there is none."""
  problems = list(problems)
  if not problems:
    return holds
  first = min(problems, key=lambda x: x.verdict.rank)
  more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
  text = f"{first.text}{more}."
  return dataclasses.replace(first, text=text, path=holds.path)


def all_hold(laws: Iterable[Law]) -> bool:
  return all(x.verdict in _HOLDS for x in laws)


def combined(proofs: Sequence[Law], runs: Iterable[Law]) -> tuple[Law, ...]:
  """Returns each law by the stronger of its proof and its runs."""
  left = list(runs)
  laws: list[Law] = []
  for proof in proofs:
    run = _run_of(proof, left)
    if run:
      left.remove(run)
    law = _stronger(proof, run)
    is_wrong = law.verdict is Verdict.WRONG
    if is_wrong and proof.verdict is Verdict.PROVED and all_hold(proofs):
      law = dataclasses.replace(law, text=f"{law.text} {_REPORT}")
    # The mistake is the same, so a second remedy would be redundant.
    is_second = any(x.verdict is Verdict.WRONG for x in laws)
    if law.name is LawName.INVARIANCE and is_second:
      law = dataclasses.replace(law, remedy="")
    laws.append(law)
  # Until now the texts were parts of others.
  placed = [dataclasses.replace(x, text=_placed(x)) for x in (*left, *laws)]
  return tuple(sorted(placed, key=lambda x: x.name.rank))


def _placed(law: Law) -> str:
  return f"Of S at {law.path}: {law.text}" if law.path else law.text


def _run_of(proof: Law, runs: Sequence[Law]) -> Law | None:
  """Returns what runs found of a law, of the same S if possible."""
  # A proof knows nothing of a rule that is stuck, or a `skip` that is set.
  apart = Kind.STALLED, Kind.REQUESTED
  of_law = [x for x in runs if x.name is proof.name and x.kind not in apart]
  alike = [x for x in of_law if proof.path in ("", x.path)]
  return next(iter(alike or of_law), None)


def _stronger(proof: Law, run: Law | None) -> Law:
  """Returns the verdict on a law by its proof and, if there were any, runs."""
  is_wrong = run is not None and run.verdict is Verdict.WRONG
  if run is None or (proof.verdict is Verdict.OPEN and not is_wrong):
    return _alone(proof)
  if proof.verdict is Verdict.NOT_APPLIED:
    return run
  if proof.verdict in (Verdict.OPEN, Verdict.UNKNOWN):
    more = "" if proof.kind is run.kind else f" Not proved: {proof.text}"
    return dataclasses.replace(run, text=run.text + more, where=proof.where)
  seen = run.text if run.path == proof.path else _placed(run)
  text = f"{proof.text} In runs: {seen}"
  if proof.verdict is Verdict.PROVED:
    is_alike = run.verdict is Verdict.EXACT or run.kind is Kind.CONSTANT
    both = proof if is_alike else dataclasses.replace(proof, text=text)
    return run if is_wrong else both
  remedy = run.remedy or proof.remedy
  both = dataclasses.replace(proof, text=text, remedy=remedy)
  return _alone(both) if is_wrong else _hidden(proof)


def _alone(proof: Law) -> Law:
  """Returns the verdict on a law by its proof, which no run contradicts."""
  verdict, text, remedy = Verdict.INCONCLUSIVE, proof.text, proof.remedy
  if proof.verdict is Verdict.REFUTED:
    verdict = Verdict.WRONG
  elif proof.verdict is Verdict.OPEN:
    text = f"Not proved, and no run could tell: {text}"
  elif proof.verdict is Verdict.UNKNOWN:
    text = f"Not proved: {text}"
    remedy = "Give the step arrays, so that the check also runs it."
  else:
    return proof
  return dataclasses.replace(proof, verdict=verdict, text=text, remedy=remedy)


def _hidden(proof: Law) -> Law:
  """Returns the verdict on a law that is refuted, but held in runs."""
  verdict, text = Verdict.WRONG, proof.text
  if proof.name is LawName.SKIP:
    # Equal values may be written in ways that no proof knows.
    verdict = Verdict.INCONCLUSIVE
    text = f"That is not shown to hold, but was not seen to fail. {text}"
  elif not proof.kind.in_every_batch:
    text = f"{text} This batch hides it."
  return dataclasses.replace(proof, verdict=verdict, text=text)


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
    return any(law.verdict is Verdict.WRONG for law in self.laws)

  @property
  def ok(self) -> bool:
    """True if every law that applies holds, and nothing is left to clear up.

    A law that is inconclusive, or a warning, makes it False.
    """
    unclear = Verdict.WRONG, Verdict.INCONCLUSIVE
    return not (self.warnings or any(x.verdict in unclear for x in self.laws))

  def raise_if_wrong(self) -> None:
    """Raises a ValueError with the report as its text if a law is broken."""
    if self._is_wrong:
      raise ValueError(str(self))

  def __str__(self) -> str:
    head = f"The loss scaling of this step is {self._in_short()}."
    shown, assumptions = self.laws, self.assumptions
    # Whoever asks has the proof in `laws`; a right step needs no more words.
    if self._is_proved and not self._has(Kind.ALL_WIDE):
      head += f" {self.laws[-1].text}"
      shown = tuple(x for x in shown[:-1] if x.verdict is not Verdict.PROVED)
      assumptions = ()
    lines = [
      head,
      *map(_in_words, shown),
      *(f"WiringWarning: {x}" for x in self.warnings),
      *self._notes(),
    ]
    if assumptions:
      lines.append(
        f"The proof assumes that {len(assumptions)} functions of the library "
        f"do what they promise: {', '.join(assumptions)}."
      )
    return "\n".join(
      textwrap.fill(line, 80, subsequent_indent="  ") for line in lines
    )

  @property
  def _is_proved(self) -> bool:
    """Whether no run is needed to know that the step is right."""
    laws = [x for x in self.laws if x.name is not LawName.PRECISION]
    is_proved = any(x.verdict is Verdict.PROVED for x in laws)
    return self.ok and is_proved and all_hold(laws) and self.deterministic

  def _has(self, kind: Kind) -> bool:
    return any(x.kind is kind for x in self.laws)

  def _in_short(self) -> str:
    """Returns the verdict on the whole step."""
    if not self.ok:
      return "wrong" if self._is_wrong else "not certain"
    text = "right, for all values" if self._is_proved else "right"
    if any(x.verdict is Verdict.ROUNDING for x in self.laws):
      text = "right, as far as rounding can tell"
    if self._has(Kind.ALL_WIDE):
      text += ", but nothing in it works below float32"
    if self._has(Kind.NO_TRACE):
      text += ", but jit cannot compile it"
    return text

  def _notes(self) -> Iterator[str]:
    pairs = [
      f"{x} {y}" if y == IN_PLACE else f"{x} from output {y or 0}"
      for x, y in self.next_values.items()
    ]
    if pairs:
      yield f"Next values: {', '.join(pairs)}."
    if self.follows:
      named = _next_values.listed([f"output {x}" for x in self.follows])
      yield f"Other outputs that depend on S: {named}."
    if self.halvings:
      at = f"S / 2**{self.halvings}"
      yield f"The step overflows at its S; it ran at {at}."
    if not self.deterministic:
      yield "Two runs with the same S differ."


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
