"""For each law of a step, the stronger evidence: its proof or its runs."""

from collections.abc import Sequence
from typing import NamedTuple

from optax_lossscale.instruments import _verdicts
from optax_lossscale.instruments._verdicts import Law


class Proved(NamedTuple):
  """What a proof says of one law.

  Attributes:
    law: the law's name.
    verdict: "proved", "refuted", "unknown" or "not applied".
    text: what was found.
    where: the lines of the program that show it.
    path: the state that it is about, if the step has several.
  """

  law: str
  verdict: str
  text: str
  where: tuple[tuple[str, int, str], ...] = ()
  path: str = ""


_REMEDIES = {
  "scale": _verdicts.INSIDE,
  "arguments": (
    "Give `update` the true loss, true gradients (ols.unscale) or flags that "
    "do not depend on S."
  ),
  "invariance": _verdicts.INSIDE,
  "skip": _verdicts.MOVES,
}
_REPORT = (
  "The proof says that the law holds: please report this step as a bug of "
  "check_step, unless it reads random numbers or files of the host."
)
_HIDDEN = "This batch hides it."
# The laws in the order of a report.
_ORDER = ("scale", "arguments", "invariance", "skip", "precision")


def combine(proofs: Sequence[Proved], laws: Sequence[Law]) -> tuple[Law, ...]:
  """Returns each law by the stronger of its proof and its runs."""
  left = list(laws)
  found: list[Law] = []
  for proof in proofs:
    of_law = [
      x
      for x in left
      if x.name == proof.law and x[1:3] not in _verdicts.OF_THIS_BATCH
    ]
    alike = [x for x in of_law if x.text.startswith(_verdicts.of(proof.path))]
    run = next(iter(alike or of_law), None)
    if run:
      left.remove(run)
    found.append(_stronger(proof, run))
  found += left
  return tuple(sorted(found, key=lambda x: _ORDER.index(x.name)))


def _stronger(proof: Proved, run: Law | None) -> Law:
  """Returns the verdict on a law by its proof, and by runs if there were any."""
  name, text = proof.law, proof.text
  if run and proof.verdict == "not applied":
    return run
  place = _verdicts.of(proof.path)
  if run and place and run.text.startswith(place):
    run = run._replace(text=run.text[len(place) :])
  remedy = (run and run.remedy) or _REMEDIES[name]
  ran = f" In runs: {run.text}" if run else ""
  if proof.verdict == "not applied":
    return Law(name, "not applied", place + text)
  if proof.verdict == "proved":
    if run and run.verdict == "wrong":
      return Law(name, "wrong", f"{place}{run.text} {_REPORT}", run.remedy)
    is_alike = run is None or run.verdict in ("exact", "not applied")
    return Law(name, "proved", place + text + ("" if is_alike else ran))
  if proof.verdict == "unknown":
    if run is None:
      return Law(name, "inconclusive", place + text, remedy, proof.where)
    text = f"{place}{run.text} Not proved: {text}"
    return Law(name, run.verdict, text, run.remedy, proof.where)
  if run is None:
    return Law(name, "wrong", place + text, remedy, proof.where)
  if run.verdict == "wrong":
    return Law(name, "wrong", place + text + ran, remedy, proof.where)
  if name == "skip":
    # Equal values may be written in ways that no proof knows.
    text = f"{text} It is not shown to hold.{ran}"
    return Law(name, "inconclusive", place + text, remedy, proof.where)
  return Law(name, "wrong", f"{place}{text} {_HIDDEN}", remedy, proof.where)
