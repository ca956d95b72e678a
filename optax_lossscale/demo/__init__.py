"""The models, the data and the reports of `optax-lossscale train`."""
