"""Functions as JAX records them, evaluated again with something changed."""

from optax_lossscale.jaxpr._select import select_at_definition

__all__ = ["select_at_definition"]
