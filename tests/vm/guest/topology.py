"""Machines with high-bandwidth memory (HBM), and QEMU's arguments for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """A machine of `cpu_nodes` nodes with CPUs and DDR, then as many nodes with HBM alone.

    Node N + cpu_nodes has the HBM of node N. If `hbm_mib` is 0, there are no nodes with HBM. If
    `ddr_mib` is 0, the nodes with CPUs have the HBM, and there are no others (HBM-only mode). If
    `cache_mib` is not 0, the DDR of each node has a cache of this size, as in HBM's cache mode. In
    hybrid mode none is 0. QEMU only lists the cache in the firmware's tables, so the cache changes
    no speed.

    The firmware's tables (HMAT, SLIT) have the values that memkind and the kernel use: bandwidth,
    latency and distance from each node with CPUs to every node.
    """

    cpu_nodes: int
    cpus_per_node: int
    ddr_mib: int  # of each node
    hbm_mib: int
    cache_mib: int = 0

    def cpus(self, node: int) -> str:
        first = node * self.cpus_per_node
        return f"{first}-{first + self.cpus_per_node - 1}"

    def hbm_of(self, node: int) -> int:
        return node + self.cpu_nodes if self.ddr_mib else node

    @property
    def hbm_nodes(self) -> list[int]:
        return [self.hbm_of(node) for node in range(self.cpu_nodes)] if self.hbm_mib else []

    def arguments(self) -> list[str]:
        nodes = range(self.cpu_nodes + (len(self.hbm_nodes) if self.ddr_mib else 0))
        total = self.cpu_nodes * (self.ddr_mib + self.hbm_mib)
        arguments = ["-machine", "q35,hmat=on", "-m", f"{total}M"]
        arguments += ["-smp", str(self.cpu_nodes * self.cpus_per_node)]
        for node in nodes:
            size = self.hbm_mib if self.is_hbm(node) else self.ddr_mib
            arguments += ["-object", f"memory-backend-ram,id=ram{node},size={size}M"]
            owner = node % self.cpu_nodes
            cpus = f",cpus={self.cpus(node)}" if node < self.cpu_nodes else ""
            arguments += ["-numa", f"node,nodeid={node},memdev=ram{node},initiator={owner}{cpus}"]
        for a in nodes:
            for b in nodes:
                if a != b:
                    arguments += ["-numa", f"dist,src={a},dst={b},val={self.distance(a, b)}"]
        for initiator in range(self.cpu_nodes):
            for target in nodes:
                to = f"hmat-lb,initiator={initiator},target={target},hierarchy=memory"
                near = target % self.cpu_nodes == initiator
                bandwidth = (250 if self.is_hbm(target) else 50) // (1 if near else 2)
                latency = 100 if near else 200
                arguments += ["-numa", f"{to},data-type=access-latency,latency={latency}"]
                arguments += ["-numa", f"{to},data-type=access-bandwidth,bandwidth={bandwidth}G"]
        if self.cache_mib:
            cache = f"size={self.cache_mib}M,level=1,associativity=direct,policy=write-back,line=64"
            for node in range(self.cpu_nodes):
                arguments += ["-numa", f"hmat-cache,node-id={node},{cache}"]
        return arguments

    def is_hbm(self, node: int) -> bool:
        return node in self.hbm_nodes

    def distance(self, a: int, b: int) -> int:
        """A node's own HBM is its nearest HBM, and farther than the DDR of any node."""
        near = a % self.cpu_nodes == b % self.cpu_nodes
        if max(a, b) >= self.cpu_nodes:
            return 31 if near else 41
        return 21


TOPOLOGIES = {
    "hbm": Topology(cpu_nodes=1, cpus_per_node=2, ddr_mib=768, hbm_mib=192),
    # Sub-NUMA clustering: one socket in four quarters. Each quarter has its own HBM node.
    "snc4": Topology(cpu_nodes=4, cpus_per_node=1, ddr_mib=256, hbm_mib=192),
    "cache": Topology(cpu_nodes=1, cpus_per_node=2, ddr_mib=1024, hbm_mib=0, cache_mib=192),
    "hbm-only": Topology(cpu_nodes=2, cpus_per_node=1, ddr_mib=0, hbm_mib=480),
    "hybrid": Topology(cpu_nodes=1, cpus_per_node=2, ddr_mib=896, hbm_mib=128, cache_mib=64),
}
