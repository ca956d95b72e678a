"""Functions that their author marks as safe in 16 bits, such as kernels.

`autocast` cannot look into a kernel, and some kernels refuse float32. So it
records a marked function with 16-bit inputs and leaves its operations alone.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import inspect
import itertools
from typing import ParamSpec
from typing import TypeVar

import jax
from jax import lax
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import scopes

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


# While `autocast` records a function: the dtypes that its marked calls may have,
# the usual one first. JAX's caches depend on it.
_around = jax.make_user_context(None)


def cast_inputs(
  fun: Callable[_P, _R] | None = None,
  *,
  argnums: int | Sequence[int] | None = None,
) -> Callable[..., Any]:
