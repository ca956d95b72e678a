"""XLA's compilers for targets that are not here, in another environment.

With the CUDA plugin installed, JAX believes that there is a GPU. So each
compilation runs in another process, and only this module starts any.
"""

import base64
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import functools
import importlib
from importlib import metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import Any
from typing import NamedTuple

import jax

from optax_lossscale._base import arguments

VARIABLE = "OPTAX_LOSSSCALE_COMPILERS"
_HERE = pathlib.Path(__file__).parent
# Those of the user's settings would change what is compiled, or for what.
_SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "PYTHON")
_OWN_SETTINGS = {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


# The texts and bytes of a compiled program by name, or its `error`.
Outcome = Mapping[str, Any]
# A program, and what `_compile_child.py` must know of it; or else its `error`.
Exported = tuple[bytes, Mapping[str, object]]


class Target(NamedTuple):
  """A kind of device to compile for."""

  name: str  # As the user writes it, such as "h200" or "v5e:16x16".
  usable_memory: int  # What JAX takes of one device by default, in bytes.
  # What its products round float32 to, unless JAX asks for more; an empty
  # string if to nothing.
  default_precision: str
  topology: Mapping[str, str]  # The arguments of `get_topology_desc`.

  @property
  def platform(self) -> str:
    """As JAX calls it, "cuda" or "tpu"."""
    return self.topology["platform"]


def read_targets(names: str | Sequence[str]) -> list[Target]:
  """Returns the targets of names such as "h200" or "v5e:16x16"."""
  if isinstance(names, str):
    names = [x.strip() for x in names.split(",")]
  # An error about anything else, or about no names at all, shows it whole.
  listed: list[object] = [names]
  if isinstance(names, Sequence | Set) and names:
    listed = [*names]
  return [*{x.name: x for x in map(_read_target, listed)}.values()]


def _read_target(name: object) -> Target:
  kind, _, size = str(name).partition(":")
  known = _data()["targets"]
  found = known.get(kind, {})
  is_size = re.fullmatch(r"\d+(x\d+)+", size) and "size" in found
  if not found or (size and not is_size):
    raise ValueError(
      f"`targets` must be of {', '.join(known)}, a TPU perhaps with its size "
      f"as in 'v5e:16x16', got {arguments.shown(name)}"
      f"{arguments.did_you_mean(kind, known) or '.'}"
    )
  memory = found["memory"]
  if "size" in found:
    place = f"{kind}:{size or found['size']}"
    topology = {"platform": "tpu", "topology_name": place}
    return Target(str(name), memory, "bfloat16", topology)
  card = _data()["card"].format(**found)
  topology = {"platform": "cuda", "topology_name": "", "target_config": card}
  # Tensor cores have had TF32 since Ampere.
  precision = "TF32" if found["major"] >= 8 else ""
  return Target(str(name), memory * 3 // 4, precision, topology)


@functools.cache
def _data() -> Mapping[str, Any]:
  return tomllib.loads((_HERE / "targets.toml").read_text(encoding="utf-8"))


def find_python(folder: str | os.PathLike[str] | None) -> pathlib.Path:
  """Returns the Python that has the compilers, and imports flatbuffers."""
  if folder is not None:
    folder = arguments.check_file("compilers", folder)
  folder = folder or os.environ.get(VARIABLE) or ""
  packages = "libtpu", "jax_cuda12_plugin", "flatbuffers"
  if not folder and all(map(importlib.util.find_spec, packages)):
    return pathlib.Path(sys.executable)
  path = os.path.join(os.path.expanduser(folder), "bin", "python")
  python = pathlib.Path(path).absolute()
  if not (folder and python.exists()):
    got = f"got {os.fspath(folder)!r}" if folder else f"{VARIABLE} is not set"
    raise RuntimeError(
      f"XLA's compilers must be installed, {got}; run `optax-lossscale doctor "
      "--make-compilers FOLDER` once, and pass compilers=FOLDER or set "
      f"{VARIABLE}=FOLDER."
    )
  # `jax.export` needs flatbuffers, which is Python alone.
  places = [*map(str, python.parents[1].glob("lib/python*/site-packages"))]
  sys.path += places
  try:
    importlib.import_module("flatbuffers")
  except ImportError:
    raise RuntimeError(
      f"XLA's compilers must be whole, got {os.fspath(folder)!r} without "
      "flatbuffers; make them again, in a new folder."
    ) from None
  finally:
    del sys.path[len(sys.path) - len(places) :]
  return python


def make(folder: str, announce: Callable[[str], None]) -> str:
  """Makes an environment of compilers for this JAX, and returns its folder."""
  machine = f"{sys.platform} {platform.machine()}"
  if machine != "linux x86_64":
    raise RuntimeError(f"XLA's compilers need Linux on x86-64, got {machine}.")
  folder = os.path.abspath(os.path.expanduser(folder))
  if os.path.lexists(folder):
    raise RuntimeError(
      f"The folder of the compilers must be new, got {folder}: with them, a "
      "JAX in it would believe that there is a GPU."
    )
  announce(folder)
  extra = [x.split(";") for x in metadata.requires("optax-lossscale") or ()]
  needed = [x for x, *marker in extra if "compile" in str(marker)]
  pip = [os.path.join(folder, "bin", "pip"), "install", "--quiet"]
  for command in (
    [sys.executable, "-m", "venv", folder],
    [*pip, f"jax=={metadata.version('jax')}", *needed],
  ):
    if subprocess.run(command).returncode:
      raise RuntimeError(
        f"This must succeed, but failed: {shlex.join(command)}"
      )
  return folder


def compile_for(
  target: Target,
  programs: Mapping[str, Exported],  # By name.
  *,
  python: pathlib.Path,  # It has the compilers.
  options: Mapping[str, object],  # Of the compiler.
) -> tuple[dict[str, str], dict[str, Outcome]]:
  """Compiles programs, and returns the versions and what became of each."""
  job = {
    "jax": metadata.version("jax"),
    "topology": target.topology,
    "options": options,
    "programs": {
      name: {"exported": base64.b64encode(exported).decode(), **about}
      for name, (exported, about) in programs.items()
      if exported
    },
  }
  kept = {x: y for x, y in os.environ.items() if not x.startswith(_SETTINGS)}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "job.json")
    path.write_text(json.dumps(job))
    start = time.monotonic()
    names = " and ".join(programs)
    sys.stderr.write(f"Compiling the {names} for {target.name} ...")
    sys.stderr.flush()
    # It ends the other process, too, if this one is interrupted.
    done = subprocess.run(
      [python, "-I", _HERE / "_compile_child.py", path],
      env=kept
      | _OWN_SETTINGS
      | {"JAX_ENABLE_X64": str(jax.config.jax_enable_x64)},
      capture_output=True,
      text=True,
      errors="replace",
    )
    sys.stderr.write(f" {time.monotonic() - start:.0f} s\n")
    result = json.loads(path.read_text())
  said = [x for x in done.stderr.splitlines() if x.strip()] or ["no message"]
  if "versions" not in result:
    raise RuntimeError(
      f"The compilers of {python.parents[1]} must start, got: {said[-1]} "
      "`optax-lossscale doctor --make-compilers FOLDER` makes some."
    )
  ended = f"the compiler ended with status {done.returncode}: {said[-1]}"
  found = result["found"]
  return result["versions"], {
    name: found.get(name) or {"error": about.get("error", ended)}
    for name, (_, about) in programs.items()
  }
