"""Hardware that saturates: status registers, and its rehearsal."""
