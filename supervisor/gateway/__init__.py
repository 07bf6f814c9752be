"""The data plane: one process per worker, the only way in for clients.

Importing the package costs nothing: only the protocol's constants are here. The worker itself is
`python -m supervisor.gateway SPECFILE`.
"""

from supervisor.gateway.protocol import OVERHEAD_BUCKETS_S, TTFT_BUCKETS_S

__all__ = ["OVERHEAD_BUCKETS_S", "TTFT_BUCKETS_S"]
