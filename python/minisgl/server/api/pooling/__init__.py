"""Embeddings, scores and classes: `bodies` in the forms of OpenAI, vLLM, Jina and Cohere, their `jobs`, `answers`."""
