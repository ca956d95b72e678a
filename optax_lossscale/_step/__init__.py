"""One training step: scaled gradients, check, update or skip, next S."""
