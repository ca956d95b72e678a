"""What a figure was measured on: the machine, versions, commit and date."""

from collections.abc import Mapping
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

_PACKAGES = (
  "jax",
  "jaxlib",
  "optax",
  "flax",
  "optax-lossscale",
  "jmp",
  "mixed-precision-for-JAX",
  "equinox",
  "keras",
  "torch",
  "numpy",
)
_ROOT = pathlib.Path(__file__).parents[1]


def describe() -> dict[str, Any]:
  """Returns the machine, the versions, the commit and the date.

  Returns:
    A dict for JSON: `cpu` is the model, `cores` how many this process may use,
    `device` what JAX computes on. In `versions`, a package that is not
    installed is None. `commit` ends in "-dirty" if a file differs from it, and
    is None outside a clone. `date` is in UTC.
  """
  return {
    "cpu": _cpu_model(),
    "cores": _cores(),
    "device": jax.devices()[0].device_kind,
    "system": platform.platform(terse=True),
    "python": platform.python_version(),
    "versions": {name: _version(name) for name in _PACKAGES},
    "commit": _commit(),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def summary() -> dict[str, str]:
  """Returns the date, the machine and the versions that JAX depends on."""
  described = describe()
  used = ("jax", "jaxlib", "flax", "optax", "optax-lossscale", "numpy")
  versions = [f"{name} {described['versions'][name]}" for name in used]
  return {
    "date": described["date"],
    "machine": f"{described['cpu']}; JAX computes on: {described['device']}",
    "versions": f"Python {described['python']}, {', '.join(versions)}",
  }


def headline(description: Mapping[str, Any]) -> str:
  """Returns the description in a few lines for people.

  Args:
    description: what `describe` returned.
  """
  versions = description["versions"].items()
  installed = [f"{name} {version}" for name, version in versions if version]
  missing = [name for name, version in versions if not version]
  lines = [
    f"{description['cpu']}, {description['cores']} cores; "
    f"JAX computes on: {description['device']}",
    f"Python {description['python']}, {', '.join(installed)}",
  ]
  if missing:
    lines.append(f"not installed: {', '.join(missing)}")
  lines.append(f"commit {description['commit'] or 'unknown'}")
  return "\n".join([*lines, description["date"]])


def _cpu_model() -> str:
  # `platform.processor` is empty or "x86_64" on Linux.
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
  except OSError:
    text = ""
  for line in text.splitlines():
    key, _, value = line.partition(":")
    if key.strip() == "model name":
      return value.strip()
  return platform.processor() or platform.machine()


def _cores() -> int:
  # What the machine has may be more than what this process was given.
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _commit() -> str | None:
  # Of this very folder, and not of a clone that it happens to be in.
  words = ["git", f"--git-dir={_ROOT}/.git", f"--work-tree={_ROOT}"]
  words += ["describe", "--always", "--dirty", "--exclude=*"]
  try:
    done = subprocess.run(words, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
