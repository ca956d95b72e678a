"""The laws of a correct step, tested by running it."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fnmatch
import inspect
import math
import textwrap
from typing import Any
from typing import NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves as _leaves
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes
from optax_lossscale._step import states
from optax_lossscale.instruments import _history

# S is halved so often to find one at which the step does not overflow.
_MOST_HALVINGS = 40

# By how much two updates may differ where S does: of the largest element where
# all is as wide as float32, since a power of two is exact there; of the middle
# element in float16, where a smaller S loses low bits and small gradients. That
# was at most 1e-4 from S = 2**15 and 7e-3 from 2**6 in correct steps of an MLP,
# an LSTM and a transformer at O1, O2 and O3, with SGD and Adam.
_ROUNDING = 2.0**-20
_NARROW_ROUNDING = 2.0**-6

# How close log2(amax) must follow log2(S).
_SLOPE_ROUNDING = 2.0**-6

# Where linen.TrainState counts all steps, skipped ones too.
_ATTEMPTS = (jax.tree_util.GetAttrKey("attempts"),)

# How many leaves a line of the report names.
_MOST_NAMED = 4

_INSIDE = (
  "What is to see true gradients goes inside: loss_scaling(chain, rule)."
)


# By log2(amax) over log2(S): the verdict, what is seen, and what makes it so.
_SLOPES = {
  1: ("exact", "is proportional to S", ""),
  0: (
    "wrong",
    "does not depend on S",
    "Either the loss is not scaled by this S: jax.value_and_grad in the place "
    "of ols.scaled_value_and_grad, an S that was read once or outside of the "
    "step. Or `update` of loss_scaling is not given the scaled gradients: "
    f"ols.unscale, a clip or an optimizer before it. {_INSIDE}",
  ),
  2: (
    "wrong",
    "is proportional to S squared",
    "The loss is scaled twice, by ols.scaled_value_and_grad and by hand.",
  ),
}

# By the verdict, the worst one first.
_INVARIANCE = {
  "wrong": "Some gradients do not pass through loss_scaling (optax.masked or "
  "one group of a partition around it), something around it takes scaled ones "
  "(MultiSteps, an optimizer), or something was added to them by hand (weight "
  f"decay, noise). {_INSIDE}",
  "inconclusive": "That may be rounding, or not: check the step with the model "
  "in float32, where S must not show.",
  "rounding": "That is rounding, in which a smaller mistake would hide: check "
  "the step with the model in float32 as well.",
}


class Law(NamedTuple):
  """One law, and whether a step keeps it.

  Attributes:
    name: "scale", "invariance", "skip" or "precision".
    verdict: "exact"; "rounding", right as far as float16 can tell; "wrong";
      "inconclusive"; or "not applied", where the law has nothing to say.
    text: what was seen.
    remedy: the mistakes that look like this, and what mends them.
  """

  name: str
  verdict: str
  text: str
  remedy: str = ""


@dataclasses.dataclass(frozen=True)
class StepReport:
  """What `check_step` found, to be printed.

  Attributes:
    laws: the laws, each with its verdict; with several loss scales the first
      two of them once for each.
    next_values: by argument, the output that was taken for its next value.
    follows: the other outputs that depend on S, such as a norm of scaled
      gradients. They are no mistake, unless they are taken for true ones.
    deterministic: whether two runs with the same S gave the same values.
  """

  laws: tuple[Law, ...]
  next_values: Mapping[str, str]
  follows: tuple[str, ...]
  deterministic: bool

  @property
  def ok(self) -> bool:
    """Whether every law that applies was seen to hold."""
    return not {x.verdict for x in self.laws} & {"wrong", "inconclusive"}

  @property
  def is_wrong(self) -> bool:
    """Whether a law is broken."""
    return any(law.verdict == "wrong" for law in self.laws)

  def raise_if_wrong(self) -> None:
    """Raises ValueError, with the report as its text, if a law is broken."""
    if self.is_wrong:
      raise ValueError(str(self))

  def __str__(self) -> str:
    found = "right" if self.ok else "wrong" if self.is_wrong else "not certain"
    pairs = [f"{x} from output {y or 0}" for x, y in self.next_values.items()]
    lines = [f"The step is {found}."]
    for law in self.laws:
      lines += [f"{law.name} ({law.verdict}): {law.text} {law.remedy}".rstrip()]
    lines += [f"Next values: {', '.join(pairs)}."]
    if self.follows:
      lines += [f"Other outputs that depend on S: {_listed(self.follows)}."]
    if not self.deterministic:
      lines += ["Two runs with the same S differ."]
    return "\n".join(
      textwrap.fill(line, 80, subsequent_indent="  ") for line in lines
    )


def check_step(
  step: Callable[..., Any],
  *args: Any,
  carry: Mapping[Any, Any] | None = None,
  may_change: Sequence[str] = (),
  **kwargs: Any,
) -> StepReport:
  """Returns whether a train step treats the loss scale as it must.

  Most mistakes with loss scaling are silent: the run does not learn, or learns
  something else, and no number looks wrong. But nearly all of them break a law
  that shows when the step runs on one batch with S, S/2 and S/4, and once with
  an S of inf:

  - scale: the largest scaled gradient is proportional to S.
  - invariance: no next value (parameters, the optimizer's state, counters,
    statistics) depends on S.
  - skip: a step that overflows changes nothing but the loss scaling's state.
  - precision: something works below float32; else there is nothing to scale
    for. It is told, and makes no step wrong.

  Call it once before a long run, and in your own tests, outside of jit. The
  step itself may be jitted or not, on one device or many. Each run gets copies,
  so arguments may be donated, and nothing changes; that takes memory for some
  five times the arguments. If S itself overflows it is halved until it does
  not.

  It cannot see what does not depend on S: a wrong loss, data that differ. In
  float16 a small mistake, such as weight decay that is added by hand, hides in
  the rounding; with the model in float32 it does not.

  Args:
    step: the train step, which returns the next values of its arguments.
    *args: its arguments, one of them with the state of `loss_scaling`.
    carry: which output is the next value of which argument, such as `{"params":
      0, "opt_state": "1/opt"}`: arguments by name or position, outputs by
      position, key or path. None: the first output of the same structure,
      shapes and dtypes, unless that is a single float.
    may_change: what may depend on S and move on a skip, by its name in the
      report, or by a pattern such as "*/rngs/*".
    **kwargs: more arguments of the step.

  Returns:
    The report: print it, ask it whether it is `ok`, or let it
    `raise_if_wrong()`.

  Raises:
    TypeError: if `step` is no function, if this is called under jit, or if the
      state of the rule does not hold S as a leaf.
    ValueError: if no argument holds the state of `loss_scaling`, if its next
      value is not returned, or if `carry` names none.

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
  call, named = bind(step, args, kwargs)
  return check(call, named, carry, may_change)


