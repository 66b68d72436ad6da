"""The form of every message between the engine process and its ranks."""

import msgspec


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """msgpack, an array that begins with the name of the class: small, and told apart without a look inside."""
