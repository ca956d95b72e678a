"""Identities: which argument a value is, bit for bit, or whose S.

A step that is skipped returns its arguments, so the law about skips is one of
identities. An operation keeps them if it copies; some forms, such as a cast to
a dtype that holds all numbers of the first, are undone later.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping

from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr.operations import Form
from optax_lossscale._jaxpr.operations import Growth
from optax_lossscale._jaxpr.operations import Size
from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step._values import ANY
from optax_lossscale.instruments.step._values import Identity
from optax_lossscale.instruments.step._values import Operation
from optax_lossscale.instruments.step._values import Place
from optax_lossscale.instruments.step._values import Scale
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

# x * 1 and x + 0 may be written for x, with a 1 or 0 that no rule finds.
_ARITHMETIC = (Form.PLUS, Form.MINUS, Form.TIMES, Form.OVER)


def transfer(operation: Operation) -> Identity | None:
  """Returns the identity of an operation's result."""
  row = operation.row
  rule = _RULES.get(row.form)
  found = rule(operation) if rule else None
  # A broadcast array cannot be an argument.
  if row.form is Form.RESHAPES:
    return found
  if row.growth is Growth.COMPARES:
    found = _projected(operation.inputs)
  return found or _rewritten(operation)


def join(values: Values) -> Identity | None:
  """Returns the argument that all values are."""
  identities = {x.identity for x in values}
  return identities.pop() if len(identities) == 1 else None


def join_scales(values: Values, *, is_branch: bool) -> Scale | None:
  """Returns whose S one of several values is."""
  scales = {x.scale for x in values if x.scale}
  # Another value, or the S of another state, leaves nothing to say.
  paths = {x.scale and x.scale.path for x in values}
  if None in paths or len(paths) > 1:
    return None
  first, stages = next(iter(scales)), {x.stage for x in scales}
  stage = first.stage
  if len(stages) > 1:
    # Of S and the next S, a branch gives one that may be new.
    is_new = is_branch and stages == {"old", "new"}
    stage = "new" if is_new else "either"
    stage = "untold" if "untold" in stages else stage
  moves = frozenset[Place]().union(*(x.moves for x in scales))
  return first._replace(stage=stage, moves=moves)


def formed(
  identity: Identity | None, kind: str, detail: Hashable = None
) -> Identity | None:
  """Returns the identity of a form of a value."""
  if identity is None:
    return None
  return identity._replace(forms=(*identity.forms, (kind, detail)))


def undone(
  identity: Identity | None, kind: str, detail: Hashable = None
) -> Identity | None:
  """Returns the identity of a value that is no more in a form."""
  # Only the last form can be undone, and only by what undoes it.
  if identity is None or identity.forms[-1:] != ((kind, detail),):
    return None
  return identity._replace(forms=identity.forms[:-1])


def perhaps(choices: Iterable[Value]) -> Identity | None:
  """Returns the identity of a value that may be what one choice is."""
  first = next((x.identity for x in choices if x.identity), None)
  return first and first._replace(is_sure=False)


def _rewritten(operation: Operation) -> Identity | None:
  """Returns the identity of what may be an argument, written otherwise."""
  row = operation.row
  is_arithmetic = row.form in _ARITHMETIC
  first = _argument_of(operation.inputs)
  if first is None or not (is_arithmetic or row.size is Size.MOVES):
    return None
  is_one = not all(x.identity for x in operation.inputs)
  if is_arithmetic and is_one and first.is_sure and not first.forms:
    return formed(first, row.name)
  return first._replace(forms=(), is_sure=False)


def _argument_of(inputs: Values) -> Identity | None:
  """Returns the only argument among inputs that are numbers otherwise."""
  found = [x.identity for x in inputs if x.identity]
  others = [x for x in inputs if not x.identity]
  is_beside = any(x.all_of("reads") or x.scales for x in others)
  is_one = len({x.argument for x in found}) == 1
  return found[0] if is_one and not is_beside else None


def _projected(inputs: Values) -> Identity | None:
  """Returns the identity of an argument that may be within bounds anyway."""
  bounds = [x for x in inputs if x.identity is None]
  is_bounded = all(x.is_pure and _degrees.is_free(x.degree) for x in bounds)
  is_one = len(bounds) == len(inputs) - 1
  return perhaps(inputs) if is_one and is_bounded else None


def apart(first: Value, second: Value) -> int | None:
  """Returns by how much a known value is larger than another, or None."""
  a, b = first.identity, second.identity
  if not (a and b and a.is_sure and b.is_sure):
    return None
  # A counter and the next one are compared, as in a schedule.
  more, less = formed(b, "plus one"), undone(b, "plus one")
  return {b: 0, more: 1, less: -1}.get(a)


def _added(operation: Operation) -> Identity | None:
  """Returns the identity of a sum in which only one part matters."""
  inputs, is_sum = operation.inputs, operation.row.form is Form.PLUS
  counts = is_sum and not leaves.is_gradient(operation.before)
  for value, other in (inputs, inputs[::-1])[: 1 + is_sum]:
    if counts and value.identity and other.constant == 1:
      return formed(value.identity, "plus one")
    # 0 times what is unknown is 0, or NaN.
    if other.degree == ANY and value.identity:
      return perhaps([value])
  return None


def _reshaped(operation: Operation) -> Identity | None:
  """Returns the identity of a reshaped array, and of one reshaped back."""
  identity = operation.inputs[0].identity
  before, after = operation.before, operation.after
  if identity is None or before.size != after.size:
    return None
  if before.shape == after.shape:
    return identity
  # Of several shapes in a row the first is the one to come back to.
  is_reshaped = identity.forms and identity.forms[-1][0] == "shape"
  kept = identity if is_reshaped else formed(identity, "shape", before.shape)
  return undone(identity, "shape", after.shape) or kept


def cast(operation: Operation) -> Identity | None:
  """Returns the identity of a number in a dtype that holds it, and back."""
  before, after = operation.before.dtype, operation.after.dtype
  identity = operation.inputs[0].identity
  is_held = formats.holds(after, before)
  wider = formed(identity, "cast", before) if is_held else None
  return undone(identity, "cast", after) or wider


def _masked(operation: Operation) -> Identity | None:
  """Returns the identity of a product such as that with a mask."""
  are_all = all(x.identity for x in operation.inputs)
  return perhaps(operation.inputs) if are_all else None


_RULES: Mapping[Form, Callable[[Operation], Identity | None]] = {
  Form.WRAPS: lambda x: undone(x.inputs[0].identity, "data"),
  Form.UNWRAPS: lambda x: formed(x.inputs[0].identity, "data"),
  Form.RESHAPES: _reshaped,
  Form.PLUS: _added,
  Form.MINUS: _added,
  Form.TIMES: _masked,
}
