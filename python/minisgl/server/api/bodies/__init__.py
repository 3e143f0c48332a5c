"""Request bodies: `body` reads the JSON, `request_body` and `schema` declare fields, the others take them apart."""
