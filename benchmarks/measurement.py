"""One case: every contender compiled, checked, and run in turns."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import itertools

from benchmarks import cases
from benchmarks import checks
from benchmarks import compilation
from benchmarks import memory
from benchmarks import patience
from benchmarks import rounds
from benchmarks.peers import PEERS
from benchmarks.peers.contender import Contender


@dataclasses.dataclass
class Result:
  """What is known of a contender in a case.

  Attributes:
    name: the contender's.
    problem: why it was not measured; empty if it was.
    check: None for a bare optimizer, which neither unscales nor skips.
    cost: to compile; None for one that is not compiled.
    seconds: of a step, in each round.
  """

  name: str
  problem: str = ""
  check: checks.Check | None = None
  cost: compilation.Compilation | None = None
  seconds: list[float] = dataclasses.field(default_factory=list)

  @contextlib.contextmanager
  def attempt(self) -> Iterator[None]:
    """Notes what is raised inside: it is a finding, and the others go on."""
    try:
      yield
    except Exception as error:
      self.problem = f"{type(error).__name__}: {error}"


class _Field:
  """The contenders of a case, all of them alive, so that they can take turns.

  Attributes:
    results: of all, also of those that are out.
    contenders: those that are still in.
  """

  def __init__(self, case: cases.Case, names: Sequence[str]) -> None:
    self.results = {name: Result(name) for name in names}
    self.contenders: dict[str, Contender] = {}
    self._params = case.make_params()
    self._scaled_grads = case.make_scaled_grads()
    for name, result in self.results.items():
      if not PEERS[name].is_installed:
        result.problem = "not installed"
        continue
      with result.attempt():
        contender = PEERS[name].make()
        if case.gradients not in contender.gradient_dtypes:
          result.problem = f"does not take {case.gradients} gradients"
          continue
        if patience.is_exhausted(name, case):
          result.problem = (
            f"to compile it takes more than {patience.SECONDS:g} s, or than "
            "the memory there is"
          )
          continue
        contender.start(self._params)
        self.contenders[name] = contender

  def compile(self) -> None:
    """Compiles each of them, and the first one twice."""
    for contender in itertools.islice(self.contenders.values(), 1):
      # The first compilation of a process starts XLA as well.
      contender.compile(self._scaled_grads)
    for name, contender in self.contenders.items():
      with self.results[name].attempt():
        self.results[name].cost = contender.compile(self._scaled_grads)
    self._drop_those_with_a_problem()

  def check(self) -> None:
    """Compares each of them with the bare optimizer, and lets it overflow."""
    unscaled = cases.unscaled(self._scaled_grads)
    overflowing = cases.overflowing(self._scaled_grads)
    expected = functools.cache(
      lambda name: self.contenders[name].reference(self._params, unscaled)
    )
    for name, contender in self.contenders.items():
      with self.results[name].attempt():
        if contender.unscales:
          self.results[name].check = checks.check(
            contender,
            params=self._params,
            scaled_grads=self._scaled_grads,
            overflowing=overflowing,
            expected=expected(PEERS[name].baseline),
          )
      memory.release()
    self._drop_those_with_a_problem()

  def run(self, count: int) -> None:
    """Lets them make their steps, in turns, from the first parameters on."""
    for contender in self.contenders.values():
      contender.start(self._params)
      memory.release()
    turns = {
      name: rounds.Turn(
        run=functools.partial(contender.step, self._scaled_grads),
        prepare=functools.partial(contender.prepare, self._scaled_grads),
      )
      for name, contender in self.contenders.items()
    }
    seconds = rounds.interleave(turns, count)
    for name in turns:
      self.results[name].seconds = seconds[name]

  def stop(self) -> None:
    """Lets go of the memory, which the next case will need."""
    for contender in self.contenders.values():
      contender.stop()
    self.contenders.clear()
    memory.release()

  def _drop_those_with_a_problem(self) -> None:
    for name in list(self.contenders):
      if self.results[name].problem:
        del self.contenders[name]


def measure(
  case: cases.Case, names: Sequence[str], count: int
) -> dict[str, Result]:
  """Returns what came out for each contender, measured or not.

  Args:
    case: the parameters and gradients.
    names: of contenders, in the table's order.
    count: of rounds, in each of which each contender makes a step.
  """
  field = _Field(case, names)
  try:
    field.compile()
    field.check()
    field.run(count)
  finally:
    field.stop()
  return field.results
