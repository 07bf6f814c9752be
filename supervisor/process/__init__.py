"""Operating-system processes: spawn, watch by pidfd and exit flags, fence, adopt."""
