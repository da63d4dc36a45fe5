"""This machine: its kernel's abilities, its cgroup layout, its host applications, its lock."""
