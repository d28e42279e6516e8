"""Simulated workers: the real pools, cache and protocol with a timing model in the model's place."""
