"""Compiles programs for a target that is not here, in a process of its own.

`compiling.py` starts it with the Python of an environment that holds XLA's
compilers. There only JAX is installed, so nothing of this library is imported.
"""

import base64
import collections
import contextlib
from importlib import metadata
import itertools
import json
import math
import pathlib
import sys

import jax
from jax import export
from jax.experimental import topologies
import numpy as np


def main(path: pathlib.Path) -> None:
  """Replaces a job by what is found, after each of its programs."""
  job = json.loads(path.read_text())
  if (here := metadata.version("jax")) != job["jax"]:
    sys.exit(
      f"they are for jax {here}, and jax {job['jax']} is here; make them again."
    )
  packages = (
    *("jax", "jaxlib", "libtpu"),
    *("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"),
  )
  versions = {x: metadata.version(x) for x in packages}
  found: dict[str, object] = {}
  path.write_text(json.dumps({"versions": versions, "found": found}))
  for name, program in job["programs"].items():
    try:
      found[name] = _compile(job["topology"], job["options"], **program)
    except Exception as error:  # XLA says in many types why it cannot.
      found[name] = {"error": f"{error}".strip() or repr(error)}
    path.write_text(json.dumps({"versions": versions, "found": found}))


def _compile(
  topology: dict[str, str],
  options: dict[str, str],
  *,
  exported: str,
  donated: list[int],
  axes: dict[str, tuple[int, str]],
) -> dict[str, str | int]:
  """Compiles one exported program, and returns its texts and its memory."""
  program = export.deserialize(bytearray(base64.b64decode(exported)))
  axes = axes or {"device": (1, "Auto")}
  sizes = [size for size, _ in axes.values()]
  count = math.prod(sizes)
  if topology["platform"] == "cuda":
    topology = {**topology, "topology": f"1x1x{count}"}
  devices = topologies.get_topology_desc(**topology).devices
  if count > len(devices):
    raise ValueError(
      f"{topology['topology_name']} has {len(devices)} devices, and the mesh "
      f"of the arguments {count}; name a larger one, as in 'v5e:16x16'."
    )
  mesh = jax.sharding.Mesh(
    np.array(devices[:count]).reshape(sizes),
    tuple(axes),
    axis_types=tuple(jax.sharding.AxisType[x] for _, x in axes.values()),
  )
  everywhere = jax.NamedSharding(mesh, jax.P())
  # A program without arguments would be compiled for the CPU.
  is_constant = not program.in_avals
  with jax.set_mesh(mesh) if is_constant else contextlib.nullcontext():
    lowered = jax.jit(program.call, donate_argnums=donated).lower(
      *(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or everywhere)
        for x, sharding in zip(
          program.in_avals, program.in_shardings_jax(mesh), strict=True
        )
      )
    )
  _number(lowered)
  try:
    compiled = lowered.compile(options)
  except Exception as error:
    # Some parts of a pod of TPUs are not a topology of their own.
    if 1 < count < len(devices) and "RESOURCE" not in f"{error}":
      raise ValueError(
        f"{topology['topology_name']} has {len(devices)} devices, and the mesh "
        f"of the arguments {count}; name one of that size, as in 'v5e:2x2'. "
        f"XLA says: {error}"
      ) from error
    raise
  memory = compiled.memory_analysis()
  assert memory is not None
  return {
    "before": lowered.as_text("hlo", debug_info=True),
    "after": compiled.as_text(),
    "arguments": memory.argument_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
    "reused": memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
  }


def _number(lowered: jax.stages.Lowered) -> None:
  """Numbers the operations in their names, which XLA keeps for their parts."""
  module = lowered.compiler_ir()
  assert module is not None
  functions = {
    x.attributes["sym_name"].value: x
    for x in module.body.operations
    if x.operation.name == "func.func"
  }
  called = collections.Counter[str]()
  numbers = itertools.count()
  parents = [functions["main"].operation]
  for parent in parents:
    blocks = [block for region in parent.regions for block in region.blocks]
    for operation in itertools.chain(*(block.operations for block in blocks)):
      x = operation.operation
      place = x.location
      name = getattr(place, "name_str", "")
      if x.name == "func.call":
        callee = x.attributes["callee"]
        function = functions[callee.value]
        called[callee.value] += 1
        # Each call gets a copy of its function, as XLA gives it.
        if called[callee.value] > 1:
          function = function.operation.clone()
          module.body.append(function)
          symbol = function.attributes["sym_name"]
          new = f"{callee.value} {called[callee.value]}"
          with x.context:
            function.attributes["sym_name"] = symbol.get(new)
            x.attributes["callee"] = callee.get(new)
        parents.append(function.operation)
      # The name of a call comes before those of what it calls.
      elif name:
        with x.context:
          name = f"{name.partition('#')[0]}#{next(numbers)}"
          x.location = place.name(name, place.child_loc)
      parents.append(x)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