def check(
  run: Callable[[Mapping[str, Any]], Any],
  named: Mapping[str, Any],
  carry: Mapping[Any, Any] | None = None,
  may_change: Sequence[str] = (),
) -> StepReport:
  """Returns the report on a function of a dict of arguments."""
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(named)):
    raise TypeError(
      "`check_step` must be called outside of jit, got traced arguments; give "
      "it the jitted step: check_step(train_step, params, opt_state, batch)."
    )
  found = states.find_states(named)
  if not found:
    raise ValueError(
      "`step` must be given the state of loss_scaling, got none among its "
      f"arguments {', '.join(named)}; it must be an argument, and its next "
      "value be returned."
    )
  precision, is_narrow = _precision(run, named)
  paths = [x for x in found if jax.tree.leaves(found[x].loss_scale_state)]
  if not paths:
    law = Law("scale", "not applied", "Loss scaling is switched off.")
    return StepReport((law, precision), {}, (), True)
  runs = _Runs(run, named, carry, may_change)
  factor = 1.0
  first = runs.at(dict.fromkeys(paths, factor))
  while first.overflows and factor > 2.0**-_MOST_HALVINGS:
    factor /= 2
    first = runs.at(dict.fromkeys(paths, factor))
  if first.overflows:
    law = Law(
      "scale",
      "inconclusive",
      f"The step overflows with S and {_MOST_HALVINGS} halvings of it.",
      "Take another batch, or see where this one overflows: "
      "ols.instruments.where_overflow.",
    )
    return StepReport((law, precision), runs.next_values, (), True)

  noise = runs.differences(first, runs.at(first.factors))
  laws: list[Law] = []
  follows: dict[str, None] = {}
  for path in paths:
    half, quarter = (
      runs.at(first.factors | {path: factor * share}) for share in (0.5, 0.25)
    )
    upper, lower = (
      runs.differences(first, half),
      runs.differences(half, quarter),
    )
    scale = _scale_law(path, runs.named, (first, half, quarter))
    invariance = _invariance_law(upper, lower, noise, is_narrow)
    if scale.verdict == "wrong":
      # What comes of the same mistake needs no remedy of its own.
      invariance = invariance._replace(remedy="")
    place = f"Of S at {path}: " if len(paths) > 1 else ""
    laws += [x._replace(text=place + x.text) for x in (scale, invariance)]
    follows |= dict.fromkeys(runs.others_that_differ(first, half))
  # After a step, since momentum of 0 would not show that it moves.
  runs.named |= first.after
  laws += [_skip_law(runs, runs.at(dict.fromkeys(paths, math.inf))), precision]
  deterministic = not any(x.largest for x in noise.values())
  return StepReport(
    tuple(laws), runs.next_values, tuple(follows), deterministic
  )


