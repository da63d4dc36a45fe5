"""DeviceShare: GPUs, RDMA and FPGA devices, by minor and share."""
