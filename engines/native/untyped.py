"""The name for objects of `transformers`, which carry no useful types."""

from typing import Any

__all__ = ["Untyped"]

Untyped = Any
