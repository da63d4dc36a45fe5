"""The machines that can be booted, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes` NUMA nodes share the sockets evenly, or the other way round."""

    name: str
    sockets: int
    cores: int  # per socket
    threads: int  # per core
    nodes: int
    memory_mib_per_node: int

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores * self.threads

    @property
    def memory_mib(self) -> int:
        return self.nodes * self.memory_mib_per_node

    def qemu(self) -> list[str]:
        """QEMU's arguments for processors and memory."""
        arguments = [
            "-smp",
            f"{self.cpus},sockets={self.sockets},cores={self.cores},threads={self.threads}",
            "-m",
            f"{self.memory_mib}M",
        ]
        share = self.cpus // self.nodes
        for node in range(self.nodes):
            first = node * share
            backend = f"memory-backend-ram,id=ram{node},size={self.memory_mib_per_node}M"
            arguments += ["-object", backend]
            cpus = f"{first}-{first + share - 1}"
            arguments += ["-numa", f"node,nodeid={node},memdev=ram{node},cpus={cpus}"]
        return arguments


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("1s2c", sockets=1, cores=2, threads=1, nodes=1, memory_mib_per_node=1024),
        Topology("2s2c2t", sockets=2, cores=2, threads=2, nodes=2, memory_mib_per_node=640),
        Topology("4n16c", sockets=4, cores=4, threads=1, nodes=4, memory_mib_per_node=384),
    )
}
