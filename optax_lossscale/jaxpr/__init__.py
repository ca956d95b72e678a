"""Functions as JAX records them, evaluated again with something changed."""

from optax_lossscale.jaxpr._autocast import autocast
from optax_lossscale.jaxpr._float_status import float_status
from optax_lossscale.jaxpr._full_precision import in_full_precision
from optax_lossscale.jaxpr._full_precision import without_autocast
from optax_lossscale.jaxpr._record import check_unchanged
from optax_lossscale.jaxpr._record import is_recording
from optax_lossscale.jaxpr._saturating import saturating
from optax_lossscale.jaxpr._select import select_at_definition

__all__ = [
  "autocast",
  "check_unchanged",
  "float_status",
  "in_full_precision",
  "is_recording",
  "saturating",
  "select_at_definition",
  "without_autocast",
]
