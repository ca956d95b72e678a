"""Which operation runs in which precision: levels, lists, scopes."""
