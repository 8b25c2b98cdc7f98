"""Models on many machines: placed on them, routed to them, served through gates and by Ray."""
