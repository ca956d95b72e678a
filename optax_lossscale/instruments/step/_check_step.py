"""`check_step`: whether a train step treats the loss scale correctly."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import ParamSpec
from typing import TypeVar
import warnings

import jax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._step import states
from optax_lossscale.instruments import shared
from optax_lossscale.instruments.step import _findings
from optax_lossscale.instruments.step import _next_values
from optax_lossscale.instruments.step import _proof
from optax_lossscale.instruments.step import _runs
from optax_lossscale.instruments.step import _verdicts
from optax_lossscale.instruments.step._findings import Kind
from optax_lossscale.instruments.step._findings import LawName

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _by_position(check: Callable[_P, _R]) -> Callable[_P, _R]:
  """Returns `check`, which explains that the step's arguments have no names."""

  @functools.wraps(check)
  def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    if others := kwargs.keys() - {"step", "carry", "may_change"}:
      name = min(others)
      raise TypeError(
        "`check_step` takes the arguments of `step` by position, got an "
        f"unexpected keyword argument {name!r}; pass it by position or bind it "
        f"first, as in functools.partial(step, {name}=...)."
      )
    return check(*args, **kwargs)

  return checked


@_by_position
def check_step(
  step: Callable[..., Any],
  *args: object,
  carry: _next_values.Carry | None = None,
  may_change: Sequence[str] = (),
) -> _findings.StepReport:
  """Checks whether a train step treats the loss scale correctly.

  Most mistakes with loss scaling are silent: the run does not learn, or learns
  something else, and no number looks wrong. But nearly all of them break one of
  these laws:

  - scale: every gradient that `update` is given is S times the true one, and an
    overflow in it is not hidden.
  - arguments: whatever else `update` is given does not depend on S.
  - invariance: no next value (parameters, the optimizer's state, counters,
    statistics) depends on S, and the next S is the one that the rule made.
  - skip: a step that overflows changes nothing but the loss scaling's state.
  - precision: some operation works below float32; otherwise loss scaling has no
    use. This law is only reported and never makes a step wrong.

  The laws are proved first, for all values: the check traces the step and finds
  for each of its values the power of S that it grows with, and which argument
  it is if the step overflows. Then the step runs on the arguments with S, S/2,
  S/4 and an S of inf. The runs decide what the proof leaves open.
  Given shapes in the place of arrays, as `jax.eval_shape(tx.init, params)`
  returns them, the check only proves: it compiles and allocates nothing, and
  takes a second for any number of parameters.

  Call it outside of jit, once before a long run and in your own tests. The step
  may be jitted or not, use several devices of one process, and donate its
  arguments, which are copies. The next values of up to seven runs are kept on
  the host. If the step overflows at S, the check halves S until it does not. If
  the first step moves no parameter, as at a learning rate of 0, it runs up to
  64 more and judges those that move one.

  "Proved" is about real numbers, and assumes what the report lists. Unseen
  remain: constant factors; rounding, and an overflow at this S; random numbers
  and files of the host; and a clip at exactly a float8's largest value, which
  counts as part of a cast. A kernel that JAX cannot look into, such as one of
  Pallas, makes a law unknown, and so do equal values that are written in
  another way. If no proof succeeds, a small mistake in float16 may hide in the
  rounding; check in float32, too.

  Args:
    step: the train step, which returns the next values of its arguments, or
      changes them in place if they are Flax NNX objects. `optimizer.step` may
      count skipped steps, as it does in Flax.
    *args: its arguments, including the state of `loss_scaling`, or an
      `nnx.Optimizer` that holds it, as arrays or as the shapes and dtypes of
      arrays (`jax.ShapeDtypeStruct`). Bind any keyword-only arguments first, as
      in `functools.partial(train_step, train=True)`.
    carry: which output is the next value of each argument, such as
      `{"params": 0, "opt_state": "1/opt"}`, with arguments by name or position
      and outputs by position, key or path. By default, the output that is the
      argument if the step overflows, or else the first one of the same
      structure, shapes and dtypes. It must be None with NNX objects, since each
      is its own next value.
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
    >>> print(report.laws[0].text)  # doctest: +ELLIPSIS
    The gradient of the parameter does not grow with S, but `update` divides ...

    The same without any numbers:

    >>> shapes = jax.eval_shape(lambda x: x, (params, tx.init(params)))
    >>> ols.instruments.check_step(train_step, *shapes, jnp.eye(2)).ok
    False
  """
  run, named, known = shared.bind(step, args, "check_step")
  if not isinstance(carry, Mapping | None):
    raise TypeError(
      "`carry` must be a dict that leads from arguments to outputs, such as "
      f"{{'params': 0, 'opt_state': 1}}, got {arguments.shown(carry)}."
    )
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
      f"arguments {', '.join(named) or '(no arguments)'}; "
      f"{_next_values.RETURN}."
    )
  caught: list[warnings.WarningMessage] = []
  try:
    with switches.lifted(), warnings.catch_warnings(record=True) as caught:
      report = _report(run, named, carry or None, known, may_change)
  finally:
    for x in caught:
      warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)
  texts = (
    str(x.message)
    for x in caught
    if issubclass(x.category, arguments.WiringWarning)
  )
  report = dataclasses.replace(report, warnings=tuple(dict.fromkeys(texts)))
  return _as_written(report) if known else report


