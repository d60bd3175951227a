"""Kinds of adapters: in a model, in files of several programs, merged."""