def bind(
  step: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]:
  """Returns a function of a dict of arguments, and that dict."""
  arguments.check_function(step)
  signature = inspect.signature(step)
  named = dict(signature.bind(*args, **kwargs).arguments)

  def call(named: Mapping[str, Any]) -> Any:
    bound = signature.bind_partial()
    bound.arguments |= named
    return step(*bound.args, **bound.kwargs)

  return call, named


class _Run(NamedTuple):
  """What the step made with one S, or with one for each state."""

  factors: dict[str, float]  # By which each S was multiplied.
  outputs: Any
  after: dict[str, Any]  # The next values of arguments, by name.
  states: dict[str, states.LossScalingState]

  @property
  def overflows(self) -> bool:
    return any(np.any(x.overflow) for x in self.states.values())


class _Runs:
  """A step and its arguments, to be run with any S."""

  def __init__(
    self,
    run: Callable[[Mapping[str, Any]], Any],
    named: Mapping[str, Any],
    carry: Mapping[Any, Any] | None,
    may_change: Sequence[str],
  ) -> None:
    self._run, self.named = run, dict(named)
    self._carry, self._may_change = carry, may_change
    self.next_values: dict[str, str] = {}

  def at(self, factors: dict[str, float]) -> _Run:
    """Runs the step on copies, with each S multiplied by its factor."""

    def scale(path: Any, x: Any) -> Any:
      factor = factors.get(_leaves.path_name(path))
      if factor is None:
        return jax.tree.map(_copy, x)
      x = jax.tree.map(_copy, x)
      # The product has the shape and the sharding of S: nothing recompiles.
      old = x.loss_scale_state.loss_scale
      new = old * np.float32(factor)
      rule_state = states.replace_scale(x.loss_scale_state, new)
      return x._replace(loss_scale_state=rule_state)

    named = jax.tree.map_with_path(scale, self.named, is_leaf=states.is_state)
    with jax.debug_nans(False), jax.debug_infs(False):
      outputs = jax.block_until_ready(self._run(named))
    nodes = dict(_nodes(outputs))
    if not self.next_values:
      self.next_values = _next_values(self.named, nodes, self._carry)
    after = {name: nodes[place] for name, place in self.next_values.items()}
    found = states.find_states(after)
    for path in factors:
      if path not in found:
        raise ValueError(
          "`step` must return the next value of the argument that holds the "
          f"state of loss_scaling, {path}, got no output of its structure, "
          "shapes and dtypes."
        )
    return _Run(factors, outputs, after, found)

  def watched(self, named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must neither depend on S nor move on a skip, by name."""
    return {
      name: leaf
      for argument in self.next_values
      for name, leaf in _named_leaves({argument: named[argument]}).items()
      if not any(_matches(name, pattern) for pattern in self._may_change)
    }

  def differences(self, a: _Run, b: _Run) -> dict[str, "_Difference"]:
    """Returns how far the next values of two runs are apart."""
    before, others = self.watched(self.named), self.watched(b.after)
    return {
      name: _difference(before[name], leaf, others[name])
      for name, leaf in self.watched(a.after).items()
    }

  def others_that_differ(self, a: _Run, b: _Run) -> list[str]:
    """Returns the outputs that are no next values and differ in two runs."""
    first, second = _named_leaves(a.outputs), _named_leaves(b.outputs)
    return [
      name
      for name in first
      if not any(_is_under(name, x) for x in self.next_values.values())
      and not _is_same(first[name], second[name])
    ]


def _next_values(
  named: Mapping[str, Any],
  nodes: Mapping[str, Any],
  carry: Mapping[Any, Any] | None,
) -> dict[str, str]:
  """Returns the path of the output that is the next value of an argument."""
  by_position = dict(enumerate(named))
  chosen = {by_position.get(x, x): str(y) for x, y in (carry or {}).items()}
  found: dict[str, str] = {}
  for name, tree in named.items():
    form = _form(tree)
    # A single float may be a loss as well as a rate.
    if carry is None and form[1] in ([], [((), np.dtype(np.float32))]):
      continue
    for place in nodes if carry is None else [chosen.get(name, "-")]:
      is_taken = any(
        _is_under(place, x) or _is_under(x, place) for x in found.values()
      )
      if not is_taken and place in nodes and _form(nodes[place]) == form:
        found[name] = place
        break
  if carry is not None and found.keys() != chosen.keys():
    raise ValueError(
      "`carry` must lead from arguments to outputs of the same structure, "
      f"shapes and dtypes, got {carry!r}; the arguments are "
      f"{', '.join(named)}, the outputs "
      f"{', '.join(x for x in nodes if x and '/' not in x)}."
    )
  return found


def _form(tree: Any) -> tuple[Any, list[Any]]:
  """Returns the structure of a tree, and shapes and dtypes."""
  values = filter(_is_value, jax.tree.leaves(tree))
  forms = [(np.shape(x), jnp.result_type(x)) for x in values]
  return jax.tree.structure(tree), forms


def _nodes(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
  """Yields each subtree by its path, the outer ones first."""
  yield name, tree
  children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
  for path, child in children:
    if child is not tree:
      key = _leaves.path_name(path)
      yield from _nodes(child, f"{name}/{key}" if name else key)


def _named_leaves(tree: Any, inside: str = "") -> dict[str, Any]:
  """Returns arrays by name, but for those that loss scaling itself moves."""
  found: dict[str, Any] = {}
  for path, x in jax.tree.leaves_with_path(tree, is_leaf=_is_ours):
    name = "/".join(filter(None, [inside, _leaves.path_name(path)]))
    if states.is_state(x):
      kept = {"inner_state": x.inner_state, "applied_steps": x.applied_steps}
      found |= _named_leaves(kept, name)
    elif _is_ours(x):
      found |= _named_leaves({"recorded_state": x.recorded_state}, name)
    elif _is_value(x) and path[-1:] != _ATTEMPTS:
      found[name] = x
  return found


def _is_ours(x: Any) -> bool:
  return isinstance(x, (states.LossScalingState, _history.RecordState))


def _copy(x: Any) -> Any:
  return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x


def _is_value(x: Any) -> bool:
  return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def _matches(name: str, pattern: str) -> bool:
  return _is_under(name, pattern) or fnmatch.fnmatchcase(name, pattern)


def _is_under(name: str, place: str) -> bool:
  return not place or name == place or name.startswith(f"{place}/")


def _listed(names: Sequence[str]) -> str:
  more = len(names) - _MOST_NAMED
  listed = ", ".join(names[:_MOST_NAMED])
  return f"{listed} and {more} more" if more > 0 else listed


def _on_host(x: Any) -> np.ndarray:
  """Returns a NumPy array; of a random key its words."""
  is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if is_key else x)


def _is_same(a: Any, b: Any) -> bool:
  """Returns whether two leaves are equal; a NaN equals itself."""
  a, b = _on_host(a), _on_host(b)
  return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


class _Difference(NamedTuple):
  """How far two updates of a leaf are apart, as shares of the update."""

  largest: float  # In the largest element; 0 if both are the same.
  middle: float  # In the middle one of the elements that move.
  slope: float  # log2 of the middle quotient of the first and the second.


def _difference(old: Any, a: Any, b: Any) -> _Difference:
  """Returns how far two next values of a leaf are apart."""
  if _is_same(a, b):
    return _Difference(0, 0, 0)
  unlike = _Difference(math.inf, math.inf, math.nan)
  if not _leaves.is_gradient(a):
    return unlike
  wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
  old, a, b = (_on_host(x).astype(wide) for x in (old, a, b))
  with np.errstate(all="ignore"):
    first, second, apart = np.abs(a - old), np.abs(b - old), np.abs(a - b)
    quotients = (first / second)[(first > 0) & (second > 0)]
  if not np.all(np.isfinite(apart)):
    return unlike
  size = np.maximum(first, second)
  moves = size > 0
  return _Difference(
    largest=float(np.max(apart) / np.max(size)),
    middle=float(np.median(apart[moves] / size[moves])),
    slope=float(np.log2(np.median(quotients))) if quotients.size else math.nan,
  )


def _verdict(
  upper: _Difference, lower: _Difference, noise: float, is_narrow: bool
) -> str:
  """Returns the verdict on a leaf, by S and S/2 and by S/2 and S/4."""
  if upper.largest == lower.largest == 0:
    return "exact"
  if upper.largest <= _ROUNDING:
    return "rounding"
  if upper.largest <= 4 * noise:
    return "inconclusive"
  if not is_narrow or math.isinf(upper.middle):
    return "wrong"
  # What float16 loses is more at a smaller S.
  if upper.middle <= min(_NARROW_ROUNDING, 2 * lower.middle + _ROUNDING):
    return "rounding"
  slopes = upper.slope, lower.slope
  is_power = min(slopes) >= 0.5 or max(slopes) <= -0.5
  return "wrong" if is_power else "inconclusive"


def _scale_law(
  path: str, named: Mapping[str, Any], runs: tuple[_Run, _Run, _Run]
) -> Law:
  """Returns whether amax is proportional to this S, and to no other."""
  first, half, _ = (x.states for x in runs)
  for other in first:
    if other != path and not _is_same(first[other].amax, half[other].amax):
      return Law(
        "scale",
        "wrong",
        f"The gradients of {other} depend on it.",
        "Each loss is scaled with the state of the optimizer that takes its "
        "gradients: scaled_value_and_grad(loss_fn, opt_state, path=...).",
      )
  before = states.find_states(named)[path]
  steps = (x.applied_steps + x.skipped_steps for x in (before, first[path]))
  amaxes = np.array([np.ravel(_on_host(x.states[path].amax)) for x in runs])
  amaxes = amaxes[:, np.all((amaxes > 0) & np.isfinite(amaxes), axis=0)]
  if _is_same(*steps) or not amaxes.size:
    return Law(
      "scale",
      "inconclusive",
      "`update` of loss_scaling did not run, or all gradients are 0.",
      "Take another batch, or a step in which it runs. optax.MultiSteps "
      "belongs inside of it.",
    )
  slopes = -np.diff(np.log2(amaxes.astype(np.float64)), axis=0)
  for slope, (verdict, like, remedy) in _SLOPES.items():
    apart = np.max(np.abs(slopes - slope))
    if apart <= _SLOPE_ROUNDING:
      verdict = "rounding" if verdict == "exact" and apart else verdict
      return Law("scale", verdict, f"The largest gradient {like}.", remedy)
  worst = slopes.ravel()[np.argmax(np.abs(slopes - 1))]
  return Law(
    "scale",
    "inconclusive" if abs(worst - 1) < 0.5 else "wrong",
    f"The largest gradient is proportional to S^{worst:.2f}.",
    "Either this S is so small that gradients are lost, or something comes "
    f"before `update` that depends on their size, such as a clip. {_INSIDE}",
  )


def _invariance_law(
  upper: Mapping[str, _Difference],
  lower: Mapping[str, _Difference],
  noise: Mapping[str, _Difference],
  is_narrow: bool,
) -> Law:
  """Returns whether S shows in the next values."""
  named: dict[str, list[str]] = {}
  for name, found in upper.items():
    verdict = _verdict(found, lower[name], noise[name].largest, is_narrow)
    like = f" like S^{found.slope:.2g}" if abs(found.slope) >= 0.5 else ""
    share = f" ({100 * found.largest:.2g} %{like})" if found.largest < 2 else ""
    named.setdefault(verdict, []).append(name + share)
  verdict = next(
    x for x in (*_INVARIANCE, "exact") if x in named or x == "exact"
  )
  if verdict == "exact":
    return Law("invariance", verdict, "No next value depends on S.")
  return Law(
    "invariance",
    verdict,
    f"With half the S the updates differ of {_listed(named[verdict])}.",
    _INVARIANCE[verdict],
  )


def _skip_law(runs: _Runs, infinite: _Run) -> Law:
  """Returns whether a step that overflowed changed nothing."""
  if not all(np.all(x.skipped) for x in infinite.states.values()):
    if infinite.overflows:
      text = "The rule has skip=False, so that overflows are applied."
      return Law("skip", "not applied", text)
    return Law(
      "skip",
      "wrong",
      "The step with an S of inf was not skipped.",
      "Either `update` of loss_scaling did not run, or something around it, "
      "such as optax.apply_if_finite, took the step back and S with it: S can "
      "never come down. It belongs inside.",
    )
  before, after = runs.watched(runs.named), runs.watched(infinite.after)
  changed = [name for name in before if not _is_same(before[name], after[name])]
  if not changed:
    return Law("skip", "exact", "A step that overflows changes nothing.")
  return Law(
    "skip",
    "wrong",
    f"A step that overflows changed {_listed(changed)}.",
    "What a step changes moves with the parameters or not at all: new = "
    "ols.select_on_skip(opt_state, new, old); in Flax NNX `with "
    "ols.nnx.select_on_skip(optimizer, model):`; in Flax Linen "
    "ols.linen.TrainState. Optimizers belong inside of loss_scaling. What may "
    "change all the same is for may_change=.",
  )


def _precision(
  run: Callable[[Mapping[str, Any]], Any], named: Mapping[str, Any]
) -> tuple[Law, bool]:
  """Returns what works below float32, and whether small numbers are lost."""

  def arrays_of(named: Mapping[str, Any]) -> list[Any]:
    return list(filter(_is_value, jax.tree.leaves(run(named))))

  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # The runs warn.
      recording = interpreter.record(arrays_of, (dict(named),), {})
  except Exception as error:  # A step may do anything on the host.
    text = f"JAX cannot trace the step ({type(error).__name__})."
    return Law("precision", "inconclusive", text), True
  avals: list[Any] = [
    x.aval
    for _, equation in scopes.operations(recording.jaxpr)
    if equation.primitive.name != "convert_element_type"
    for x in (*equation.invars, *equation.outvars)
  ]
  floats = {x.dtype for x in avals if _leaves.is_gradient(x)}
  dtypes = {x for x in floats if _leaves.at_least_float32(x) != x}
  if dtypes:
    listed = ", ".join(sorted(x.name for x in dtypes))
    loses_range = any(
      jnp.finfo(x).minexp > jnp.finfo(np.float32).minexp for x in dtypes
    )
    text = f"Operations work in {listed}."
    return Law("precision", "exact", text), loses_range
  return Law(
    "precision",
    "not applied",
    "Nothing in the step works below float32.",
    "If that is not meant, loss scaling has nothing to save: "
    'ols.autocast(loss_fn, "O1") or dtype=jnp.float16 is missing.',
  ), False
