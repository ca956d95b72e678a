"""Who is compared: this library, its peers, and the bare optimizers."""

from collections.abc import Callable
import importlib.util
from typing import NamedTuple

from benchmarks.peers import bare
from benchmarks.peers import jax_libraries
from benchmarks.peers import keras_on_jax
from benchmarks.peers import pytorch
from benchmarks.peers import this_library
from benchmarks.peers.contender import Contender


class Peer(NamedTuple):
  """One of those who are compared.

  Attributes:
    make: makes the contender; it imports what it needs. The makers of "bare"
      and "optax_lossscale" take another optimizer.
    needs: the modules that it imports, beside JAX and optax.
    baseline: whose time its own is divided by; its own optimizer, bare.
  """

  make: Callable[..., Contender]
  needs: tuple[str, ...] = ()
  baseline: str = "bare"

  @property
  def is_installed(self) -> bool:
    """Whether everything it needs is there."""
    return all(map(importlib.util.find_spec, self.needs))


PEERS = {
  "bare": Peer(bare.bare),
  "one more read": Peer(bare.one_more_read),
  "optax_lossscale": Peer(this_library.loss_scaling),
  "lax.cond": Peer(this_library.under_cond),
  "flax": Peer(jax_libraries.flax_dynamic_scale, ("flax",)),
  "jmp": Peer(jax_libraries.jmp_loss_scale, ("jmp",)),
  "mpx": Peer(jax_libraries.mpx_loss_scaling, ("mpx", "equinox")),
  "apply_if_finite": Peer(jax_libraries.optax_apply_if_finite),
  "keras bare": Peer(keras_on_jax.bare, ("keras",), "keras bare"),
  "keras": Peer(keras_on_jax.loss_scale_optimizer, ("keras",), "keras bare"),
  "torch bare": Peer(pytorch.bare, ("torch",), "torch bare"),
  "torch": Peer(pytorch.grad_scaler, ("torch",), "torch bare"),
}
