"""The server's side of a connection: HTTP and what clients may send when (`connection`), who may come in (`gates`),
the layers around the application (`middleware`), its begin and end (`server`), and the errors that clients see.
"""
