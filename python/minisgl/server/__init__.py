"""The server: the supervisor, which starts and watches all processes, and the API server (`api/`).

`start` reads the command line and finds the model, `listener` binds the address, and `supervisor` runs the processes.
It waits for them and, by `signal_socket`, for signals at the same time.
"""
