"""Devices of all nodes: what Device objects and bookings say, and requests for devices."""
