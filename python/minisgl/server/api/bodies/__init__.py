"""What is asked: `body` reads the JSON, `schema` has all bodies and their fields; the others take fields apart."""
