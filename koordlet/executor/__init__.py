"""The executor: the one writer of kernel files.

`executor` holds what is wanted and turns it into plans and writes; `slots` has the terms that all
of it uses; `files` plans cgroup files, in the order that `order` finds; `node_wide` plans sysctls,
resctrl groups and host directories; `tasks` plans what belongs to processes.
"""
