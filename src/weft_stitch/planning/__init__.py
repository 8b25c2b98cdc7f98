"""Which form a layer takes (``planner``) and which models run together (``grouping``), by model or clock."""
