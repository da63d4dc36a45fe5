"""The HTTP/2 state machines against other people's: h2 and hpack."""
