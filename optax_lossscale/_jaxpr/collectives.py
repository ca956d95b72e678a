"""Operations whose result on one device depends on the values of others."""

from collections.abc import Hashable
from collections.abc import Iterator

from jax.extend import core

from optax_lossscale._jaxpr import calls

# Those that add up values, and those that move or choose them.
SUMS = frozenset({"psum", "psum_invariant", "reduce_scatter"})
EXCHANGES = frozenset(
  {
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "pmax",
    "pmin",
    "ppermute",
    "ragged_all_to_all",
  }
)
BETWEEN_DEVICES = SUMS | EXCHANGES


def axes(jaxpr: core.Jaxpr) -> Iterator[Hashable]:
  """Yields the axes along which a jaxpr combines the values of devices."""
  for equation in calls.close(jaxpr).jaxpr.eqns:
    if equation.primitive.name in BETWEEN_DEVICES:
      parameters = equation.params
      found = parameters.get("axes", parameters.get("axis_name"))
      yield from found if isinstance(found, (tuple, list)) else (found,)
    for body in calls.bodies(equation):
      yield from axes(body.jaxpr)
