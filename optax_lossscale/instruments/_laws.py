"""The laws of a correct step, tested by running it."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import copy
import dataclasses
import fnmatch
import inspect
import math
import sys
import textwrap
from typing import Any
from typing import NamedTuple
from typing import TypeGuard
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import wiring
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale._step import states
from optax_lossscale.instruments import _history

# How many times S may be halved until the step does not overflow.
_MOST_HALVINGS = 40

# The most steps to run until a parameter moves, and the number of steps after
# which parameters that have not moved are taken to be frozen.
_MOST_STEPS = 64
_MORE_STEPS = 8

# How far the updates at two values of S may differ. If everything is as wide as
# float32 or wider, the limit applies to the largest element, since powers of
# two are exact there. In float16 it applies to the median element, since a
# smaller S loses low bits and small gradients. In correct steps of an MLP, an
# LSTM and a transformer at O1, O2 and O3, with SGD and Adam, the difference was
# at most 1e-4 for S of 2**15 or more, and 7e-3 for S of 2**6 or more.
_ROUNDING = 2.0**-20
_NARROW_ROUNDING = 2.0**-6

# How closely log2(amax) must follow log2(S).
_SLOPE_ROUNDING = 2.0**-6

# For states that also count skipped steps, the fields that a skip must keep.
_KEPT = {
  states.LossScalingState: ("inner_state", "applied_steps"),
  _history.RecordState: ("recorded_state",),
  # Around loss scaling, `inject_hyperparams` also counts skipped steps.
  optax.InjectStatefulHyperparamsState: ("inner_state",),
}
# linen.TrainState counts all steps here, including skipped ones.
_ATTEMPTS = (jax.tree_util.GetAttrKey("attempts"),)

# JAX's caches depend on this value.
_traced_anew = jax.make_user_context(None)

# How many leaves a line of the report names.
_MOST_NAMED = 4

_RETURN = (
  "it must be an argument, and its next value be returned, unless an "
  "nnx.Optimizer holds it"
)
_INSIDE = (
  "Put anything that needs true gradients inside: loss_scaling(chain, rule)."
)
_WIDE = "check the step with the model in float32, where S must not show."
_CARRY = (
  "That is a mistake only if the next values below were guessed right: name "
  "those that are, as in carry={'params': 0, 'opt_state': 1}."
)

# The scale law by the power of S that amax follows: verdict, text and remedy.
_SLOPES = {
  1: ("exact", "The largest gradient is proportional to S."),
  0: (
    "wrong",
    "The largest gradient does not depend on S.",
    "Either the loss is not scaled by this S: jax.value_and_grad in the place "
    "of ols.scaled_value_and_grad, an S that was read once or outside of the "
    "step, the S of another optimizer (path= says which). Or `update` of "
    "loss_scaling is not given the scaled gradients: "
    f"ols.unscale, a clip or an optimizer before it. {_INSIDE}",
  ),
  2: (
    "wrong",
    "The largest gradient is proportional to S squared.",
    "The loss is scaled twice, by ols.scaled_value_and_grad and by hand.",
  ),
}
_NEARLY = ("rounding", "The largest gradient is nearly proportional to S.")
_ADDED = (
  "wrong",
  "The largest gradient is proportional to S but for a small part.",
  f"Something is added before `update` (weight decay, noise). {_INSIDE}",
)
_OVERFLOWS = (
  "inconclusive",
  "The step overflows at this S and at smaller ones.",
  "Take another batch, or see where this one overflows: "
  "ols.instruments.where_overflow.",
)
_REQUESTED = (
  "inconclusive",
  "`skip` skipped the step, so nothing could be compared.",
  "Take a batch, or a state, with which the step is applied.",
)
_STALLED = (
  "wrong",
  "The step overflows at this S, and the rule cannot lower it.",
  "Every such step is skipped. Take a smaller S, or a rule that moves it.",
)
_NOTHING_SEEN = (
  "inconclusive",
  "`update` of loss_scaling did not run, or all gradients are 0.",
  "Take another batch, or a step in which it runs, and return the state that "
  "`update` returns. optax.MultiSteps belongs inside of loss_scaling.",
)
_NOT_COMPARED = (
  "inconclusive",
  "No output was found to be the next value of the parameters.",
  "Name it, as in carry={'params': 0, 'opt_state': 1}.",
)
_STILL = (
  "inconclusive",
  f"No parameter moves in {_MOST_STEPS} steps.",
  "Check a step whose rate is not 0, of fewer that are accumulated, and whose "
  "updates the parameters' dtype can hold.",
)
_SWITCHED_OFF = ("not applied", "Loss scaling is switched off.")
_SET_ASIDE = (
  "not applied",
  "The step sets this S aside, as a schedule does in full precision.",
)

# Verdict and remedy of the invariance law, by the verdict on the worst leaf.
_INVARIANCE = {
  "wrong": (
    "wrong",
    "Some gradients do not pass through loss_scaling (optax.masked or one "
    "group of a partition around it), something around it takes scaled ones "
    "(MultiSteps, an optimizer, a SpikeGuard that is shown their norm), or "
    f"something was added to them by hand (weight decay, noise). {_INSIDE}",
  ),
  "doubtful": ("inconclusive", _CARRY),
  "inconclusive": ("inconclusive", f"That may be rounding or not: {_WIDE}"),
  "rounding": ("rounding", f"A smaller mistake would hide in that: {_WIDE}"),
}

# The skip law, by the outcome of a step with an S of inf, worst first.
_NOT_SKIPPED = {
  "nothing": (
    "wrong",
    "The step with an S of inf was not skipped.",
    "Something around loss_scaling, such as optax.apply_if_finite, took the "
    "step back and S with it: S can never come down. It belongs inside.",
  ),
  "several": (
    "inconclusive",
    "The step makes several updates and skipped only some of them.",
    "Check one of them alone, such as the body of the scan.",
  ),
  "overflow": (
    "not applied",
    "The rule has skip=False, so that overflows are applied.",
  ),
  "applied": _SET_ASIDE,
}
_MOVES = (
  "A skipped step must keep the old values: new = "
  "ols.select_on_skip(opt_state, new, old); in Flax NNX `with "
  "ols.nnx.undo_on_skip(optimizer, model):`; in Flax Linen "
  "ols.linen.TrainState. Optimizers belong inside of loss_scaling. Name "
  "anything that may change anyway in may_change=."
)
# Where an NNX object's next value is, for a report.
_IN_PLACE = "in place"
_ALL_WIDE = (
  "not applied",
  "Nothing in the step works below float32.",
  "If that is not meant, loss scaling has nothing to save: "
  'ols.autocast(loss_fn, "O1") or dtype=jnp.float16 is missing.',
)


class Law(NamedTuple):
  """One law, and whether a step obeys it.

  Attributes:
    name: "scale", "invariance", "skip" or "precision".
    verdict: "exact"; "rounding", if the law holds up to rounding; "wrong";
      "inconclusive"; or "not applied", if the law does not apply to the step.
      The test is the report's `ok`: "proved", a verdict above "exact", is
      reserved for laws that a later version proves for all values.
    text: what the check saw.
    remedy: the mistakes that look like this, and how to fix them.
  """

  name: str
  verdict: str
  text: str
  remedy: str = ""


# A step as a function of its arguments by name.
_Step = Callable[[Mapping[str, object]], object]
# Leads from arguments, by name or position, to the outputs of a step.
_Carry = Mapping[Any, int | str]


@dataclasses.dataclass(frozen=True)
class StepReport:
  """The findings of `check_step`; print it to read them.

  Attributes:
    laws: the laws, each with its verdict. With several loss scales, the first
      two laws come once for each scale.
    next_values: for each argument, the output that counts as its next value;
      "in place" for an NNX object, which the step changes.
    follows: the other outputs that depend on S, such as a norm of scaled
      gradients. Such a norm is fine unless it is used as the true norm.
    deterministic: whether two runs with the same S gave the same values.
    halvings: how often S was halved until the step did not overflow.
    warnings: the text of each `WiringWarning` that the step raised while it was
      traced, unless a filter of yours ignores it.
  """

  laws: tuple[Law, ...]
  next_values: Mapping[str, str]
  follows: tuple[str, ...] = ()
  deterministic: bool = True
  halvings: int = 0
  warnings: tuple[str, ...] = ()

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
    if self.ok and any(law.verdict == "rounding" for law in self.laws):
      found = "right, as far as rounding can tell"
    if self.ok and any(law.text == _ALL_WIDE[1] for law in self.laws):
      found += ", but nothing in it works below float32"
    pairs = [
      f"{x} {y}" if y == _IN_PLACE else f"{x} from output {y or 0}"
      for x, y in self.next_values.items()
    ]
    lines = [
      f"The step is {found}.",
      *(f"{x.name} ({x.verdict}): {x.text} {x.remedy}" for x in self.laws),
      *(f"WiringWarning: {x}" for x in self.warnings),
      f"Next values: {', '.join(pairs)}.",
    ]
    if self.follows:
      named = _listed([f"output {x}" for x in self.follows])
      lines += [f"Other outputs that depend on S: {named}."]
    if self.halvings:
      lines += [
        f"The step overflows at its S; it ran at S / 2**{self.halvings}."
      ]
    if not self.deterministic:
      lines += ["Two runs with the same S differ."]
    return "\n".join(
      textwrap.fill(line, 80, subsequent_indent="  ") for line in lines
    )


def check_step(
  step: Callable[..., Any],
  *args: object,
  carry: _Carry | None = None,
  may_change: Sequence[str] = (),
) -> StepReport:
  """Checks whether a train step treats the loss scale correctly.

  Most mistakes with loss scaling are silent: the run does not learn, or learns
  something else, and no number looks wrong. But nearly all of them break one of
  these laws when the step runs on one batch with S, S/2 and S/4, and once with
  an S of inf:

  - scale: the largest scaled gradient is proportional to S.
  - invariance: no next value (parameters, the optimizer's state, counters,
    statistics) depends on S.
  - skip: a step that overflows changes nothing but the loss scaling's state.
  - precision: some operation works below float32; otherwise loss scaling has no
    use. This law is only reported and never makes a step wrong.

  Call it outside of jit, once before a long run and in your own tests. The step
  may be jitted or not, and may use several devices of one process. Each run
  gets copies of the arguments, so the step may donate them. The next values of
  up to seven runs are kept on the host. If the step overflows at S, the check
  halves S until it does not. If the first step moves no parameter, as at a
  learning rate of 0, it runs up to 64 more and judges those that move one.

  It cannot detect mistakes that do not depend on S, such as wrong data, nor a
  step that skips on NaN but not on inf. In float16 a small mistake, such as
  weight decay added by hand, hides in the rounding; check in float32, too.

  Args:
    step: the train step, which returns the next values of its arguments, or
      changes them in place if they are Flax NNX objects. `optimizer.step` may
      count skipped steps, as it does in Flax.
    *args: its arguments, including the state of `loss_scaling`, or an
      `nnx.Optimizer` that holds it. Bind any keyword-only arguments first, as
      in `functools.partial(train_step, train=True)`.
    carry: which output is the next value of each argument, such as
      `{"params": 0, "opt_state": "1/opt"}`, with arguments by name or position
      and outputs by position, key or path. By default, the first output of the
      same structure, shapes and dtypes; single numbers are not matched. It must
      be None with NNX objects, since each is its own next value.
    may_change: the names, as in the report, of values that may depend on S or
      change on a skip. Patterns such as "*/rngs/*" also work.

  Returns:
    The report. Print it, check that it is `ok`, or call `raise_if_wrong()`.

  Raises:
    TypeError: if `step` is not callable or needs an argument by keyword, if
      this is called under jit, or if the state of the rule does not hold S as a
      leaf.
    ValueError: if no argument holds the state of `loss_scaling`, if its next
      value is not returned, or if `carry` does not name it or is not None for
      NNX objects.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())
    >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
    >>> @jax.jit
    ... def train_step(params, opt_state, x):
    ...   grads = jax.grad(loss_fn)(params, x)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state
    >>> params = jnp.ones(2)
    >>> report = ols.instruments.check_step(
    ...   train_step, params, tx.init(params), jnp.eye(2)
    ... )
    >>> print(report.laws[0].text)
    The largest gradient does not depend on S.
  """
  run, named = _bind(step, args)
  known: dict[str, str] = {}
  # Objects of Flax NNX exist only in a program that has imported it.
  if "flax.nnx" in sys.modules:
    from optax_lossscale.instruments import _nnx_step

    run, named, known = _nnx_step.returning(run, named)
  if known and carry:
    raise ValueError(
      "`carry` must be None with Flax NNX objects, since each is its own next "
      f"value, got {arguments.shown(carry)}."
    )
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(named)):
    raise TypeError(
      "`check_step` must be called outside of jit, got traced arguments; give "
      "it the jitted step: check_step(train_step, params, opt_state, batch)."
    )
  if not states.find_states(named):
    raise ValueError(
      "`step` must be given the state of loss_scaling, got none among its "
      f"arguments {', '.join(named) or '(no arguments)'}; {_RETURN}."
    )
  runs = _Runs(run, named, carry or None, may_change, known)
  caught: list[warnings.WarningMessage] = []
  try:
    # The check itself does things that a program may forbid in its steps.
    with (
      jax.debug_nans(False),
      jax.debug_infs(False),
      jax.transfer_guard("allow"),
      warnings.catch_warnings(record=True) as caught,
    ):
      report = _report(runs)
  finally:
    for x in caught:
      warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)
  texts = [
    str(x.message)
    for x in caught
    if issubclass(x.category, wiring.WiringWarning)
  ]
  return dataclasses.replace(report, warnings=tuple(dict.fromkeys(texts)))


def _report(runs: "_Runs") -> StepReport:
  """Returns the report on the first step that moves the parameters."""
  precision, is_narrow = _precision(runs.run, runs.named)
  if not runs.paths:
    return StepReport((Law("scale", *_SWITCHED_OFF), precision), {})
  report, found = _judge(runs, precision, is_narrow)
  # A parameter that does not move, as at a learning rate of 0, hides mistakes.
  seen: set[str] = set()
  for count in range(_MOST_STEPS):
    seen |= runs.moved(found)
    # Some parameters may be frozen and never move.
    is_late = seen and count >= _MORE_STEPS
    if is_late or seen >= {*runs.parameters()} or not report.ok:
      return report
    runs = runs.after(found)
    found = runs.at({})
    if runs.moved(found) - seen:
      later, _ = _judge(runs, precision, is_narrow)
      halvings = report.halvings + later.halvings
      report = dataclasses.replace(later, halvings=halvings)
  if runs.moved(found):
    return report
  laws = (Law("invariance", *_STILL), *report.laws)
  return dataclasses.replace(report, laws=laws)


def _judge(
  runs: "_Runs", precision: Law, is_narrow: bool
) -> tuple[StepReport, "_Run"]:
  """Returns the report on a single step, and the step's outputs."""
  for halvings in range(_MOST_HALVINGS + 1):
    factors = dict.fromkeys(runs.paths, 0.5**halvings)
    first = runs.at(factors)
    if not halvings:
      is_stalled = any(
        np.any(x.stalled & x.skipped) for x in first.states.values()
      )
    is_requested = "requested" in first.outcomes.values()
    if is_requested or not first.overflows:
      break
  if first.overflows:
    reason = _REQUESTED if is_requested else _OVERFLOWS
    laws = (Law("scale", *reason), precision)
    return runs.report(laws), first
  again = runs.at(factors)
  is_repeatable = not _differing(first.watched, again.watched)
  # Tests the skip after a clean step, since a momentum of 0 may stay 0 anyway.
  later = runs.after(first)
  clean = later.at(factors)
  infinite = later.at(dict.fromkeys(factors, math.inf))
  changed = _differing(later.before, infinite.watched)
  doubtful: set[str] = set()
  if not runs.carry:
    doubtful = _doubtful(later, clean, infinite, changed) - runs.known.keys()

  found = [Law("scale", *_STALLED)] if is_stalled else []
  follows: dict[str, None] = {}
  for path in first.outcomes:
    half, quarter = (
      runs.at(factors | {path: share * factors[path]}) for share in (0.5, 0.25)
    )
    scale = _scale_law(
      np.array([np.ravel(x.states[path].amax) for x in (first, half, quarter)]),
      is_narrow or not is_repeatable,
    )
    several = (first, again, half, quarter)
    values = [runs.before, *(x.watched for x in several)]
    # The scale law reveals a solver that rounds in its own way.
    is_rounded = is_narrow or scale[0] == "rounding"
    invariance = _invariance_law(values, doubtful, is_rounded)
    if not runs.parameters():
      invariance = _NOT_COMPARED
    if half.overflows or quarter.overflows:
      scale = invariance = _OVERFLOWS
    elif infinite.outcomes[path] == "applied":
      scale = _SET_ASIDE
    elif first.outcomes[path] == "nothing":
      scale = _NOTHING_SEEN
    elif scale[0] == "wrong" and _argument(path) in doubtful:
      scale = ("inconclusive", scale[1], _CARRY)
    elif scale[0] == "wrong":
      # The mistake is the same, so a second remedy would be redundant.
      invariance = invariance[:2]
    place = f"Of S at {path}: " if len(first.outcomes) > 1 else ""
    for name, law in (("scale", scale), ("invariance", invariance)):
      found += [Law(name, law[0], place + law[1], *law[2:])]
    follows |= dict.fromkeys(_differing(first.others, half.others))
  outcomes = {
    outcome
    for path, outcome in infinite.outcomes.items()
    if clean.outcomes[path] != "nothing"
  }
  found += [Law("skip", *_skip_law(outcomes, changed, doubtful)), precision]
  return runs.report(found, follows, is_repeatable, halvings), first


