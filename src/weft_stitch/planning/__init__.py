"""Chooses the form of each layer (``planner``) and the models that run together (``grouping``)."""
