"""Positional arguments by their numbers: differentiated, or split."""

from typing import Any
from typing import NamedTuple

from optax_lossscale import _arguments


class Places(NamedTuple):
  """Which positional arguments are differentiated, and which are split."""

  differentiated: tuple[int, ...]
  batched: tuple[int, ...]


def find_places(argnums: Any, batch_argnums: Any, count: int) -> Places:
  """Returns the places of arguments, none of them negative.

  Args:
    argnums: what to differentiate with respect to, as in JAX.
    batch_argnums: what to split, or None for all the others.
    count: how many positional arguments there are.

  Raises:
    TypeError: if a number is no integer.
    ValueError: if one names no argument, or one twice, or if there is nothing
      to split.
  """
  differentiated = _positions("argnums", argnums, count)
  if batch_argnums is None:
    batched = tuple(i for i in range(count) if i not in differentiated)
  else:
    batched = _positions("batch_argnums", batch_argnums, count)
  both = sorted({*differentiated} & {*batched})
  if both:
    raise ValueError(
      "`batch_argnums` must name other arguments than `argnums`, got "
      f"{', '.join(map(str, both))} in both."
    )
  if not batched:
    raise ValueError(
      "`fun` must be given a batch beside what it is differentiated by, got "
      f"{count} positional arguments with argnums={argnums!r}; pass the batch "
      "by position."
    )
  return Places(differentiated, batched)


def as_tuple(argnums: Any) -> tuple[Any, ...]:
  """Returns the numbers in what a caller passed.

  Args:
    argnums: a number, or several in a tuple or list.
  """
  return tuple(argnums) if _are_several(argnums) else (argnums,)


def like(argnums: Any, values: tuple[Any, ...]) -> Any:
  """Returns values by argument in the form that JAX has for `argnums`.

  Args:
    argnums: a number, or several in a tuple or list.
    values: one for each number.
  """
  return values if _are_several(argnums) else values[0]


def _are_several(argnums: Any) -> bool:
  return isinstance(argnums, (tuple, list))


def _positions(name: str, argnums: Any, count: int) -> tuple[int, ...]:
  numbers = tuple(
    _arguments.check_integer(name, number, unit="")
    for number in as_tuple(argnums)
  )
  for number in numbers:
    if not -count <= number < count:
      raise ValueError(
        f"`{name}` must name positional arguments of the call, got {number} "
        f"for {count} of them."
      )
  numbers = tuple(number % count for number in numbers)
  if len({*numbers}) < len(numbers):
    raise ValueError(f"`{name}` must name each argument once, got {argnums!r}.")
  return numbers