def _bind(
  step: Callable[..., Any], args: tuple[object, ...]
) -> tuple[_Step, dict[str, object]]:
  """Returns `step` as a function of a dict of arguments, and that dict."""
  if not callable(step):
    raise TypeError(
      "`step` must be the train step itself, got a "
      f"{arguments.kind_of(step)}; its arguments come after it: "
      "check_step(train_step, params, opt_state, batch)."
    )
  arguments.check_by_position(step, "step")
  parameters = inspect.signature(step).parameters.values()
  names = [x.name for x in parameters if x.kind < x.VAR_POSITIONAL]
  # Arguments that the step takes as *args are named by their position.
  names = [*names, *map(str, range(len(names), len(args)))][: len(args)]

  def call(named: Mapping[str, object]) -> object:
    return step(*(named[name] for name in names))

  return call, dict(zip(names, args, strict=True))


class _Run(NamedTuple):
  """The outputs of one run of the step, with a given S for each loss scale."""

  after: dict[str, object]  # The next values of arguments.
  watched: dict[str, np.ndarray]  # The leaves of `after` to compare.
  others: dict[str, object]  # The other outputs, each subtree by its path.
  states: dict[str, states.LossScalingState]
  # For each state by path: "nothing" if `update` did not run, else "applied",
  # "skipped", "several" for both, or "overflow" if an overflow was applied.
  outcomes: dict[str, str]

  @property
  def overflows(self) -> bool:
    return not {*self.outcomes.values()} <= {"nothing", "applied"}


