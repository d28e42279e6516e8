"""Decode steps of hybrid layers in C++, for the CPU that runs them: built when a model is loaded, kept on disk.

Each takes the place of several tensor operations on the few rows of a decode step, and has those as its reference in
the tests. Where there is no compiler the reference runs.
"""
