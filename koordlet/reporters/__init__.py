"""What the node writes to the cluster, or to files: NodeMetric, Device, NodeResourceTopology."""
