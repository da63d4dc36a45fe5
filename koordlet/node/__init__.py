"""This machine: what its kernel supports, its cgroup layout, its host applications, its lock."""
