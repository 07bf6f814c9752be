"""The control plane of Understudy: owns, watches and decides; carries no client data and imports no torch."""

__version__ = "0.1.0"
