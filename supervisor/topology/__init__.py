"""The topology file: its types, loading, and checking with file, line and a hint."""

from supervisor.topology.findings import Finding, Severity
from supervisor.topology.loading import TopologyError, check, load
from supervisor.topology.schema import Topology

__all__ = ["Finding", "Severity", "Topology", "TopologyError", "check", "load"]
