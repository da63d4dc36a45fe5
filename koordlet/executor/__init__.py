"""The executor: the one writer of kernel files.

`executor` is the door. `slots` has the terms that all of it uses, `table` holds what is wanted;
`judging` reads what stands, `originals` knows what stood before, `files` plans cgroup files, along
the `tree` in the order that `order` finds, in the `texts` of the kernel; `node_wide` plans sysctls,
resctrl groups and host directories, `tasks` what belongs to processes; `applying` writes, and
`views` tells people.
"""
