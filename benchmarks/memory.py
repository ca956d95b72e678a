"""Memory that is free goes back to the system, for the next one's arrays."""

import ctypes
import gc


def release() -> None:
  """Lets go of all memory that nobody uses.

  Python keeps what is in cycles, and glibc what was freed: by the gigabyte, if
  a thread freed it that does not ask for as much again.
  """
  gc.collect()
  try:
    trim = ctypes.CDLL(None).malloc_trim
  except (AttributeError, OSError, TypeError):
    return  # Another C library.
  trim(0)
