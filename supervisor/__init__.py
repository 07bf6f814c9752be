"""The control plane: owns, watches and decides; carries no client data, imports no torch."""

__version__ = "0.1.0"
