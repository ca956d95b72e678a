"""Functions as JAX records them, evaluated again with something changed."""
