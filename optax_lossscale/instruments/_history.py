"""What is kept of the steps of a run, as arrays on the host."""

from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_lossscale._base import arguments


class History(NamedTuple):
  """Some steps of a run in their order: what the rule saw, and the S it gave.

  `history` makes one of what `record` kept, `read_history` of a file; `replay`,
  `advise` and the pictures of `plot` take it.

  Attributes:
    step: int64[n], from 1; skipped steps count.
    loss_scale: float32[n], the S that the step used.
    amax: float32[n], the largest absolute value among its scaled gradients; NaN
      if one of them was NaN.
    overflow: bool[n], whether they were unusable.

  Examples:
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> history = ols.instruments.History(
    ...   step=np.array([1, 2]),
    ...   loss_scale=np.float32([1024.0, 1024.0]),
    ...   amax=np.float32([65504 / 4, np.inf]),
    ...   overflow=np.array([False, True]),
    ... )
    >>> print(history.headroom())
    [ 2. nan]
  """

  step: npt.NDArray[Any]
  loss_scale: npt.NDArray[Any]
  amax: npt.NDArray[Any]
  overflow: npt.NDArray[Any]

  @property
  def unscaled_amax(self) -> npt.NDArray[np.float64]:
    """float64[n], amax / S."""
    amax = np.asarray(self.amax, np.float64)
    return amax / np.asarray(self.loss_scale, np.float64)

  def headroom(self, dtype: Any = jnp.float16) -> npt.NDArray[np.float64]:
    """Returns how many more doublings of S each step would have stood.

    Args:
      dtype: the computation's dtype.

    Returns:
      float64[n], in bits; NaN where amax is inf or NaN, which tells nothing,
      and inf where it is 0.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype.
    """
    found, name = arguments.read_dtype(dtype)
    if found is None:
      raise TypeError(
        "`dtype` must be a floating-point dtype such as jnp.float16, got "
        f"{name}."
      )
    amax = np.asarray(self.amax, np.float64)
    with np.errstate(divide="ignore"):
      headroom = np.log2(float(jnp.finfo(found).max) / amax)
    return np.asarray(np.where(np.isfinite(amax), headroom, np.nan))
