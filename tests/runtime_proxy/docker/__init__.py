"""Docker mode: HTTP/1.1 framing, conversions, the process before a dockerd of our own."""
