"""The base class of rules, the rules that count overflows, and their engine."""
