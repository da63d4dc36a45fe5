"""The executor: the one writer of kernel files.

`executor` is the interface for other rooms. Inside:

- `slots`: the types that all files here share; `table`: the desired values and their states
- `judging`: compares observed with desired values; `originals`: the values from before koordlet
- `files`: plans cgroup files; `tree`: values that are ordered along the cgroup tree; `order`: the
  order of their writes; `texts`: values as the kernel writes them
- `node_wide`: plans sysctls, resctrl groups and host directories; `tasks`: values of processes
- `applying`: writes; `journal` and `records`: originals on disk; `views`: states for people
"""
