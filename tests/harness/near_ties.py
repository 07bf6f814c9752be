"""The model of `chaos.near_ties`, as the system tests use it."""

from chaos.near_ties import make_near_tie_model

__all__ = ["make_near_tie_model"]
