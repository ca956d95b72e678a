"""Each pair of a writer and a reader of checkpoints: one inverts the other."""

import pytest

from optax_lossscale._rules.engine import Engine
from optax_lossscale.presets import _keys

ENGINE = Engine(
  init_scale=8.0,
  growth_factor=2.0,
  growth_interval=5,
  hysteresis=3,
  initial_clean_steps=-1,
)


@pytest.mark.parametrize("name", _keys.COUNTS)
def test_a_counter_is_read_as_it_was_written(name):
  count = _keys.COUNTS[name]
  for counter in range(3):
    written = count.write(counter, ENGINE, 7)
    assert count.read(written, ENGINE, 7) == counter


@pytest.mark.parametrize("make", _keys.READERS)
def test_an_argument_is_read_as_it_was_written(make):
  number = make(1)
  again = _keys.READERS[make](number)
  assert (again, type(again)) == (number, type(number))
