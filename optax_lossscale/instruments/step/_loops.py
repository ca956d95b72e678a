"""The results of a loop, by induction over its rounds."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import dataclasses

from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _transfer
from optax_lossscale.instruments.step._values import Place
from optax_lossscale.instruments.step._values import Symbol
from optax_lossscale.instruments.step._values import Unit
from optax_lossscale.instruments.step._values import Unknown
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

_MOST_ROUNDS = 16

# Interprets a round with the values that the round before passes on. Returns
# those that it passes on, and those that only the loop's result has.
Body = Callable[[Values], tuple[Values, Values]]


# What is said of a carried value must be true before the first round, and a
# round that is given it must give it back: then it is true after any number of
# rounds. So the body is interpreted with what is true at the start. Where it
# gives back less, both are joined, and the body is interpreted again, until
# nothing changes. A join only forgets, so a few rounds are enough; if they are
# not, nothing is claimed.
#
# But if S moves in the loop, each round has another one:
#
#   for batch in batches:  # S is S0 at first, and later S1, S2 and so on.
#     grads = jax.grad(scaled)(params, batch, S)
#     params -= 0.1 * grads / S  # Grows as S / S, so it does not grow with S.
#     kept = grads  # Grows as the S of this round: a mistake.
#     S = next_scale(S, grads)
#
# S0 is not S1, so no carried value "grows as S" in every round. The S of a
# round therefore gets a symbol of its own, R, as soon as a round is seen to
# move it; what was found before that is thrown away, and the loop starts anew.
# Then the hypothesis is what is true at the start, with R in the place of S0.
# The body returns values that grow with R and with the next S, N. In the next
# round N is the S of the round, so N is called R, and the hypothesis has to be
# true again.
#
# That is sound only if nothing carried still grows with the R of the round
# before, since the next round would divide it by an R that is another number.
# `params` does not grow with it, but `kept` does. Such a value has no degree
# from there on, with the reason that it is kept although S is another. After
# the last round R is "the S after the loop", which is no S of the program
# outside, and it is old, new or either as the body made it.
@dataclasses.dataclass
class _Loop:
  """A loop, and the S that move in it."""

  place: Place
  # The S that are there before the loop, and stay.
  outside: set[Symbol]
  # The S of each round, by its position among the carried values.
  rounds: dict[int, Symbol] = dataclasses.field(default_factory=dict)

  def moving(self, carry: Values, outputs: Values) -> dict[int, Symbol]:
    """Returns a symbol for each S that was not known to move."""
    return {
      i: Symbol("the S of a round", (self.place, i))
      for i, (old, new) in enumerate(zip(carry, outputs, strict=True))
      if i not in self.rounds and old.scale and new.scale
      if old.degree != new.degree and old.units and new.units
    }

  def given(self, carry: Values) -> list[Value]:
    """Returns the inputs of a round, in which each S is called its S."""
    names = {
      carry[i].units[0][0]: x
      for i, x in self.rounds.items()
      if len(carry[i].units) == 1
    }
    return [self.rename(x, names) for x in carry]

  def rename(
    self,
    value: Value,
    names: Mapping[Symbol, Symbol],
    known: Collection[Symbol] | None = None,
  ) -> Value:
    """Returns a value as another round sees it; other S are no more."""
    stay = self.outside if known is None else known

    def change(unit: Unit) -> Unit | None:
      symbol, axes = unit
      is_known = symbol in stay or symbol in names
      return (names.get(symbol, symbol), axes) if is_known else None

    degree = _degrees.rename(value.degree, change)
    if degree is None:
      degree = _kept(value, self.place)
    return value.but(degree=degree)


def _kept(value: Value, place: Place) -> Unknown:
  """Returns the degree of a value that is kept, but grows with an old S."""
  reason = "it is kept from one round of a loop to the next, where S is another"
  source = value.place or place
  return _degrees.mismatch([value.but(place=source)], reason, source)


def run(
  place: Place,
  start: Values,
  others: Values,
  body: Body,
  *,
  members: Collection[Symbol] = (),
  runs: bool = False,
) -> tuple[list[Value], list[Value]]:
  """Returns the last values that a loop carries, and its other results."""
  # The body also reads `others`, and is given one of the S of `members`. `runs`
  # says whether there is a round at all.
  loop = _Loop(place, {x for v in (*start, *others) for x, _ in v.units})
  carry = following = [*start]
  for _ in range(_MOST_ROUNDS):
    outputs, left = body(carry)
    if moving := loop.moving(carry, outputs):
      loop.rounds |= moving
      carry = loop.given(start)
      # In later rounds these are not the S that the loop is given.
      for i in loop.rounds:
        carry[i] = carry[i].but(identity=None)
      continue
    following = loop.given(outputs)
    joined = [
      _transfer.join(x, place, "are carried by a loop")
      for x in zip(carry, following, strict=True)
    ]
    if joined == carry:
      break
    carry = joined
  else:
    reason = "a loop carries values that no rule settles"
    degree = Unknown(reason, False, place)
    carry = following = [x.but(degree=degree) for x in carry]
  # A loop with a round ends with its body's results.
  finished = following if runs else carry
  return _finished(loop, finished, outputs, left, members)


def _finished(
  loop: _Loop,
  carry: Values,
  outputs: Values,
  left: Values,
  members: Collection[Symbol],
) -> tuple[list[Value], list[Value]]:
  """Returns what is left of a loop, in which the S of a round is no more."""
  after = {
    symbol: Symbol("the S after the loop", (loop.place, i, "after"))
    for i, symbol in loop.rounds.items()
  }
  known = loop.outside - {*loop.rounds.values()}
  end = [loop.rename(x, after, known).but(key=object()) for x in carry]
  for i in loop.rounds:
    end[i] = end[i].but(scale=outputs[i].scale)
  # The other results may grow with the S of the members.
  known |= {*members}
  return end, [loop.rename(x, {}, known) for x in left]
