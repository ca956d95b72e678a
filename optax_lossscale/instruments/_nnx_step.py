"""A step that changes Flax NNX objects in place, as one that returns them."""

from collections.abc import Callable
from collections.abc import Mapping

from flax import nnx
from flax import traverse_util
import jax

from optax_lossscale._base import leaves

# As in `shared`, which loads this file only with Flax.
Step = Callable[[Mapping[str, object]], object]


def returning(
  step: Step, named: dict[str, object]
) -> tuple[Step, dict[str, object], dict[str, leaves.Path]]:
  """Returns a step on plain values, the values, and the outputs of objects."""
  objects = {name: x for name, x in named.items() if _holds_objects(x)}
  changing = _changing(objects)
  if not changing:
    return step, named, {}

  def run(values: Mapping[str, object]) -> object:
    copies: dict[str, object] = nnx.clone(objects, graph=True)
    jax.tree.map(
      lambda variable, value: variable.set_value(value),
      _changing(copies),
      {name: values[name] for name in changing},
      is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    output = step({**values, **copies})
    return nnx.as_pure(_changing(copies)), output

  first = jax.tree_util.SequenceKey(0)
  known: dict[str, leaves.Path] = {
    name: (first, jax.tree_util.DictKey(name)) for name in changing
  }
  return run, named | nnx.as_pure(changing), known


def _holds_objects(tree: object) -> bool:
  """Returns whether a step can change something in `tree` in place."""
  objects = nnx.Pytree, nnx.Variable
  # A step returns the next State of `nnx.split`, like any other pytree.
  ends = *objects, nnx.State
  found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ends))
  return any(isinstance(x, objects) for x in found)


def _changing(named: dict[str, object]) -> dict[str, dict[str, object]]:
  """Returns the parts that a step may change, by argument and path."""
  found: dict[tuple[str, ...], object] = {}
  for place, node in nnx.iter_graph(named, graph=True):
    # Its state is one part, so that the loss scaling in it can be found by its
    # type. Sown values are left out, since they only report on a step.
    if isinstance(node, nnx.Optimizer):
      place, node = (*place, "opt_state"), node.opt_state
    elif not isinstance(node, nnx.Variable) or isinstance(
      node, (nnx.OptState, nnx.Intermediate)
    ):
      continue
    path = [*map(str, place)]
    # The gradients of FP8 statistics take their place, and so follow S.
    kind = type(node).__name__
    if kind in leaves.OVERWRITE_WITH_GRADIENT:
      path.insert(1, kind)
    # An argument that is a variable itself has no key inside.
    found[tuple(path if path[1:] else [*path, ""])] = node
  nested: dict[str, dict[str, object]] = traverse_util.unflatten_dict(found)
  return nested
