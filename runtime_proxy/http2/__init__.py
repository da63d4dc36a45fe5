"""HTTP/2 as the proxy needs it: frames, header blocks and connections without I/O.

Bytes go in, bytes and events come out; sockets are the business of `runtime_proxy.server` and
`runtime_proxy.channel`. Facts: RFC 9113 (frames, flow control), RFC 7541 (HPACK) and the gRPC
protocol over HTTP/2.
"""
