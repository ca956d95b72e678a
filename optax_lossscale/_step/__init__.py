"""One step: scaled gradients, the check, the update or the skip, the next S."""
