"""HTTP between clients and the application.

`server` accepts connections and `connection` speaks HTTP with limits on time and size. Around the application lie
`middleware`, `gates` (keys, origins, hosts) and `drain`; `request_head` tells them a request's route. `errors` has all
errors that clients see.
"""
