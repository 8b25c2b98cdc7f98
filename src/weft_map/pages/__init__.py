"""Pages, pictures and numbers of mappings."""
