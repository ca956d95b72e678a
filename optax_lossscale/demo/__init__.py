"""What `optax-lossscale train` trains, how, and what it tells about it."""
