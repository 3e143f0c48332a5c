"""Request bodies: `read_body` reads the JSON, in the order of `parsing_turns`.

`request_body` declares the fields that generating routes share, `route_bodies` each route's body; `plain_prompts` and
`tools` interpret fields of several types. `list_query` reads the query of routes that list something, which have none.
"""
