"""jaxthd: packed, context-parallel training of speech language models in JAX."""
