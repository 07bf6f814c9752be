"""Seeded simulation: the real core and runtime on a virtual clock, with fake processes."""
