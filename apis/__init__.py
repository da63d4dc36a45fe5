"""The cluster API as typed objects: kinds, keys, quantities, QoS and priority. No I/O."""
