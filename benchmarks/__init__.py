"""Reproducible measurements. Each module is a program that writes into docs/benchmarks."""