class _Runs:
  """A step and its arguments, to be run with any S."""

  def __init__(
    self,
    run: _Step,
    named: Mapping[str, object],
    carry: _Carry | None,
    may_change: Sequence[str],
    known: Mapping[str, str],
  ) -> None:
    self.run, self.named, self.carry = run, dict(named), carry
    self.known = known
    # A string is a single pattern, not a sequence of letters.
    self._may_change = (
      [may_change] if isinstance(may_change, str) else list(may_change or ())
    )
    self.next_values: dict[str, str] = {}
    self._given = states.find_states(self.named)
    self.paths = [
      x for x, y in self._given.items() if jax.tree.leaves(y.loss_scale_state)
    ]

  def at(self, factors: Mapping[str, float]) -> _Run:
    """Runs the step on copies of its arguments, each S times its factor."""

    def copy(path: tuple[Hashable, ...], x: Any) -> object:
      x = jax.tree.map(
        lambda x: x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x, x
      )
      factor = factors.get(leaves.path_name(path))
      if factor is None:
        return x
      # `new` has the shape and sharding of S, so nothing recompiles.
      new = x.loss_scale_state.loss_scale * np.float32(factor)
      rule_state = states.replace_scale(x.loss_scale_state, new)
      return x._replace(loss_scale_state=rule_state)

    inputs = jax.tree.map_with_path(copy, self.named, is_leaf=states.is_state)
    outputs = dict(_nodes(jax.block_until_ready(self.run(inputs))))
    if not self.next_values:
      self.next_values = _next_values(
        self.named, outputs, self.carry, self.known
      )
      self.before = self.watched(self.named)
    after = {name: outputs[place] for name, place in self.next_values.items()}
    old, new = states.find_states(self.named), states.find_states(after)
    missing = [path for path in factors if path not in new]
    # With `carry`, the step need not return a state that it only reads.
    if missing and (self.carry is None or not new):
      got = "no output of its structure, shapes and dtypes"
      if self.carry:
        got = f"`carry` without it, {arguments.shown(self.carry)}"
      raise ValueError(
        "`step` must return the next value of the argument that holds the "
        f"state of loss_scaling, {missing[0]}, got {got}; {_RETURN}."
      )
    outcomes = {x: _outcome(old[x], new[x]) for x in factors if x in new}
    places = self.next_values.values()
    others = {x: y for x, y in outputs.items() if not _overlaps(x, places)}
    return _Run(after, self.watched(after), others, new, outcomes)

  def report(
    self, laws: Iterable[Law], follows: Iterable[str] = (), *facts: Any
  ) -> StepReport:
    """Returns a report whose outputs are those of the user's own step."""

    def as_written(place: str) -> str:
      if not self.known:
        return place
      return _IN_PLACE if place[0] == "0" else place[2:]

    places = {x: as_written(y) for x, y in self.next_values.items()}
    return StepReport(tuple(laws), places, (*map(as_written, follows),), *facts)

  def after(self, found: _Run) -> "_Runs":
    """Returns the same step with the next values of a run as its arguments."""
    later = copy.copy(self)
    later.named = self.named | found.after
    later.before = self.watched(later.named)
    return later

  def watched(self, named: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Returns, by name, the leaves that neither S nor a skip may change."""
    found: dict[str, np.ndarray] = {}
    for x in self.next_values:
      found |= _named_leaves(named[x], x)
    kept = dict(found)
    for x in self._may_change:
      names = [
        name
        for name in found
        if f"{name}/".startswith(f"{x}/")  # Brackets are literal here.
        or any(fnmatch.fnmatch(name, y) for y in (str(x), f"{x}/*"))
      ]
      if not names:
        raise ValueError(
          "`may_change` must name leaves of next values, or be a pattern, got "
          f"{arguments.shown(x)}; they are {_listed([*found])}."
        )
      for name in names:
        kept.pop(name, None)
    return kept

  def parameters(self) -> list[str]:
    """Returns the names of floating leaves outside loss scaling's states."""
    return [
      name
      for name, x in self.before.items()
      if leaves.is_gradient(x)
      and not any(f"{name}/".startswith(f"{y}/") for y in self._given)
    ]

  def moved(self, found: _Run) -> set[str]:
    """Returns the parameters that a run changed."""
    return {*self.parameters()} & {*_differing(self.before, found.watched)}


def _outcome(old: states.LossScalingState, new: states.LossScalingState) -> str:
  """Returns what `update` did, derived from how its counts changed."""
  applied, skipped, requested = (
    np.any(_on_host(getattr(old, x)) != _on_host(getattr(new, x)))
    for x in ("applied_steps", "skipped_steps", "requested_skips")
  )
  if requested and not applied:
    return "requested"
  if skipped:
    return "several" if applied else "skipped"
  if applied:
    return "overflow" if np.any(new.overflow) else "applied"
  return "nothing"


def _next_values(
  named: Mapping[str, object],
  outputs: Mapping[str, object],
  carry: _Carry | None,
  known: Mapping[str, str],
) -> dict[str, str]:
  """Returns, by argument, the path of the output that is its next value."""
  by_position = dict(enumerate(named))
  if not isinstance(carry, Mapping | None):
    raise TypeError(
      "`carry` must be a dict that leads from arguments to outputs, such as "
      f"{{'params': 0, 'opt_state': 1}}, got {arguments.shown(carry)}."
    )
  chosen = {by_position.get(x, x): str(y) for x, y in (carry or {}).items()}
  found = dict(known)
  # The optimizer's state first, since it holds trees like the parameters.
  names = sorted(
    named.keys() - known.keys(),
    key=lambda x: (not states.find_states(named[x]), [*named].index(x)),
  )
  for name in names:
    tree, form = named[name], _form(named[name])
    # Single numbers look alike, such as a learning rate and a loss.
    is_number = _is_value(tree) and not _is_key(tree) and not np.shape(tree)
    if carry is None and (is_number or not form[1]):
      continue
    # The report calls a step's only output 0.
    place = chosen.get(name, "-")
    places = [place, ""] if place == "0" else [place]
    for place in outputs if carry is None else places:
      is_like = place in outputs and _form(outputs[place]) == form
      if is_like and not _overlaps(place, found.values()):
        found[name] = place
        break
  if carry is not None and found.keys() != chosen.keys():
    raise ValueError(
      "`carry` must lead from arguments to outputs of the same structure, "
      f"shapes and dtypes, got {arguments.shown(carry)}; the arguments are "
      f"{', '.join(named)}, the outputs "
      f"{', '.join(x for x in outputs if x and '/' not in x)}."
    )
  return {name: found[name] for name in named if name in found}


def _doubtful(
  later: _Runs, clean: _Run, skipped: _Run, changed: Sequence[str]
) -> set[str]:
  """Returns the arguments whose next value may have been guessed wrong.

  A skipped step returns its arguments, so unchanged ones were guessed right.
  """

  def is_doubtful(name: str) -> bool:
    argument, after = later.named[name], {"": skipped.after[name]}
    rivals = [
      {"": x}
      for y, x in later.named.items()
      if y != name and _form(x) == _form(argument)
    ]
    # Outputs of zero may be a skip's updates; those that jump may be gradients.
    is_zero = not any(map(np.any, _named_leaves(after).values()))
    return (
      (_is_value(argument) and not _is_key(argument))
      or _form(argument) in map(_form, skipped.others.values())
      or any(not _differing(x, after) for x in rivals)
      or is_zero
      or (bool(rivals) and _has_jumped(argument, clean.after[name]))
    )

  return set(filter(is_doubtful, {*map(_argument, changed)}))


def _has_jumped(old: object, new: object) -> bool:
  """Returns whether a step changes a tree by more than half its size."""
  pairs = [
    [np.asarray(y[x], np.result_type(y[x], np.float64)) for y in (a, b)]
    for a, b in [(_named_leaves({"": old}), _named_leaves({"": new}))]
    for x in a
    if leaves.is_gradient(a[x])
  ]
  apart = math.hypot(*(np.linalg.norm(x - y) for x, y in pairs))
  return apart > 0.5 * math.hypot(*(np.linalg.norm(x) for x, _ in pairs))


def _form(tree: object) -> tuple[object, Sequence[object]]:
  """Returns a tree's structure, and the shapes and dtypes of its leaves."""
  values = filter(_is_value, jax.tree.leaves(tree))
  forms = [(np.shape(x), jnp.result_type(x)) for x in values]
  return jax.tree.structure(tree), forms


def _nodes(tree: object, name: str = "") -> Iterator[tuple[str, object]]:
  """Yields the path and value of each subtree, outer ones first."""
  yield name, tree
  children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
  for path, child in children:
    if child is not tree:
      key = leaves.path_name(path)
      yield from _nodes(child, f"{name}/{key}" if name else key)


def _named_leaves(tree: object, inside: str = "") -> dict[str, np.ndarray]:
  """Returns a tree's arrays by name, except those of loss scaling itself."""
  found: dict[str, np.ndarray] = {}
  for path, x in jax.tree.leaves_with_path(
    tree, is_leaf=lambda x: type(x) in _KEPT
  ):
    name = "/".join(filter(None, [inside, leaves.path_name(path)]))
    if type(x) in _KEPT:
      kept = {field: getattr(x, field) for field in _KEPT[type(x)]}
      found |= _named_leaves(kept, name)
    elif _is_value(x) and path[-1:] != _ATTEMPTS:
      found[name] = _on_host(x)
  return found


def _is_value(x: object) -> bool:
  # Text, dates and objects have no values to compare.
  kind = getattr(getattr(x, "dtype", np.dtype("O")), "kind", "V")
  return kind not in "OSTUMm" or isinstance(x, (bool, int, float, complex))


def _is_key(x: object) -> TypeGuard[jax.Array]:
  return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _on_host(x: object) -> np.ndarray:
  """Returns `x` as a NumPy array; for a random key, its data."""
  return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _overlaps(name: str, places: Iterable[str]) -> bool:
  """Returns whether a path is inside any of the others, or around one."""
  first = f"/{name}/".replace("//", "/")
  others = [f"/{x}/".replace("//", "/") for x in places]
  return any(first.startswith(x) or x.startswith(first) for x in others)


def _argument(name: str) -> str:
  return name.partition("/")[0]


def _listed(names: Sequence[str]) -> str:
  more = len(names) - _MOST_NAMED
  listed = ", ".join(names[:_MOST_NAMED])
  return f"{listed} and {more} more" if more > 0 else listed


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
  """Returns whether two arrays are equal; NaN equals NaN."""
  return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


def _differing(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
  """Returns the names of leaves that differ between two similar trees."""
  first, second = _named_leaves(a), _named_leaves(b)
  return [x for x in first if not _is_same(first[x], second[x])]


def _scale_law(amaxes: np.ndarray, is_rough: bool) -> Sequence[str]:
  """Returns the scale law for amax, float[S, members], at S, S/2 and S/4."""
  # With float64 gradients, the true amax may be larger than the state can hold.
  most = np.finfo(np.float32).max
  is_usable = np.all((amaxes > 0) & (amaxes < most), axis=0)
  amaxes = amaxes[:, is_usable]
  slopes = np.log2(amaxes[:-1] / amaxes[1:])
  if not slopes.size:
    return _NOTHING_SEEN
  for slope, law in _SLOPES.items():
    apart = np.max(np.abs(slopes - slope))
    if apart <= _SLOPE_ROUNDING and slope == 1 and apart:
      return _NEARLY if is_rough else _small_part(amaxes)
    if apart <= _SLOPE_ROUNDING:
      return law
  worst = slopes.ravel()[np.argmax(np.abs(slopes - 1))]
  return (
    "inconclusive" if is_rough or abs(worst - 1) < 0.5 else "wrong",
    f"The largest gradient is proportional to S^{worst:.2f}.",
    "Either this S is so small that gradients are lost, or something comes "
    f"before `update` that depends on their size, such as a clip. {_INSIDE}",
  )


def _small_part(amaxes: np.ndarray) -> Sequence[str]:
  """Returns the scale law if a small part of amax does not follow S.

  A part that was added is the same at any S; a solver's errors are not.
  """
  apart = amaxes[:-1] - 2 * amaxes[1:]
  # Noise in the last bit is at most this large.
  noise = 2.0**-22 * amaxes[0]
  is_seen = np.min(np.abs(apart), axis=0) > noise
  is_same = np.abs(apart[0] - apart[1]) <= np.abs(apart[0]) / 16 + noise / 2
  return _ADDED if np.any(is_seen & is_same) else _NEARLY


def _difference(
  old: np.ndarray, a: np.ndarray, b: np.ndarray
) -> tuple[float, float, float]:
  """Returns three measures of the difference between two updates of a leaf.

  They are the largest difference over the largest update, the median of the
  elements' relative differences, and log2 of the ratio of the updates' sums.
  """
  if _is_same(a, b):
    return 0, 0, 0
  if not leaves.is_gradient(a):
    return math.inf, math.inf, math.nan
  old, a, b = (
    np.asarray(x, np.result_type(x, np.float64)) for x in (old, a, b)
  )
  with np.errstate(all="ignore"):
    first, second, apart = np.abs(a - old), np.abs(b - old), np.abs(a - b)
    size = np.maximum(first, second)
    if not np.all(np.isfinite(apart)):
      return math.inf, math.inf, math.nan
    return (
      np.max(apart) / np.max(size),
      np.median(apart[size > 0] / size[size > 0]),
      np.log2(np.sum(first) / np.sum(second)),
    )


def _compare(values: Sequence[np.ndarray], is_narrow: bool) -> tuple[str, str]:
  """Returns the verdict on a leaf, and how strongly it depends on S."""
  old, first, again, half, quarter = values
  largest, middle, slope = _difference(old, first, half)
  lower, lower_middle, lower_slope = _difference(old, half, quarter)
  noise, *_ = _difference(old, first, again)
  # A mistake grows as a power of S, unlike the rounding errors of float16.
  is_power = 0.5 <= abs(slope) < math.inf and np.allclose(
    [slope, lower_slope], round(slope), rtol=0, atol=2.0**-4
  )
  if largest == lower == 0:
    verdict = "exact"
  elif max(largest, lower) <= _ROUNDING:
    verdict = "rounding"
  # One pair of runs says little about the largest noise in other pairs.
  elif 0 < largest <= 64 * noise:
    verdict = "inconclusive"
  # Rounding errors grow as S shrinks.
  elif is_narrow and middle <= min(
    _NARROW_ROUNDING, 2 * lower_middle + _ROUNDING
  ):
    verdict = "rounding"
  else:
    verdict = "wrong" if is_power or not is_narrow else "inconclusive"
  like = f" like S^{slope:.2g}" if 0.5 <= abs(slope) < math.inf else ""
  most = max(largest, lower)
  return verdict, f" ({100 * most:.2g} %{like})" if most < 2 else ""


def _invariance_law(
  values: Sequence[Mapping[str, np.ndarray]],
  doubtful: set[str],
  is_narrow: bool,
) -> Sequence[str]:
  """Returns the invariance law: whether the next values depend on S."""
  named: dict[str, list[str]] = {}
  for name in values[0]:
    # The statistics of FP8 layers follow S, since they see scaled gradients.
    if leaves.OVERWRITE_WITH_GRADIENT & {*name.split("/")}:
      continue
    found, seen = _compare([x[name] for x in values], is_narrow)
    if found == "wrong" and _argument(name) in doubtful:
      found = "doubtful"
    named.setdefault(found, []).append(name + seen)
  for found, (verdict, remedy) in _INVARIANCE.items():
    if found in named:
      text = f"Updates differ between S and S/2: {_listed(named[found])}."
      return verdict, text, remedy
  return "exact", "No next value depends on S."


def _skip_law(
  outcomes: set[str], changed: Sequence[str], doubtful: set[str]
) -> Sequence[str]:
  """Returns the skip law: whether a step that overflowed changed nothing."""
  if not outcomes:
    return _NOTHING_SEEN
  for outcome, law in _NOT_SKIPPED.items():
    if outcome in outcomes:
      return law
  if not changed:
    return "exact", "A step that overflows changes nothing."
  certain = [name for name in changed if _argument(name) not in doubtful]
  text = f"A step that overflows changed {_listed(certain or changed)}."
  return ("wrong", text, _MOVES) if certain else ("inconclusive", text, _CARRY)


def _precision(run: _Step, named: Mapping[str, object]) -> tuple[Law, bool]:
  """Returns the precision law, and whether small numbers may be lost."""

  def arrays_of(named: Mapping[str, object]) -> list[object]:
    return list(filter(_is_value, jax.tree.leaves(run(named))))

  try:
    # A jitted step is traced anew, so that it warns as it did the first time.
    with _traced_anew(object()):
      recording = interpreter.record(arrays_of, (dict(named),), {})
  except Exception as error:  # A step may run any code on the host.
    text = f"JAX cannot trace the step ({type(error).__name__}) to see it."
    return Law("precision", "not applied", text), True
  works: set[np.dtype] = set()
  casts: set[np.dtype] = set()
  is_reduced = False
  for _, equation, _ in scopes.operations(recording.jaxpr):
    name = equation.primitive.name
    avals: list[object] = [
      x.aval for x in (*equation.invars, *equation.outvars)
    ]
    floats = {x.dtype for x in avals if leaves.is_gradient(x)}
    narrow = {x for x in floats if leaves.at_least_float32(x) != x}
    (casts if name == "convert_element_type" else works).update(narrow)
    is_reduced |= equation.params.get("exponent_bits", 8) < 8
  least = jnp.finfo("float32").minexp
  loses = is_reduced or any(jnp.finfo(x).minexp > least for x in works | casts)
  if not works:
    return Law("precision", *_ALL_WIDE), loses
  listed = ", ".join(sorted(x.name for x in works))
  return Law("precision", "exact", f"Operations work in {listed}."), loses
