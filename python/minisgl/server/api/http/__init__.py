"""The server's side of a connection: HTTP and what clients may send when (`connection`), the way of a stream's events
past ASGI (`stream_body`), request ids and keys (`boundary`), and what clients are told of errors (`errors`).
"""
