"""What a loop leaves, by induction over its rounds.

What is said of a carried value must hold before the first round, and a round
that is given it must give it back: then it holds after any number of rounds.
So the body is interpreted with what holds at the start; where it gives back
less, both are joined, and the body is interpreted again, until nothing changes.
A join only forgets, and there is little to forget, so that ends soon; if it
does not, nothing is claimed.

An S that moves in the loop is another one in each round. In

  for batch in batches:             # S is S0 at the start, then S1, S2 ...
    grads = grad(S * loss(params, batch))
    params -= rate * grads / S      # grows as S / S: free of it
    S = next_scale(S, grads)

"grows as S" would be said of nothing that is carried, since S0 is not S1. So
the S of a round gets a symbol R of its own. The hypothesis is what the start
says with R for S0; the body gives what grows with R and with the next S, N; and
what it gives back is the hypothesis of the next round once N is called R. That
renaming is sound if R itself is not kept: a value that still grows with the R of
the round before would be wrong by R / N in the next one, and is the mistake that
the proof looks for. `kept` says so. After the last round R is called "the S
after the loop", which nothing outside has.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import dataclasses

from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _transfer
from optax_lossscale.instruments.step._degrees import Place
from optax_lossscale.instruments.step._degrees import Symbol
from optax_lossscale.instruments.step._degrees import Unknown
from optax_lossscale.instruments.step._values import Value
from optax_lossscale.instruments.step._values import Values

_MOST_ROUNDS = 16

# Interprets a round, given what it is given of the round before, and returns
# what it passes on and what it leaves for itself.
Body = Callable[[Values], tuple[Values, Values]]


@dataclasses.dataclass
class _Loop:
  """A loop, and the S that moves in it.

  Attributes:
    place: the loop.
    outside: the S that are there before the loop, and stay.
    rounds: the S of each round, by its position among the carried values.
  """

  place: Place
  outside: set[Symbol]
  rounds: dict[int, Symbol] = dataclasses.field(default_factory=dict)

  def moving(self, carry: Values, outputs: Values) -> dict[int, Symbol]:
    """Returns a symbol for each S that was not known to move."""
    return {
      i: Symbol("the S of a round", (self.place, i))
      for i, (old, new) in enumerate(zip(carry, outputs, strict=True))
      if i not in self.rounds and old.scale and new.scale
      if old.degree != new.degree and old.units and new.units
    }

  def first(self, start: Values) -> list[Value]:
    """Returns what the first round is given, with the S of a round."""
    begins = {_symbol(start[i]): x for i, x in self.rounds.items()}
    carry = [self.rename(x, begins) for x in start]
    for i in self.rounds:
      # Later it is not the S that the loop was given.
      carry[i] = carry[i].but(identity=None)
    return carry

  def following(self, outputs: Values) -> list[Value]:
    """Returns what the next round is given: the next S is that of a round."""
    ends = {
      _symbol(outputs[i]): x
      for i, x in self.rounds.items()
      if len(outputs[i].units) == 1
    }
    return [self.rename(x, ends) for x in outputs]

  def rename(
    self,
    value: Value,
    names: Mapping[Symbol, Symbol],
    known: Collection[Symbol] | None = None,
  ) -> Value:
    """Returns a value as another round sees it; other S are no more."""
    stay = self.outside if known is None else known

    def change(unit: _degrees.Unit) -> _degrees.Unit | None:
      symbol, axes = unit
      is_known = symbol in stay or symbol in names
      return (names.get(symbol, symbol), axes) if is_known else None

    degree = _degrees.rename(value.degree, change)
    if degree is None:
      degree = _kept(value, self.place)
    return value.but(degree=degree)


def _symbol(value: Value) -> Symbol:
  """Returns the S that a value grows with first."""
  return value.units[0][0]


def _kept(value: Value, place: Place) -> Unknown:
  """Returns the degree of what is kept although it grows with an old S."""
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
  """Returns what a loop carries in the end, and what its rounds leave.

  Args:
    place: the loop.
    start: what it carries at the start.
    others: the other values that its body reads.
    body: interprets a round.
    members: the S that each round is given one of.
    runs: whether there is a round at all.
  """
  loop = _Loop(place, {x for v in (*start, *others) for x, _ in v.units})
  carry = following = [*start]
  for _ in range(_MOST_ROUNDS):
    outputs, given = body(carry)
    if moving := loop.moving(carry, outputs):
      loop.rounds |= moving
      carry = loop.first(start)
      continue
    following = loop.following(outputs)
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
  # A loop that runs ends with what its body gives.
  finished = following if runs else carry
  return _finished(loop, finished, outputs, given, members)


def _finished(
  loop: _Loop,
  carry: Values,
  outputs: Values,
  given: Values,
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
  # What a round leaves may be of the members that it is given.
  known |= {*members}
  return end, [loop.rename(x, {}, known) for x in given]
