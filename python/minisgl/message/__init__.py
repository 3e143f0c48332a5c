"""The structs on the wire, and the typed ZeroMQ sockets that carry them.

There is one module per receiver (`to_api`, ...), `shared` has what several of them receive, and `control` the pipe
between supervisor and workers. Every process owns one inbox (a PULL socket), into which others push. An inbox accepts a
union of tagged msgspec structs; anything else fails to decode. Token ids travel as little-endian int32 (`packed_ids`),
log-probabilities in columns (`logprobs`), the arrays of a plan as dtype, shape and bytes.
"""
