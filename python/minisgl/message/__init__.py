"""The structs on the wire, and the typed ZeroMQ sockets that carry them.

There is one module per receiver, and `types` for what they share. Every process owns one inbox (a PULL socket) and
pushes into those of others. A union of tagged msgspec structs is what an inbox accepts; anything else fails to decode.
Token ids travel as packed little-endian int32, the arrays of a plan as dtype, shape and bytes.
"""
