"""Operations whose result on one device depends on the values of others."""

from collections.abc import Hashable
from collections.abc import Iterator

from jax.extend import core

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr.operations import Flag

BETWEEN_DEVICES = Flag.SUMS | Flag.EXCHANGES


def axes_of(equation: core.JaxprEqn) -> tuple[Hashable, ...]:
  """Returns the axes, of arrays or between devices, that an operation names."""
  found = equation.params.get("axes", equation.params.get("axis_name", ()))
  is_several = isinstance(found, (tuple, list, frozenset))
  return tuple(found) if is_several else (found,)


def axes(jaxpr: core.Jaxpr) -> Iterator[Hashable]:
  """Yields the axes along which a jaxpr combines the values of devices."""
  for equation in calls.close(jaxpr).jaxpr.eqns:
    if operations.of(equation).flags & BETWEEN_DEVICES:
      yield from axes_of(equation)
    for body in calls.bodies(equation):
      yield from axes(body.jaxpr)
