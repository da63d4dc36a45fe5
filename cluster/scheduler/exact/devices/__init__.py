"""Which devices of one node a pod gets: pure functions over frozen values."""