def _as_written(report: _findings.StepReport) -> _findings.StepReport:
  """Returns a report whose outputs are those of the user's own NNX step."""

  def place_of(place: str) -> str:
    return _findings.IN_PLACE if place[0] == "0" else place[2:]

  places = {x: place_of(y) for x, y in report.next_values.items()}
  follows = tuple(map(place_of, report.follows))
  return dataclasses.replace(report, next_values=places, follows=follows)


def _report(
  run: shared.Step,
  named: dict[str, object],
  carry: _next_values.Carry | None,
  known: Mapping[str, leaves.Path],
  may_change: Sequence[str],
) -> _findings.StepReport:
  """Returns what a proof and runs find, or a proof alone if it gets shapes."""
  are_shapes = any(
    isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(named)
  )
  traced: _proof.Traced | None = None
  try:
    # A jitted step is traced anew, so that it warns as it did the first time.
    traced = _proof.trace(run, named)
  except Exception as error:  # A step may run any code on the host.
    if are_shapes:
      if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        error.add_note("A step that JAX cannot trace must be given arrays.")
      raise
    name = type(error).__name__
    precision = _findings.found(Kind.NO_TRACE, LawName.PRECISION, error=name)
    is_narrow = True
    outputs = _runs.outputs_of(run, named)
  if traced:
    precision, is_narrow = _verdicts.precision_law(traced.jaxpr)
    outputs = dict(leaves.subtrees(traced.shapes))
  found = _next_values.match(named, outputs, carry, known)
  certain = frozenset(found if carry else known)
  free = frozenset(_next_values.may_change(named, may_change))
  proof = _proof.Proof((), found, certain, (), ())
  if traced:
    try:
      proof = _proof.prove(traced, named, found, certain, free)
    except Exception as error:  # A mistake in the proof proves nothing.
      text = f"{type(error).__name__}: {error}"
      names = LawName.SCALE, LawName.INVARIANCE, LawName.SKIP
      failed = [_findings.found(Kind.NO_PROOF, x, error=text) for x in names]
      proof = proof._replace(laws=tuple(failed))
  places, certain = proof.next_values, proof.certain
  bound = _runs.Bound(run, named, places, certain, free, is_narrow)
  report = _findings.StepReport((), bound.places, proof.follows)
  if not are_shapes:
    report = _runs.report(bound)
  if is_narrow and any(x.kind is Kind.SWITCHED_OFF for x in proof.laws):
    precision = _findings.found(Kind.UNSCALED, LawName.PRECISION)
  laws = _findings.combined(proof.laws, [*report.laws, precision])
  is_proved = any(x.verdict is _findings.Verdict.PROVED for x in laws)
  assumptions = proof.assumptions if is_proved else ()
  return dataclasses.replace(report, laws=laws, assumptions=assumptions)
