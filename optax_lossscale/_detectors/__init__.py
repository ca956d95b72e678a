"""Status registers, and an emulation of hardware that saturates."""
