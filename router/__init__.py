"""The front door: HTTP and gRPC in, prefill and decode workers behind. Needs no GPU, torch, triton, nixl or ray.

admit -> render -> choose -> reserve -> prefill -> hand off -> decode -> stream -> settle; see dispatch.py.
"""
