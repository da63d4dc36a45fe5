"""Dynamic QoS in the daemon: measuring, stepping strategies, evicting, showing."""
