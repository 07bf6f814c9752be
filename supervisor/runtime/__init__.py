"""The runtime: owns the processes, takes snapshots, performs what the core decides."""
