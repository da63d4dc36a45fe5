"""Messages written out byte by byte, as the wire carries them."""

REGISTER_REQUEST = bytes.fromhex("0a0c6b6f6f72646c65745f6e726912023030")
"""RegisterPluginRequest{plugin_name "koordlet_nri", plugin_idx "00"}."""

REGISTER_FRAME = bytes.fromhex(
    "00000002 00000052"
    "00000048 00000001 01 00"
    "0a1c6e72692e706b672e6170692e7631616c706861312e52756e74696d65"
    "120e5265676973746572506c7567696e"
    "1a120a0c6b6f6f72646c65745f6e726912023030"
    "2080e497d012"
)
"""The call of RegisterPlugin with 5 s to go, stream 1, on connection 2."""

REGISTER_REPLY_FRAME = bytes.fromhex("00000002 0000000a 00000000 00000001 02 00")
"""Its success: an empty envelope."""

CONFIGURE_FRAME = bytes.fromhex(
    "00000001 0000004f 00000045 00000001 01 00"
    "0a1b6e72692e706b672e6170692e7631616c706861312e506c7567696e"
    "1209436f6e666967757265"
    "1a15120a636f6e7461696e6572641a0776312e372e3232"
    "2080a8d6b907"
)
"""Configure from containerd v1.7.22 with 2 s to go, stream 1, on connection 1."""

CONFIGURE_REPLY_FRAME = bytes.fromhex("00000001 0000000f 00000005 00000001 02 00 1203108d01")
"""ConfigureResponse{events 0x8D}."""

UNIMPLEMENTED_FRAME = bytes.fromhex(
    "00000001 00000024 0000001a 00000005 02 000a18080c12146d6574686f642052756e506f6453616e64626f78"
)
"""Status 12 "method RunPodSandbox" on stream 5."""

CONTAINER_UPDATE = bytes.fromhex(
    "0a06616263313233 1216 0a14 1212 3203302d33 120b 08ffffffffffffffffff01"
)
"""ContainerUpdate{container_id "abc123", linux.resources.cpu{cpus "0-3", quota -1}}."""
