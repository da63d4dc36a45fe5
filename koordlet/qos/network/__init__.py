"""Network QoS: the bandwidths that a NodeSLO asks for, and the traffic classes made of them."""
