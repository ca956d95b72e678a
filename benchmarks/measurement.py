"""One case: every contender compiled, checked, and run in turns."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import itertools
import random

from benchmarks import cases
from benchmarks import checks
from benchmarks import compilation
from benchmarks import memory
from benchmarks import patience
from benchmarks import rounds
from benchmarks.peers import PEERS
from benchmarks.peers.contender import Contender


@dataclasses.dataclass(frozen=True)
class Plan:
  """How often, and in what orders.

  Attributes:
    rounds: how often each contender makes a step.
    compilations: how often it is compiled.
    patience: seconds that a compilation may take.
    seed: of the orders.
  """

  rounds: int
  compilations: int
  patience: float = 120.0
  seed: int = 0


@dataclasses.dataclass
class Result:
  """What is known of a contender in a case.

  Attributes:
    name: the contender's.
    problem: why it was not measured; empty if it was.
    check: None for a bare optimizer, which neither unscales nor skips.
    compilations: empty for one that is not compiled.
    seconds: of a step, in each round.
  """

  name: str
  problem: str = ""
  check: checks.Check | None = None
  compilations: list[compilation.Compilation] = dataclasses.field(
    default_factory=list
  )
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

  def __init__(
    self, case: cases.Case, names: Sequence[str], plan: Plan
  ) -> None:
    self.results = {name: Result(name) for name in names}
    self.contenders: dict[str, Contender] = {}
    self._params = case.make_params()
    self._gradients = case.make_scaled_gradients()
    for name, result in self.results.items():
      if not PEERS[name].is_installed:
        result.problem = "not installed"
        continue
      with result.attempt():
        contender = PEERS[name].make()
        if case.gradients not in contender.gradient_dtypes:
          result.problem = f"does not take {case.gradients} gradients"
          continue
        if patience.is_exhausted(name, case, plan.patience):
          result.problem = (
            f"to compile it takes more than {plan.patience:g} s, or than the "
            "memory there is"
          )
          continue
        contender.start(self._params)
        self.contenders[name] = contender

  def compile(self, plan: Plan) -> None:
    """Compiles each of them as often as planned, in turns."""
    for contender in itertools.islice(self.contenders.values(), 1):
      # The first compilation of a process starts XLA as well.
      contender.compile(self._gradients)
    generator = random.Random(plan.seed)
    for _ in range(plan.compilations):
      for name in generator.sample(list(self.contenders), len(self.contenders)):
        with self.results[name].attempt():
          cost = self.contenders[name].compile(self._gradients)
          if cost is not None:
            self.results[name].compilations.append(cost)
      self._drop_those_with_a_problem()

  def check(self) -> None:
    """Compares each of them with the bare optimizer, and lets it overflow."""
    unscaled = cases.unscaled(self._gradients)
    overflowing = cases.overflowing(self._gradients)
    expected = functools.cache(
      lambda name: self.contenders[name].reference(self._params, unscaled)
    )
    for name, contender in self.contenders.items():
      with self.results[name].attempt():
        if contender.unscales:
          self.results[name].check = checks.check(
            contender,
            params=self._params,
            gradients=self._gradients,
            overflowing=overflowing,
            expected=expected(PEERS[name].baseline),
          )
      memory.release()
    self._drop_those_with_a_problem()

  def run(self, plan: Plan) -> None:
    """Lets them make their steps, in turns, from the first parameters on."""
    for contender in self.contenders.values():
      contender.start(self._params)
      memory.release()
    turns = {
      name: rounds.Turn(
        run=functools.partial(contender.step, self._gradients),
        prepare=functools.partial(contender.prepare, self._gradients),
      )
      for name, contender in self.contenders.items()
    }
    seconds = rounds.interleave(turns, plan.rounds, seed=plan.seed)
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
  case: cases.Case, names: Sequence[str], plan: Plan
) -> dict[str, Result]:
  """Returns what came out for each contender, measured or not.

  Args:
    case: the parameters and gradients.
    names: of contenders, in the table's order.
    plan: how often.
  """
  field = _Field(case, names, plan)
  try:
    field.compile(plan)
    field.check()
    field.run(plan)
  finally:
    field.stop()
  return field.results
